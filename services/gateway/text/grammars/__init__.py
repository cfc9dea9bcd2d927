"""From what clients ask of an answer's form to a grammar that llguidance compiles."""

from kvmesh.services.gateway.text.grammars.asked import AskedForm, asked_form
from kvmesh.services.gateway.text.grammars.build import (
    choice_grammar,
    combined,
    form_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    or_text,
    regex_grammar,
)

__all__ = [
    "AskedForm",
    "asked_form",
    "choice_grammar",
    "combined",
    "form_grammar",
    "json_object_grammar",
    "json_schema_grammar",
    "lark_grammar",
    "or_text",
    "regex_grammar",
]
