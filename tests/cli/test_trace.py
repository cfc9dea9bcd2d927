"""`kvmesh trace`: spans of many files become one tree."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.cli.trace import _table, find_trace, whole
from kvmesh.cli.trace_svg import drawing
from kvmesh.cli.trace_tree import coverage, trees
from kvmesh.errors import InvalidRequest

TRACE = "ab" * 16


def span(
    name: str, own: str, parent: str, start: int, end: int, service: str = "decode", **more: Any
) -> dict[str, Any]:
    ms = 1_000_000
    found = {
        "name": name, "trace_id": TRACE, "span_id": own, "parent": parent, "start_ns": start * ms, "end_ns": end * ms,
        "service": service, "instance": f"{service}-0", "attributes": {}, "status": "",
    }  # fmt: skip
    return {**found, **more}


SPANS = [
    span("kvmesh.request", "b", "a", 12, 90, attributes={"kvmesh.request_id": "r-1"}),
    span("kvmesh.transfer", "d", "c", 30, 60, "prefill", attributes={"kvmesh.transfer.bytes": 4096}, status="late"),
    span("kvmesh.prefill", "c", "b", 20, 61, "prefill"),
    span("kvmesh.tokenize", "e", "a", 1, 3, "gateway"),
    span("chat demo", "a", "ff", 0, 100, "gateway"),
    span("chat demo", "z", "", 0, 10, "gateway", trace_id="cd" * 16, attributes={"kvmesh.request_id": "r-0"}),
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "traces").mkdir()
    (tmp_path / "mesh.json").write_text(json.dumps({"pid": 0, "services": {}}))
    for index, one in enumerate(SPANS):
        with (tmp_path / "traces" / f"{one['service']}-{index % 2}.jsonl").open("a") as file:
            file.write(json.dumps(one) + "\n")
    with (tmp_path / "traces" / "decode-0.jsonl").open("a") as file:
        file.write('{"name": "half a li')
    return tmp_path


def test_the_tree_follows_parents_and_time() -> None:
    (root,) = trees([one for one in SPANS if one["trace_id"] == TRACE])
    assert root.span["name"] == "chat demo"
    assert [child.span["name"] for child in root.children] == ["kvmesh.tokenize", "kvmesh.request"]
    assert root.children[1].children[0].children[0].span["name"] == "kvmesh.transfer"


@pytest.mark.parametrize("wanted", ["r-1", "chatcmpl-r-1", "cmpl-r-1", TRACE[:8], TRACE])
def test_a_trace_is_found_by_each_of_its_names(wanted: str) -> None:
    assert len(find_trace(SPANS, wanted)) == 5


@pytest.mark.parametrize("wanted", ["r-2", "ab", ""])
def test_a_name_that_nothing_has_is_refused(wanted: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id="):
        find_trace(SPANS, wanted)


def test_the_screen_shows_a_tree_with_times_and_errors(run: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "r-1", "--run-dir", str(run)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == f"trace {TRACE}, 5 spans"
    names = [found[0] for line in lines[2:] if (found := re.search(r"chat demo|kvmesh\.\w+", line))]
    assert names == ["chat demo", "kvmesh.tokenize", "kvmesh.request", "kvmesh.prefill", "kvmesh.transfer"]
    transfer = next(line for line in lines if "kvmesh.transfer" in line)
    assert re.search(r"└─ kvmesh\.transfer +prefill-0 +30\.0 ms +30\.0 ms .*━+ .*4 KiB late", transfer)


def test_a_trace_is_whole_when_decode_has_told_and_no_parent_is_missing() -> None:
    first = [one for one in SPANS if one["trace_id"] == TRACE]
    assert whole(first)
    placed = [*first, span("kvmesh.place", "p", "a", 4, 5, "conductor")]
    assert whole(placed)
    for missing in "abc":  # the gateway's, decode's, prefill's parent of another
        assert not whole([one for one in placed if one["span_id"] != missing])
    assert not whole([one for one in placed if one["service"] in ("gateway", "conductor")])
    assert whole([one for one in first if one["service"] == "gateway"]), "refused before it was placed"


def test_a_narrow_terminal_keeps_names_and_numbers() -> None:
    out = Console(width=80, force_terminal=True, color_system=None, file=io.StringIO())
    out.print(_table(trees([one for one in SPANS if one["trace_id"] == TRACE]), out))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"└─ kvmesh\.transfer +prefill-0 +30\.0 ms +30\.0 ms .*4 KiB late", text), text
    assert "…" not in text


def test_what_is_piped_is_not_cut(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(app, ["trace", "r-1", "--run-dir", str(run)]).output
    assert "…" not in output
    assert "4 KiB late" in output


def test_spans_of_services_that_were_not_started_by_up(run: Path, tmp_path: Path) -> None:
    folder = str(run / "traces")
    result = CliRunner().invoke(app, ["trace", "r-1", "--trace-dir", folder])
    assert result.output.splitlines()[0] == f"trace {TRACE}, 5 spans"
    for more, why in (([folder, "--run-dir", str(run)], "not with --run-dir"), ([f"{folder}-"], "no such folder")):
        assert why in CliRunner().invoke(app, ["trace", "--last", "--trace-dir", *more]).output


def test_a_folder_that_is_not_there_is_named_before_a_missing_id(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "--trace-dir", str(tmp_path / "nowhere")])
    assert result.exit_code == 2 and "nowhere': no such folder" in "".join(result.output.splitlines())
    result = CliRunner().invoke(app, ["trace", "--trace-dir", str(run / "traces")])
    assert result.exit_code == 2 and "name a request id, or give --last" in result.output


def test_it_is_said_that_the_mesh_has_stopped(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(run))
    (run / "kvmesh").mkdir()
    (run / "kvmesh" / "latest").symlink_to(run)
    result = CliRunner().invoke(app, ["trace", "r-1"])
    assert result.stdout.splitlines()[0] == f"trace {TRACE}, 5 spans"
    assert f"of the mesh of {run}, which has stopped" in result.stderr


def test_last_is_the_request_that_ended_last(run: Path) -> None:
    result = CliRunner().invoke(app, ["trace", "--last", "--json", "--run-dir", str(run)])
    found = [json.loads(line) for line in result.output.splitlines()]
    assert [one["span_id"] for one in found] == ["a", "e", "b", "c", "d"]


def test_a_trace_waits_for_what_its_holder_has_to_say() -> None:
    first = [one for one in SPANS if one["trace_id"] == TRACE]
    fetch = span("kvmesh.fetch", "f", "c", 21, 29, "prefill")
    lease = span("kvmesh.lease", "l", "f", 22, 23, "pool", attributes={"kvmesh.lease.blocks": 2})
    assert not whole([*first, lease]), "its parent is missing"
    assert not whole([*first, fetch, lease])
    assert whole([*first, fetch, lease, span("kvmesh.serve", "v", "f", 23, 28, "pool")])
    nothing = {**lease, "attributes": {"kvmesh.lease.blocks": 0}}
    assert whole([*first, fetch, nothing]), "who holds nothing serves nothing"


FIRST_TOKEN = {"gen_ai.operation.name": "chat", "kvmesh.ttft_ms": 60.0}
ROOT = span("chat demo", "a", "ff", 0, 100, "gateway", attributes=FIRST_TOKEN)
OF_ROOT = [one for one in SPANS if one["trace_id"] == TRACE and one["span_id"] != "a"]


def test_the_time_to_the_first_token_that_no_span_explains_is_named() -> None:
    (root,) = trees([ROOT, *OF_ROOT])
    told = coverage([root])
    assert told is not None and (told.what, told.ns) == ("TTFT", 60_000_000)
    # 0 to 1, 3 to 30 (request and prefill have a span below them, but later), and none after 30.
    assert told.untold_ns == 28_000_000
    assert [(gap.ns, gap.inside.name, gap.after, gap.before) for gap in told.gaps] == [
        (1_000_000, "chat demo", "", "kvmesh.tokenize"),
        (27_000_000, "chat demo", "kvmesh.tokenize", "kvmesh.transfer"),
    ]
    failed = {**ROOT, "attributes": {"gen_ai.operation.name": "chat"}}
    told = coverage(trees([failed, *OF_ROOT]))
    assert told is not None and (told.what, told.untold_ns, told.gaps[-1].before) == ("request", 68_000_000, "")
    assert coverage(trees([{**ROOT, "attributes": {}}])) is None, "a program's own trace has no TTFT"


def test_the_gap_in_an_inner_span_is_that_span_s() -> None:
    spans = [ROOT, *(one for one in OF_ROOT if one["name"] != "kvmesh.tokenize")]
    spans += [span("kvmesh.tokenize", "t", "a", 0, 20, "gateway"), span("kvmesh.queue", "q", "c", 20, 24, "prefill")]
    told = coverage(trees(spans))
    assert told is not None
    assert [(gap.ns, gap.inside.name) for gap in told.gaps] == [(6_000_000, "kvmesh.prefill")]


def test_the_screen_and_the_picture_show_gaps_and_an_axis(run: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    hostile = span("<script>", "h", "a", 1, 3, "pool", instance="a&b")
    lines = "".join(json.dumps(one) + "\n" for one in (ROOT, *OF_ROOT, hostile))
    (tmp_path / "own" / "all.jsonl").write_text(lines)
    picture = tmp_path / "trace.svg"
    options = ["trace", TRACE, "--trace-dir", str(tmp_path / "own"), "--svg"]
    output = CliRunner().invoke(app, [*options, str(picture)]).output
    assert re.search(r"took +0 +50 ms", output)
    assert "TTFT 60.0 ms, of which 28.0 ms (46.7%) in no span" in output
    assert "  27.0 ms from 3.0 ms on, in chat demo (gateway-0): after kvmesh.tokenize, before kvmesh.transfer" in output
    tree = ElementTree.fromstring(picture.read_text())
    texts = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert {"<script>", "a&b", "request", "100 ms", "TTFT 60.0 ms, 53.3% of it in named spans"} <= set(texts)
    assert sum(node.get("class") == "gap" for node in tree.iter("{http://www.w3.org/2000/svg}rect")) == 2
    assert "svg='/nowhere/x'" in CliRunner().invoke(app, [*options, "/nowhere/x"]).output


def test_a_stage_of_a_pipeline_is_one_row_with_its_chunks(tmp_path: Path) -> None:
    """Busy where chunks are, idle between; the picture says of each chunk which tokens it has."""
    stage = {"kvmesh.stage.number": 1, "kvmesh.stage.busy_ms": 20.0, "kvmesh.stage.idle_ms": 4.0}
    spans = [ROOT, *OF_ROOT, span("kvmesh.stage", "s", "c", 20, 60, "prefill", attributes=stage)]
    for number, (start, end) in enumerate(((20, 30), (50, 60))):
        told = {"kvmesh.chunk.start": 512 * number, "kvmesh.chunk.end": 512 * number + 512, "kvmesh.stage.idle_ms": 2.0}
        spans.append(span("kvmesh.chunk", f"k{number}", "s", start, end, "prefill", attributes=told))
    out = Console(width=160, force_terminal=True, color_system=None, file=io.StringIO())
    out.print(_table(trees(spans), out))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    [row] = [line for line in text.splitlines() if "kvmesh.stage 1" in line]
    assert re.search(r"[^━]━+╌+━+ +busy=20\.0 ms idle=4\.0 ms", row), row
    assert "kvmesh.chunk" not in text
    tree = ElementTree.fromstring(drawing(TRACE, trees(spans)))
    assert "stage 1" in [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    titles = [node.text or "" for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert [one for one in titles if "tokens" in one] == [
        "tokens 0 to 512: 10.0 ms, idle before 2.0 ms", "tokens 512 to 1024: 10.0 ms, idle before 2.0 ms"
    ]  # fmt: skip
