"""Which frames a script strikes, and with what: pure, with made-up time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import pytest

from kvmesh.errors import TransferError
from kvmesh.testing.fault.rules import Rule, Rules, Script
from kvmesh.transfer.transports.base import Frame, FrameKind


@dataclass
class _Named:
    name: str


@dataclass
class _Ends:
    local: str
    remote: str


@dataclass
class _Frame:
    """What rules look at."""

    link: _Named
    rail: _Ends
    kind: FrameKind
    nbytes: int


def frame(
    peer: str = "p#1", local: str = "eth1", remote: str = "eth7", kind: FrameKind = FrameKind.WRITE, nbytes: int = 1000
) -> Frame:
    return cast(Frame, _Frame(_Named(peer), _Ends(local, remote), kind, nbytes))


def rules(*of: dict[str, Any], seed: int = 0) -> Rules:
    return Rules(Script.parse(json.dumps({"seed": seed, "rules": of})))


@pytest.mark.parametrize(
    ("match", "struck"),
    [
        ({}, True),
        ({"nic": "eth1"}, True),
        ({"nic": "eth2"}, False),
        ({"nic": "eth7"}, False),
        ({"remote_nic": "eth7"}, True),
        ({"remote_nic": "eth[12]"}, False),
        ({"nic": "eth1", "remote_nic": "eth8"}, False),
        ({"peer": "p#*", "nic": "e*1"}, True),
        ({"peer": "q#*"}, False),
        ({"transport": "tcp"}, True),
        ({"transport": "rdma"}, False),
        ({"op": "write"}, True),
        ({"op": "checksum"}, False),
    ],
)
def test_a_frame_is_struck_when_all_patterns_match(match: dict[str, Any], struck: bool) -> None:
    made = rules({"kind": "drop"} | match)
    assert bool(made.strike("tcp", frame(), 0.0).kinds) is struck
    assert rules({"kind": "down"} | match).is_down("tcp", frame()) is struck


def test_turns_are_counted_by_rule_and_only_among_matches() -> None:
    made = rules({"kind": "drop", "nic": "eth1", "after": 1, "count": 2}, {"kind": "corrupt", "after": 3})
    seen = [made.strike("tcp", frame(local=nic), 0.0).kinds for nic in ("eth1", "eth2", "eth1", "eth1", "eth1")]
    assert seen == [set(), set(), {"drop"}, {"drop", "corrupt"}, {"corrupt"}]


def test_each_nic_has_a_link_of_its_own_which_frames_pass_one_after_another() -> None:
    made = rules({"kind": "bandwidth", "bandwidth_mbps": 8})  # a megabyte a second
    waits = [made.strike("tcp", frame(nbytes=500_000), 10.0).wait_s for _ in range(3)]
    assert waits == pytest.approx([0.5, 1.0, 1.5])
    assert made.strike("tcp", frame(local="eth2", nbytes=500_000), 10.0).wait_s == pytest.approx(0.5)
    assert made.strike("tcp", frame(peer="other#1", nbytes=500_000), 11.0).wait_s == pytest.approx(1.0)
    assert made.strike("tcp", frame(nbytes=500_000), 60.0).wait_s == pytest.approx(0.5)  # idle meanwhile


def test_delay_comes_after_the_link_and_jitter_on_top() -> None:
    made = rules(
        {"kind": "bandwidth", "bandwidth_mbps": 8}, {"kind": "delay", "delay_ms": 100, "jitter_ms": 50, "op": "write"}
    )
    waits = [made.strike("tcp", frame(nbytes=1000), 100.0 * i).wait_s - 0.001 for i in range(50)]
    assert 0.1 <= min(waits) < 0.11 < 0.14 < max(waits) <= 0.15
    assert made.strike("tcp", frame(nbytes=0, kind=FrameKind.READ), 9999.0).wait_s == 0


def test_chance_is_drawn_by_each_rule_from_the_seed() -> None:
    drop = {"kind": "drop", "probability": 0.4}

    def draw(made: Rules) -> list[bool]:
        return ["drop" in made.strike("tcp", frame(), 0.0).kinds for _ in range(64)]

    first = draw(rules(drop, seed=5))
    assert first == draw(rules(drop, {"kind": "corrupt", "probability": 0.5}, seed=5))
    assert first != draw(rules(drop, seed=6))
    assert 10 < sum(first) < 45


def test_a_rail_counts_as_down_only_without_turns_and_chance() -> None:
    for chance in ({"after": 1}, {"count": 1}, {"probability": 0.5}):
        assert not rules({"kind": "down"} | chance).is_down("tcp", frame())


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"kind": "drop", "probability": 1.5}, "probability=1.5"),
        ({"kind": "drop", "after": -1}, "after=-1"),
        ({"kind": "delay", "delay_ms": -1}, "delay_ms=-1"),
        ({"kind": "bandwidth"}, "bandwidth_mbps=0"),
        ({"kind": "drop", "bandwidth_mbps": 5}, "has no use"),
        ({"kind": "drop", "nics": "eth1"}, "nics"),
        ({"kind": "explode"}, "explode"),
        ({"kind": "drop", "op": "send"}, "send"),
    ],
)
def test_bad_rules_are_refused_by_name(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(TransferError, match=said) as caught:
        rules(rule)
    assert caught.value.field == "fault"


def test_rules_made_in_code_are_checked_too() -> None:
    with pytest.raises(TransferError, match="probability"):
        Rule(kind="drop", probability=-0.1)
