"""Forms that are made to cost much are refused by constant bounds, or compile; nothing else escapes."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.build import json_schema_grammar, lark_grammar, regex_grammar
from scripts.json_schema_suite import accepts
from tests.support.hostile_forms import GRAMMARS, REGEXES, SCHEMAS


def refusal(form: str, name: str) -> InvalidRequest | None:
    try:
        if form == "schema":
            json_schema_grammar(SCHEMAS[name](), strict=True, field="f")
        elif form == "regex":
            regex_grammar(REGEXES[name], "f")
        else:
            lark_grammar(GRAMMARS[name], "f")
    except InvalidRequest as err:
        return err
    return None


@pytest.mark.parametrize(("form", "table", "compiled"), [
    ("schema", SCHEMAS, 10), ("regex", REGEXES, 4), ("grammar", GRAMMARS, 4),
])  # fmt: skip
def test_hostile_forms_are_bounded(form: str, table: dict[str, object], compiled: int) -> None:
    refusals = {name: refusal(form, name) for name in table}
    refused = [err for err in refusals.values() if err is not None]
    assert len(table) - len(refused) == compiled, refusals
    assert all(str(err.field).startswith("f") and len(err.message) < 600 for err in refused)


def test_what_passes_the_bound_of_a_row_can_be_written() -> None:
    """One optional property more and the parser would give up in mid-answer (bounds.MAX_ROW)."""
    schema: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(373)}}
    grammar = json_schema_grammar(schema, strict=True, field="f")
    assert accepts(grammar, "{" + ",".join(f'"p{i}":{i}' for i in range(373)) + "}")
    with pytest.raises(InvalidRequest, match="too many optional properties"):
        json_schema_grammar({**schema, "properties": {**schema["properties"], "q": {}}}, strict=True, field="f")
