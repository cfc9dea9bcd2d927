"""Random walks through the masks of bounded schemas end within their bound, and what they write is valid."""

from __future__ import annotations

import json
import random

import jsonschema  # type: ignore[import-untyped]
import pytest

from kvmesh.services.gateway.text.grammars.build import json_schema_grammar
from kvmesh.services.gateway.text.grammars.compiler import END, matcher
from tests.support.random_schemas import bounded_schema

Validator = jsonschema.Draft202012Validator


def walk(grammar: str, rng: random.Random, most: int) -> bytes:
    """An answer of a model that chooses evenly among the allowed bytes."""
    one = matcher(grammar)
    written = bytearray()
    while not one.is_stopped():
        mask = one.compute_bitmask()
        allowed = [token for token in range(END + 1) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, bytes(written)
        token = rng.choice(allowed)
        if token == END:
            break
        assert one.consume_token(token)
        written.append(token)
        assert len(written) <= most
    return bytes(written)


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_random_walks_end_and_validate(first: int) -> None:
    for seed in range(first, first + 30):
        bounded = bounded_schema(seed)
        grammar = json_schema_grammar(bounded.schema, strict=True, field="schema")
        validator = Validator(bounded.schema, format_checker=Validator.FORMAT_CHECKER)
        rng = random.Random(seed)
        for _ in range(3):
            validator.validate(json.loads(walk(grammar, rng, bounded.max_bytes)))


def test_a_seed_is_one_schema() -> None:
    assert bounded_schema(7) == bounded_schema(7)
    assert len({json.dumps(bounded_schema(seed).schema) for seed in range(50)}) > 45
