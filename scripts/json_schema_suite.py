"""Runs JSON Schema's official test suite (draft 2020-12) against the gateway's grammars and prints counts by keyword.

    python -m scripts.json_schema_suite FOLDER

FOLDER holds the suite's `tests`: its repository, the `json` folder of jsonschema's source package, or what
`scripts/fetch_json_schema_suite.sh .venv` takes from there (`.venv/json-schema-suite`). Every instance is written
compactly and with spaces, with and without \\uXXXX escapes. The command fails if the grammar of an accepted schema
accepts an invalid instance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.build import json_schema_grammar
from kvmesh.services.gateway.text.grammars.compiler import matcher

DRAFT = "draft2020-12"


@dataclass
class KeywordCounts:
    """Of one file of the suite: schemas accepted and refused, and the accepted ones' instances."""

    schemas: int = 0
    refused: int = 0
    valid: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Valid instances that no way of writing them makes the grammar accept, by reason."""
    invalid: int = 0
    wrong: list[str] = field(default_factory=list)
    """Invalid instances that the grammar accepts: must stay empty."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Refused schemas by what was said."""


def suite_folder(folder: Path) -> Path | None:
    """The draft's folder inside of `folder`, or None."""
    for one in (folder / "tests" / DRAFT, folder / DRAFT, folder / "json" / "tests" / DRAFT):
        if one.is_dir():
            return one
    return None


def run_suite(folder: Path) -> dict[str, KeywordCounts]:
    """Counts by the suite's files, named relative to the draft's folder."""
    counts = {}
    for path in sorted(folder.rglob("*.json")):
        one = counts[str(path.relative_to(folder).with_suffix(""))] = KeywordCounts()
        for case in json.loads(path.read_text()):
            _run_case(case, one)
    return counts


def _run_case(case: dict[str, Any], counts: KeywordCounts) -> None:
    try:
        grammar = json_schema_grammar(case["schema"], strict=True, field="schema")
    except InvalidRequest as err:
        counts.refused += 1
        counts.reasons[err.message.rpartition(": ")[2]] += 1
        return
    counts.schemas += 1
    for test in case["tests"]:
        taken = any(accepts(grammar, text) for text in _written(test["data"]))
        if test["valid"] and taken:
            counts.valid += 1
        elif test["valid"]:
            counts.rejected[_why_rejected(grammar, test["data"])] += 1
        elif taken:
            counts.wrong.append(f"{json.dumps(case['schema'])} accepts {json.dumps(test['data'])}")
        else:
            counts.invalid += 1


def accepts(grammar: str, text: str) -> bool:
    """Whether `text` as a whole meets `grammar`."""
    one = matcher(grammar)
    data = list(text.encode("utf-8", "surrogatepass"))
    return one.try_consume_tokens(data) == len(data) and one.is_accepting()


def _written(value: Any) -> Iterator[str]:
    for ascii_only in (False, True):
        for separators in ((",", ":"), (", ", ": ")):
            yield json.dumps(value, separators=separators, ensure_ascii=ascii_only)


def _why_rejected(grammar: str, value: Any) -> str:
    if any(accepts(grammar, text) for text in _written(_whole(value))):
        return "1.0 for an integer"
    if any(accepts(grammar, text) for other in _reordered(_whole(value)) for text in _written(other)):
        return "order of properties"
    if any(ord(char) < 32 or ord(char) == 127 for char in json.loads(json.dumps(str(value)))):
        return "control character"
    return "narrower"


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _reordered(value: Any) -> Iterator[Any]:
    if isinstance(value, dict) and len(value) <= 5:
        for keys in itertools.permutations(value):
            yield {key: value[key] for key in keys}
    elif isinstance(value, list):
        for parts in itertools.product(*([one, *_reordered(one)] for one in value)):
            yield list(parts)


def print_counts(counts: dict[str, KeywordCounts], *, files: bool = True) -> None:
    """Prints a row for each file, unless `files` is False, the total, and each invalid instance that was accepted."""
    print(f"{'file':42} {'schemas':>7} {'refused':>7} {'valid':>6} {'rejected':>8} {'invalid':>7} {'WRONG':>5}")
    total = KeywordCounts()
    for name, one in counts.items():
        if files:
            _print_row(name, one)
        for key in ("schemas", "refused", "valid", "invalid"):
            setattr(total, key, getattr(total, key) + getattr(one, key))
        total.rejected += one.rejected
        total.wrong += one.wrong
    _print_row("all", total)
    for text in total.wrong:
        print("WRONG", text)


def _print_row(name: str, one: KeywordCounts) -> None:
    why = ", ".join(f"{number} {reason}" for reason, number in one.rejected.items())
    print(
        f"{name:42} {one.schemas:7} {one.refused:7} {one.valid:6} {one.rejected.total():8} {one.invalid:7} "
        f"{len(one.wrong):5}  {why}".rstrip()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reasons", action="store_true", help="print why schemas were refused")
    given = parser.parse_args()
    folder = suite_folder(given.folder)
    if folder is None:
        print(f"{given.folder}: holds no tests/{DRAFT}", file=sys.stderr)
        return 2
    counts = run_suite(folder)
    print_counts(counts)
    if given.reasons:
        for name, one in counts.items():
            for reason, number in one.reasons.items():
                print(f"{name}: {number} refused: {reason}")
    return 1 if any(one.wrong for one in counts.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
