"""`kvmesh profile`: what is made of the numbers of an instance, and how its picture is put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.cli.profile import RankLook, _screen, chrome_events, during, lanes
from kvmesh.rpc.pb import instance_pb2 as pb

S = 1_000_000_000


def rank_profile(**more: Any) -> pb.RankProfile:
    """Two steps of 1 and 3 ms, two layers."""
    return pb.RankProfile(
        device="cpu",
        layers=2,
        steps=[
            pb.ProfiledStep(start_unix_ns=5 * S, duration_ns=1_000_000, rows=3, context_tokens=30),
            pb.ProfiledStep(start_unix_ns=5 * S + 2_000_000, duration_ns=3_000_000, rows=5, prefill_tokens=8),
        ],
        functions=[
            pb.ProfiledFunction(name="attention", busy_ns=1_200_000, kv_read_bytes=2400, kv_written_bytes=200),
            pb.ProfiledFunction(
                name="mlp", busy_ns=600_000, weight_bytes=4000, activation_bytes=800, products=6_000_000
            ),
            pb.ProfiledFunction(name="host", busy_ns=200_000),
            pb.ProfiledFunction(name="rest", busy_ns=2_000_000),
        ],
        piece_names=["attention", "mlp"],
        piece_which=[0, 1],
        piece_starts_ns=[100, 2_000_500],
        piece_ns=[50, 60],
        bytes_per_s=1e7,
        products_per_s=1e10,
        **more,
    )


def test_shares_by_hand() -> None:
    look = RankLook.of(rank_profile())
    assert (look.steps, look.rows, look.context_tokens, look.prefill_tokens) == (2, 4, 15, 4)
    assert look.step_us == 2000
    attention, mlp, host, rest = look.functions
    assert (attention.step_us, attention.layer_us) == (600, 300)  # two steps, two layers each
    assert (attention.step_share, attention.layer_share) == (pytest.approx(0.3), pytest.approx(0.6))
    assert attention.of_bandwidth == pytest.approx(2600 / 1.2e-3 / 1e7)
    assert attention.of_compute is None
    assert mlp.of_compute == pytest.approx(6e6 / 0.6e-3 / 1e10)
    assert (mlp.moved_bytes, mlp.products) == (2400, 3_000_000)
    assert host.layer_share == pytest.approx(0.1)
    assert (rest.layer_us, rest.layer_share, rest.step_share) == (None, None, pytest.approx(0.5))
    assert sum(one.step_share for one in look.functions) == pytest.approx(1)
    kinds = (look.weight_bytes, look.kv_read_bytes, look.kv_written_bytes, look.activation_bytes)
    assert kinds == (2000, 1200, 100, 400)


def test_the_nearer_limit_binds_and_flags_stand_in_for_what_was_measured() -> None:
    look = RankLook.of(rank_profile())
    assert look.bound_by == "memory"
    assert look.least_us == pytest.approx(3700 / 1e7 * 1e6)  # products would take 300
    look = RankLook.of(rank_profile(), products_per_s=1e9)
    assert (look.bound_by, look.least_us) == ("products", pytest.approx(3000))
    assert look.bytes_per_s == 1e7
    unknown = rank_profile()
    unknown.bytes_per_s = 0
    look = RankLook.of(unknown)
    assert (look.bound_by, look.least_us, look.functions[0].of_bandwidth) == ("", 0, None)
    assert RankLook.of(unknown, bytes_per_s=1e7).bound_by == "memory"


def test_the_screen_says_what_was_asked_and_what_there_was() -> None:
    title, table, lines = _screen("d-0, rank 0 of 1", RankLook.of(rank_profile()), 16)
    assert title.startswith("d-0, rank 0 of 1: cpu; 2 steps of 16 (the others did not run in time), 2.00 ms each")
    assert table.row_count == 5
    assert "bound by memory; it took 5.4 times as long" in lines[1]


def test_experts_of_the_least_even_layer_are_named() -> None:
    layers = [
        pb.ProfiledExperts(layer=layer, tokens=tokens) for layer, tokens in ((1, [4, 4]), (3, [0, 6]), (5, [3, 1]))
    ]
    look = RankLook.of(rank_profile(experts=layers))
    assert [(one.layer, one.imbalance, one.tokens) for one in look.experts] == [
        (1, 1.0, [4, 4]),
        (3, 2.0, [0, 6]),
        (5, 1.5, [3, 1]),
    ]
    said = _screen("d-0", look, 2)[2][-1]
    assert (
        "1.5 times the mean (median of 3 layers), at most 2.0 times: expert 1 of layer 3, 6 tokens; 1 of its 2" in said
    )
    assert "experts" not in _screen("d-0", RankLook.of(rank_profile()), 2)[2][-1]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 10), (2, 8), (3, 4), (8, 10), (10, 12)], [0, 0, 0, 0, 0]),  # one inside the other, or behind
        ([(0, 10), (5, 15), (10, 20)], [0, 1, 0]),  # neither
        ([(0, 10), (0, 10), (2, 12), (3, 5)], [0, 0, 1, 0]),
        ([], []),
    ],
)
def test_spans_of_a_track_nest(spans: list[tuple[int, int]], expected: list[int]) -> None:
    assert lanes(spans) == expected


def span(name: str, trace: str, start: int, end: int, service: str = "decode") -> dict[str, Any]:
    return {"name": name, "trace_id": trace, "start_ns": start, "end_ns": end, "service": service, "attributes": {}}


def test_whole_traces_are_shown_of_which_a_part_was_under_way() -> None:
    spans = [
        span("early", "a", 0, 5),
        span("in it", "a", 8, 12),
        span("before", "b", 0, 10),
        span("after", "c", 20, 30),
    ]
    assert [one["name"] for one in during(spans, 10, 20)] == ["early", "in it"]


def test_steps_and_spans_lie_on_one_clock() -> None:
    spans = [
        span("kvmesh.request", "a", 5 * S - 1_000_000, 5 * S + 9_000_000),
        span("chat", "a", 5 * S - 2_000_000, 6 * S, "gateway") | {"instance": "gateway-0"},
    ]
    events = chrome_events("decode-0", [rank_profile(), rank_profile()], spans)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "decode-0", 2: "requests: decode", 3: "requests: gateway-0"}
    slices = [event for event in events if event["ph"] == "X"]
    starts = {(event["name"], event["pid"], event["tid"]): event["ts"] for event in slices}
    assert starts["chat", 3, 0] == 0  # the earliest of all
    assert starts["kvmesh.request", 2, 0] == 1_000
    assert starts["attention", 1, 1] == pytest.approx(2_000.1)
    assert starts["mlp", 1, 0] == pytest.approx(4_000.5)
    assert [event["ts"] for event in slices if event["name"] == "step"] == [2_000, 4_000] * 2
    assert sum(event["name"] == "thread_name" for event in events) == 2


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["d-0", "--out", "{folder}/none/steps.json"], "none is no folder"),
        (["d-0", "--bandwidth", "-1"], "bandwidth=-1"),
        (["d-0", "--trace-dir", "{folder}/none"], "no such folder"),
        (["d-0:0"], "must be a name, or HOST:PORT"),
        (["d-0", "--run-dir", "{folder}"], "holds no mesh.json"),
        (["127.0.0.1:1", "--timeout", "0.1"], "127.0.0.1:1"),
        (["d-0", "--conductor", "127.0.0.1:1"], "conductor 127.0.0.1:1"),
    ],
)
def test_bad_arguments_are_told_in_a_line(arguments: list[str], told: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["profile", *(one.format(folder=tmp_path) for one in arguments)])
    assert found.exit_code in (1, 2)
    assert told in " ".join(found.output.split())
    assert "Traceback" not in found.output
