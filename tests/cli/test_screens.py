"""What `kvmesh status` and `kvmesh explain` show, from answers as services give them, at the widths of real screens."""

from __future__ import annotations

import io
import json
import re
import socket
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from kvmesh.cli import collect, explain, status
from kvmesh.cli.app import app
from kvmesh.cli.store import target as store_target
from kvmesh.rpc.pb import blocks_pb2, common_pb2, conductor_pb2, store_pb2


def printed(what: RenderableType, width: int) -> str:
    out = Console(width=width, file=io.StringIO(), highlight=False)
    out.print(what)
    text: str = out.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert "…" not in text, "nothing is cut"
    return "\n".join(lines)


# ── explain ───────────────────────────────────────────────────────────────────────────────────────


def candidate(name: str, score: float, local: int = 0, pull: int = 0, **more: Any) -> dict[str, Any]:
    role = "ROLE_DECODE" if name.startswith("decode") else "ROLE_PREFILL"
    terms = more.pop("terms", {"queue_ms": 0.0, "prefill_ms": score})
    return {
        "instance": {"instance_id": name}, "role": role, "chosen": False, "verdict": "", "score_ms": score,
        "terms": [{"name": key, "value": value} for key, value in terms.items()],
        "local_blocks": local, "pulled_blocks": pull, **more,
    }  # fmt: skip


def answer(*candidates: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "request_id": "3f2a", "attempt": 0, "model": "tiny", "outcome": "placed", "message": "", "prompt_tokens": 3010,
        "prompt_blocks": 47, "best_prefix_blocks": 40, "candidates": list(candidates), "age_ms": 5, "reported": False,
        "cached_tokens": 0, "prefill_ms": 0,
        "placement": {"predicted_ttft_ms": 20, "predicted_tbt_ms": 4, "predicted_cached_tokens": 2560}, **changes,
    }  # fmt: skip


HOLDS = candidate("prefill-1", 20.0, 40, chosen=True, verdict="chosen")
PULLS = candidate("prefill-0", 32.0, 0, 40, terms={"queue_ms": 50.0, "pull_ms": 3.0, "prefill_ms": 9.0})
LOADS = candidate(
    "prefill-1", 12.0, 10, loaded_blocks=30, tier="TIER_SSD", chosen=True, verdict="chosen",
    terms={"queue_ms": 0.0, "load_ms": 4.0, "prefill_ms": 8.0},
)  # fmt: skip
BELOW = candidate(
    "prefill-0", 20.0, 0, 40, loaded_blocks=0, tier="TIER_OBJECT", verdict="slower by 8.0 ms",
    terms={"queue_ms": 0.0, "pull_ms": 3.0, "load_ms": 9.0, "prefill_ms": 8.0},
)  # fmt: skip


@pytest.mark.parametrize(
    ("told", "lines"),
    [
        (
            answer(PULLS, HOLDS),
            [
                "prefill: prefill-1 wins by 12.0 ms: it holds 40 of 47 blocks, has nothing queued, needs 20.0 ms of "
                "prefill; prefill-0 holds none of the prompt's blocks, would pull 40 (3.0 ms), has 50.0 ms queued, "
                "needs 9.0 ms of prefill.",
            ],
        ),
        (
            answer({**PULLS, "chosen": True, "score_ms": 5.0}, {**HOLDS, "chosen": False}),
            [
                "prefill: prefill-0 wins by 15.0 ms: it holds none of the prompt's blocks, pulls 40 (3.0 ms), has "
                "50.0 ms queued, needs 9.0 ms of prefill; prefill-1 holds 40 of 47 blocks, has nothing queued, needs "
                "20.0 ms of prefill.",
            ],
        ),
        (
            answer({**HOLDS, "score_ms": 32.0}, PULLS),
            ["prefill: prefill-1 and prefill-0 were as good, and prefill-1 was drawn: it holds"],
        ),
        (
            answer(
                {**HOLDS, "score_ms": 32.01}, {**PULLS, "verdict": "as good: another was drawn by chance", "crowd": []}
            ),
            ["prefill: prefill-1 and prefill-0 were as good, and prefill-1 was drawn: it holds"],
        ),
        (
            answer(HOLDS, {**PULLS, "verdict": "as good: more requests there (3 against 1)", "crowd": [3.0, 0.5]}),
            [
                "prefill: prefill-1 and prefill-0 were as good, and prefill-1 was taken "
                "(prefill-0: more requests there (3 against 1)): it holds"
            ],
        ),
        (
            answer(
                {**HOLDS, "score_ms": 32.0},
                {**PULLS, "verdict": "over the TTFT SLO: 32.0 ms, at most 31.0", "crowd": []},
            ),
            [
                "prefill: prefill-1 was chosen though prefill-0 scores as much "
                "(over the TTFT SLO: 32.0 ms, at most 31.0): it holds"
            ],
        ),
        (
            answer({**HOLDS, "score_ms": 42.0}, {**PULLS, "verdict": "avoided"}),
            ["prefill: prefill-1 was chosen though prefill-0 scores 10.0 ms less (avoided): it holds"],
        ),
        (
            answer(HOLDS, candidate("prefill-0", 0, terms={}, verdict="not ready: loading")),
            ["prefill: prefill-1 was the only one that could take it (prefill-0 not ready: loading): it holds"],
        ),
        (
            answer(HOLDS, candidate("prefill-0", 0, terms={}, verdict="the policy round_robin took another")),
            ["prefill: the policy round_robin took prefill-1, not prefill-0: it holds"],
        ),
        (
            answer(
                candidate("decode-0", 4.4, 10, chosen=True, terms={"tbt_ms": 4.0}),
                candidate("decode-1", 15.0, terms={"tbt_ms": 10.0}),
            ),
            [
                "decode: decode-0 wins by 10.6 ms: it holds 10 of 47 blocks, is expected at 4.4 ms; decode-1 is "
                "expected at 15.0 ms.",
            ],
        ),
        (
            answer(candidate("prefill-0", 9000.0, verdict="over the SLO"), outcome="ttft", message="no room"),
            ["Refused (ttft): no room."],
        ),
        (answer(outcome="unavailable"), ["Refused (unavailable): no reason was told."]),
        (
            answer(LOADS, BELOW),
            [
                "prefill: prefill-1 wins by 8.0 ms: it holds 10 of 47 blocks, loads 30 out of its SSD (4.0 ms), has "
                "nothing queued, needs 8.0 ms of prefill; prefill-0 holds none of the prompt's blocks, would pull 40 "
                "out of object storage (3.0 ms), waits 9.0 ms for that to be read, has nothing queued, needs 8.0 ms",
            ],
        ),
        (
            answer(HOLDS),
            ["prefill: ", "Expected: TTFT 20 ms, TBT 4 ms, 2,560 cached tokens.", "Afterwards: prefill has not"],
        ),
        (
            answer(HOLDS, reported=True, cached_tokens=2560, prefill_ms=21),
            [
                "prefill: ",
                "Expected: ",
                "Afterwards: prefill took 21 ms and found 2,560 of 3,010 prompt tokens cached.",
            ],
        ),
    ],
)
def test_why_in_words(told: dict[str, Any], lines: list[str]) -> None:
    found = explain.sentences(told)
    assert len(found) >= len(lines)
    for line, start in zip(found, lines, strict=False):
        assert line.startswith(start), line


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_of_candidates(width: int) -> None:
    other = candidate("prefill-2", 0, terms={}, verdict="not ready: [loading]")
    decodes = [candidate("decode-0", 4.0, 3, chosen=True, verdict="chosen", terms={"tbt_ms": 4.0, "slot_wait_ms": 0.0})]
    text = printed(explain.screen(answer(PULLS, HOLDS, other, *decodes), width), width)
    rows = [line.split() for line in text.splitlines()]
    assert ["prefill", "holds", "pulls", "queue", "pulling", "prefill", "score", "verdict"] in rows
    assert ["→", "prefill-1", "40", "0", "0", "20.0", "20.0", "chosen"] in rows
    assert ["prefill-0", "0", "40", "50.0", "3.0", "9.0", "32.0"] in rows
    assert ["prefill-2", "0", "0", "not", "ready:", "[loading]"] in rows
    assert ["decode", "holds", "pulls", "tbt", "score", "verdict"] in rows, "a term that is 0 for all tells nothing"
    order = [row[0] if row[0] != "→" else row[1] for row in rows if row and any("prefill-" in word for word in row[:2])]
    assert order[:3] == ["prefill-1", "prefill-0", "prefill-2"]


def test_the_table_tells_of_lower_tiers_where_there_are_any() -> None:
    text = printed(explain.screen(answer(LOADS, BELOW), 120), 120)
    rows = [line.split() for line in text.splitlines()]
    heading = [
        "prefill",
        "holds",
        "pulls",
        "loads",
        "from",
        "queue",
        "loading",
        "prefill",
        "pulling",
        "score",
        "verdict",
    ]
    assert heading in rows
    assert ["→", "prefill-1", "10", "0", "30", "SSD", "0", "4.0", "8.0", "12.0", "chosen"] in rows
    assert "prefill-0      0     40      0  object storage" in text
    assert "loads:" not in printed(explain.screen(answer(PULLS, HOLDS), 120), 120)


def foretold(expected: float, low: float, high: float, samples: int) -> dict[str, Any]:
    return {"expected_ms": expected, "low_ms": low, "high_ms": high, "samples": samples}


@pytest.mark.parametrize(
    ("ttft", "measured_ms", "expected", "end"),
    [
        (foretold(20, 18.0, 31.0, 400), 30, "18.0 to 31.0 ms (8 of 10 like it)", "30.0 ms (as expected)"),
        (foretold(20, 18.0, 31.0, 400), 32, "18.0 to 31.0 ms", "32.0 ms (more than expected)"),
        (foretold(20, 18.0, 31.0, 8), 17, "18.0 to 31.0 ms", "17.0 ms (less than expected)"),
        (foretold(20, 20, 20, 3), 900, "20.0 ms (how sure is not known yet)", "900 ms"),
        (None, 900, "20 ms", "900 ms"),
    ],
)  # fmt: skip
def test_what_was_expected_is_an_interval_and_what_came_lies_in_it_or_not(
    ttft: dict[str, Any] | None, measured_ms: int, expected: str, end: str
) -> None:
    ended = {
        "outcome": "OUTCOME_DONE", "error": "", "blamed": "", "output_tokens": 8, "ttft_us": measured_ms * 1000,
        "tbt_us": 5000, "mean_tbt_us": 5000, "duration_us": 60_000,
    }  # fmt: skip
    more = {} if ttft is None else {"ttft": ttft, "tbt": foretold(4, 3.0, 6.0, 400)}
    lines = explain.sentences(answer(HOLDS, ended=ended, **more))
    (said,) = [line for line in lines if line.startswith("Expected: ")]
    assert said.startswith(f"Expected: TTFT {expected}")
    assert lines[-1].startswith(f"In the end: done: TTFT {end}, TBT 5.0 ms (its slowest tenth")
    if ttft is not None:
        assert "TBT 3.0 to 6.0 ms (8 of 10 like it)" in said and "(its slowest tenth, as expected)" in lines[-1]


def kind(name: str, prefill: str, decode: str, cost: float, verdict: str, **terms: float) -> dict[str, Any]:
    return {
        "kind": name, "prefill": {"instance_id": prefill}, "decode": {"instance_id": decode}, "cost_ms": cost,
        "chosen": verdict == "chosen", "verdict": verdict,
        "terms": [{"name": key, "value": value} for key, value in terms.items()],
    }  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_the_kinds_are_told_where_there_is_more_than_a_pair(width: int) -> None:
    told = answer(PULLS, HOLDS)
    pair = kind(
        "pair", "prefill-1", "decode-0", 52.0, "costs 10.0 ms more", ttft_ms=20.0, answer_ms=31.0, handoff_ms=1.0
    )
    told["kinds"] = [pair]
    assert "cost" not in printed(explain.screen(told, width), width)
    alone = kind("coupled", "c-0", "c-0", 42.0, "chosen", ttft_ms=9.0, rows=2.0, stall_ms=2.0, answer_ms=31.0)
    shut = kind("decode", "decode-1", "decode-1", 0, "computes at most 8 uncached tokens itself, of 900")
    told["kinds"] = [pair, alone, shut]
    rows = [line.split() for line in printed(explain.screen(told, width), width).splitlines()]
    assert ["kind", "on", "ttft", "rows", "stall", "answer", "handoff", "cost", "verdict"] in rows
    assert ["→", "coupled", "c-0", "9.0", "2.0", "2.0", "31.0", "0", "42.0", "chosen"] in rows
    words = " ".join(explain.sentences(told))
    assert "kind: coupled on c-0 costs 42.0 ms (TTFT 9.0 ms, 2 rows held up for 2.0 ms in all); pair on" in words
    assert "prefill-1 + decode-0 52.0 ms (TTFT 20.0 ms; costs 10.0 ms more)." in words
    told["kinds"] = [alone, shut]
    assert "decode on decode-1 computes at most 8" in " ".join(explain.sentences(told))


def test_the_answer_is_plain_json_with_numbers() -> None:
    message = conductor_pb2.ExplainResponse(
        request_id="a", candidates=[conductor_pb2.Candidate(terms=[conductor_pb2.Term(name="queue_ms", value=1.5)])]
    )
    message.candidates[0].instance.incarnation = 2**60 + 1
    message.placement.pulls.add(blocks=3)
    told = collect.plain(message)
    assert json.loads(json.dumps(told))["candidates"][0]["instance"]["incarnation"] == 2**60 + 1
    assert told["placement"]["pulls"][0]["blocks"] == 3
    assert (told["reported"], told["attempt"], told["message"]) == (False, 0, "")
    stores = collect.plain(store_pb2.GetStoreStatusResponse(blocks=2**40, stores=[store_pb2.StoreStatus(blocks=7)]))
    assert (stores["blocks"], stores["stores"][0]["blocks"]) == (2**40, 7)


# ── status ────────────────────────────────────────────────────────────────────────────────────────


def instance(name: str, model: str = "tiny", **load: int) -> dict[str, Any]:
    role = "ROLE_DECODE" if "decode" in name else "ROLE_PREFILL"
    hits = {f"{tier}_hit_tokens": 0 for tier in status.TIERS}
    return {
        "instance": {"instance_id": name}, "role": role, "model": model, "ready": True, "not_ready_reason": "",
        "silent_ms": 105, "load": {"queued_requests": 12, "prompt_tokens": 0, **hits, **load}, "pools": pools(),
    }  # fmt: skip


def pools(**changes: int) -> dict[str, int]:
    return {
        "pages_total": 4096, "pages_free": 4000, "pages_cached": 96, "extents_total": 4096, "extents_free": 4096,
        "handoffs": 0, "quarantined": 0, "store_blocks": 4001, "store_leases": 2, "pulls": 1, **changes,
    }  # fmt: skip


def node() -> dict[str, Any]:
    return {
        "pools": pools(), "evicted": 12345, "pulled_bytes": 5 << 20, "offloaded_blocks": 3,
        "capacity_bytes": 1 << 30, "shard_bytes": 1 << 18,
    }  # fmt: skip


def mesh(**changes: Any) -> dict[str, Any]:
    instances = [
        instance("prefill-0", prompt_tokens=1000, device_hit_tokens=500, host_hit_tokens=200, remote_hit_tokens=50),
        instance("decode-0"),
    ]
    names = ["prefill-0", "decode-0", "pool-0"]
    members = [
        {"instance": {"instance_id": name}, "role": f"ROLE_{name[:-2].upper()}", "store_id": name} for name in names
    ]
    return {
        "run": {"model": "tiny", "models": {"tiny": "/m"}, "url": "http://127.0.0.1:8000", "grpc": "127.0.0.1:8001",
                "run_dir": "/home/user/.local/state/kvmesh/runs/20260101-000000", "services": {}},
        "gateway": {"address": "127.0.0.1:30437", "ready": True, "not_ready_reason": "", "requests": 0, "streams": 1},
        "conductor": {"address": "127.0.0.1:11788", "instances": instances, "store_master": "connected"},
        "store": {"address": "127.0.0.1:14547", "members": members,
                  "map": {"term": 3, "leading": True, "blocks": 4500, "replicas": 9000, "map_bytes": 1 << 20,
                          "stores": [{"member": member, "blocks": 4001} for member in members]}},
        "node_stores": {name: node() for name in names},
        **changes,
    }  # fmt: skip


@pytest.mark.parametrize("width", [80, 120])
def test_a_mesh_on_the_screen(width: int) -> None:
    text = printed(status._screen(mesh(), width), width)
    rows = [line.split() for line in text.splitlines()]
    assert ["prefill-0", "prefill", "ready", "12", "0", "0", "4096/4096", "4096/4096", "105", "ms"] in rows
    role, more = (["prefill"], ["5.0", "MiB", "3", "4001"]) if width == 120 else ([], [])
    assert ["prefill-0", *role, "4001/4096", "50%", "20%", "5%", "75%", "2", "1", "12345", *more] in rows
    assert any(row[:1] == ["pool-0"] and row.count("-") == 4 for row in rows), "a pool node has no prompts"
    assert "hit rate  75.0% of 1,000 prompt tokens (device 50.0%, host 20.0%, remote 5.0%)" in text
    assert "map       4,500 distinct blocks, 9,000 replicas, 2.0 each; 1 pool node; the map" in text
    assert "the map itself takes 1.0 MiB of the store master's memory" in " ".join(text.split())
    assert len([row for row in rows if row[:1] == ["prefill-0"]]) == 2, "no row takes two lines"


def test_metrics_ports_of_a_run_are_told() -> None:
    told = mesh()
    told["run"]["services"] = {
        "gateway": {"address": "127.0.0.1:8001", "metrics": "127.0.0.1:20311"},
        "redis": {"address": "127.0.0.1:6379", "metrics": ""},
        "decode-0": {"address": "127.0.0.1:9001", "metrics": "127.0.0.1:20312"},
    }
    text = printed(status._screen(told, 160), 160)
    assert "metrics (Prometheus): gateway 127.0.0.1:20311, decode-0 127.0.0.1:20312" in text
    assert "metrics" not in printed(status._screen(mesh(), 160), 160)


def test_every_store_master_has_a_row() -> None:
    found = mesh()
    found["run"]["services"] = {"store-1": {"address": "127.0.0.1:2", "restarts": 4}}
    found["store"]["masters"] = [
        {"address": "127.0.0.1:14547", "leading": True, "leader": "127.0.0.1:14547", "term": 3},
        {"address": "127.0.0.1:2", "leading": False, "leader": "127.0.0.1:14547", "term": 3},
        {"address": "127.0.0.1:3", "error": "it is gone"},
    ]
    text = printed(status._screen(found, 120), 120)
    rows = [line.split() for line in text.splitlines() if line.startswith("store ")]
    assert rows == [
        ["store", "127.0.0.1:14547", "ready", "leads,", "term", "3,", "3", "members"],
        ["store", "127.0.0.1:2", "standby", "4", "leader:", "127.0.0.1:14547"],
        ["store", "127.0.0.1:3", "no", "answer", "it", "is", "gone"],
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_several_models_have_a_column(width: int) -> None:
    found = mesh()
    found["conductor"]["instances"].append(instance("two-prefill-0", "org/two"))
    found["node_stores"]["two-prefill-0"] = node()
    text = printed(status._screen(found, width), width)
    role = ["prefill"] if width == 120 else []
    assert [line for line in text.splitlines() if line.split()[: 2 + len(role)] == ["two-prefill-0", *role, "org/two"]]


@pytest.mark.parametrize(
    ("shard_bytes", "blocks", "slabs", "shown"),
    [(1 << 18, 64, 80, "64/4096"), (0, 0, 0, "0 in 1,024 MiB"), (0, 4001, 4096, "4001 in 1,024 MiB")],
)
def test_a_pool_node_tells_all_its_memory(shard_bytes: int, blocks: int, slabs: int, shown: str) -> None:
    found = mesh()
    told = found["node_stores"]["pool-0"]
    told.update(shard_bytes=shard_bytes, pools=pools(store_blocks=blocks, extents_total=slabs))
    assert re.search(rf"^pool-0 +{shown} ", printed(status._screen(found, 80), 80), re.M)


@pytest.mark.parametrize("width", [80, 120])
def test_lower_tiers_are_shown_where_there_are_any(width: int) -> None:
    assert "misses" not in printed(status._screen(mesh(), width), width)
    found = mesh()
    ssd = collect.plain(
        blocks_pb2.TierCounters(
            tier=common_pb2.TIER_SSD,
            capacity_bytes=1 << 32,
            used_bytes=5 << 20,
            blocks=1234,
            hits=70,
            misses=30,
            read_ns=2_500_000,
            bytes_per_s=800 << 20,
        )
    )
    found["node_stores"]["prefill-0"]["tiers"] = [ssd]
    found["node_stores"]["prefill-0"]["transports"] = "shm; not tcp: [untrusted]"
    found["node_stores"]["pool-0"]["tiers"] = [{**ssd, "bytes_per_s": 0, "why_not": "disk [full]"}]
    expected = collect.plain(
        conductor_pb2.InstanceStatus(
            tiers=[conductor_pb2.IndexedTier(usage=store_pb2.TierUsage(tier=common_pb2.TIER_SSD), expected_ms=1.25)]
        )
    )
    found["conductor"]["instances"][0]["tiers"] = expected["tiers"]
    text = printed(status._screen(found, width), width)
    rows = [line.split() for line in text.splitlines()]
    row = ["ssd", "1,234", "5.0", "MiB", "4,096.0", "MiB", "70", "30"]
    assert ["prefill-0", *row, "1.25", "800"] in rows
    assert any(found[:11] == ["pool-0", *row, "2.50", "-"] for found in rows)
    assert "[full]" in text
    assert "transports of all: shm; not tcp: [untrusted]" in " ".join(text.split())


def error(what: str, p50: float, p90: float, bias: float, samples: int, group: str = "tiny") -> dict[str, Any]:
    return {"what": what, "group": group, "p50": p50, "p90": p90, "p99": p90, "bias": bias, "samples": samples}


@pytest.mark.parametrize("width", [80, 120])
def test_predictions_are_told_in_plain_words(width: int) -> None:
    assert "predictions" not in printed(status._screen(mesh(), width), width)
    found = mesh()
    found["conductor"]["group_errors"] = [
        error("prefill", 0.02, 0.1, 0.01, 1),
        error("transfer", 14.42, 34.88, 9.0, 3000),
        error("ttft", 0.18, 0.55, 0.10, 412),
        error("output_tokens", 0.5, 0.9, -0.4, 40),
    ]
    text = " ".join(printed(status._screen(found, width), width).split())
    said = [
        "predictions against what happened in the last 10 minutes",
        "time to first token usually within 18%, 9 of 10 within 55%; runs 10% longer than predicted (412 requests)",
        "length of answers usually within 50%, 9 of 10 within 90%; runs 40% shorter than predicted (40 answers)",
        "computing a prompt usually within 2%, 9 of 10 within 10% (1 prompt)",
        "sending KV to decode usually within a factor of 15.4, 9 of 10 within a factor of 35.9; "
        "runs 10.0 times as long as predicted (3,000 prompts)",
    ]
    if width == 120:
        assert " ".join(said) in text
    for line in said:  # where it is narrow words of one column stand between those of the other
        assert set(line.split()) <= set(text.split())
    found["conductor"]["group_errors"] = [
        error("ttft", 0.1, 0.2, 0.0, 9),
        error("ttft", 0.3, 0.4, 0.0, 9, "tiny coupled"),
    ]
    text = printed(status._screen(found, 120), 120)
    told = re.findall(r"^(predictions|time to first token) +(\S+ \S+ \S+)", text, re.M)
    assert told == [
        ("predictions", "of tiny, against"),
        ("time to first token", "usually within 10%,"),
        ("predictions", "of tiny coupled,"),
        ("time to first token", "usually within 30%,"),
    ]


def test_what_predictions_are_worth_knows_the_conductor_that_has_compared_most() -> None:
    """That is the one which places, and not always the one that leads."""
    leader = {"group_errors": [error("prefill", 0.1, 0.2, 0.0, 90)], "errors": [error("ttft", 9.0, 9.0, 0.0, 900)]}
    placing = {"errors": [error("prefill", 0.3, 0.4, 0.0, 80), error("ttft", 0.5, 0.6, 0.0, 70)]}  # of before
    merged = {one["what"]: one["p50"] for one in collect._errors([leader, {"error": "gone"}, placing])}
    assert merged == {"prefill": 0.1, "ttft": 0.5}


def test_what_an_instance_has_in_hand_never_breaks_its_row() -> None:
    found = mesh()
    for number in range(2):
        busy = instance(f"second-prefill-{number}", "second")
        busy["pools"] = pools(handoffs=2)
        found["conductor"]["instances"].append(busy)
    text = printed(status._screen(found, 80), 80)
    assert "\nsecond-prefill-1: 2 handoffs" in text
    assert re.search(r"^second-prefill-1 +second +ready .* 105 ms$", text, re.M)
    assert re.search(
        r"^second-prefill-1 +prefill +second .* 105 ms +2 handoffs$", printed(status._screen(found, 120), 120), re.M
    )


def test_a_status_that_takes_long_says_what_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_target, "PATIENCE_S", 0.05)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes the connection and never says a word
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        told = CliRunner().invoke(app, ["status", "--conductor", address])
    assert told.exit_code == 1 and f"asking {address} ..." in told.stderr and "no answer" in told.stdout


def test_what_does_not_answer_is_told() -> None:
    found = mesh()
    found["node_stores"]["pool-0"] = {"error": "127.0.0.1:1: [refused]"}
    found["store"]["map"] = {"error": "GetStatus failed"}
    text = printed(status._screen(found, 80), 80)
    assert "pool-0: 127.0.0.1:1: [refused]" in text
    assert "map       GetStatus failed" in text
    found["conductor"] = {"address": "127.0.0.1:1", "error": "nobody there"}
    assert "nobody there" in printed(status._screen(found, 80), 80)


def test_hit_rates_of_all_instances_together() -> None:
    loads = [
        instance("prefill-0", prompt_tokens=300, device_hit_tokens=30),
        instance("prefill-1", prompt_tokens=100, host_hit_tokens=50),
    ]
    assert status.hit_rates(loads) == {"prompt_tokens": 400, "device": 0.075, "host": 0.125, "remote": 0.0, "all": 0.2}
    assert status.hit_rates([]) == {"prompt_tokens": 0, "device": 0.0, "host": 0.0, "remote": 0.0, "all": 0.0}
