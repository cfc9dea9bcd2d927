"""Forms that are made to cost much are refused by constant bounds, or compile; nothing else escapes."""

from __future__ import annotations

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars import json_schema_grammar, lark_grammar, regex_grammar
from tests.support.hostile_forms import GRAMMARS, REGEXES, SCHEMAS


def outcome(form: str, name: str) -> str:
    try:
        if form == "schema":
            json_schema_grammar(SCHEMAS[name](), strict=True, field="f")
        elif form == "regex":
            regex_grammar(REGEXES[name], "f")
        else:
            lark_grammar(GRAMMARS[name], "f")
    except InvalidRequest as err:
        assert err.field is not None
        assert err.field.startswith("f")
        assert len(err.message) < 600
        return "refused"
    return "compiled"


@pytest.mark.parametrize(("form", "table", "compiled"), [
    ("schema", SCHEMAS, 10), ("regex", REGEXES, 4), ("grammar", GRAMMARS, 4),
])  # fmt: skip
def test_hostile_forms_are_bounded(form: str, table: dict[str, object], compiled: int) -> None:
    outcomes = {name: outcome(form, name) for name in table}
    assert list(outcomes.values()).count("compiled") == compiled, outcomes
