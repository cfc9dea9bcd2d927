"""Whether a model fits one machine, two, and so on: cuts, memory, what to do where none fits."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvmesh.cli.doctor import command
from kvmesh.cli.doctor.findings import screen
from kvmesh.cli.doctor.machines import ModelNeeds, RankMachine, about, cuts, findings, fit, lenders, size, verdicts
from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError, Unavailable
from kvmesh.rpc.pb import common_pb2, ranks_pb2
from tests.support.paths import ROOT

H100 = RankMachine("here", 8, 80_000_000_000)
PLAIN = RankMachine("here", 0, 10_000_000_000)


def heads(axes: Axes) -> None:
    if 64 % axes.tp:
        raise ConfigError(f"tp={axes.tp}: 64 heads", field="tp")


def needs(gb: float) -> ModelNeeds:
    return ModelNeeds(int(gb * 1e9), lambda tp: 1_000_000 // tp, heads)


def test_the_fewest_ranks_that_fit() -> None:
    sizes = {gb: fit([H100], needs(gb))[0] for gb in (60, 100, 500)}
    assert [str(one.axes) if one else "" for one in sizes.values()] == ["", "tp=2", "tp=8"]
    two = fit([H100, H100], needs(1000))[0]
    assert two is not None and str(two.axes) == "pp=2,tp=8", "stages between machines, tensors within"
    assert two.weights == 62.5e9 and two.tokens == int((72e9 - 62.5e9) / (1_000_000 / 8 / 2))


def test_what_does_not_fit_says_why_and_how_many_would_do() -> None:
    found, why = fit([H100], needs(1000))
    assert found is None and why == "125.0 GB of weights a rank, which may take 72.0 GB"
    (one,) = verdicts([H100], needs(1000))
    assert one.level == "warn" and "2 machines like this one would do: kvmesh up --join ... --as ranks" in one.todo
    (one,) = verdicts([H100], needs(100_000))
    assert one.todo.startswith("use a smaller model")
    one, two = verdicts([H100, H100], needs(1000))
    assert (one.level, two.level) == ("warn", "ok") and "--decode-mesh pp=2,tp=8 --decode-hosts 2" in two.found


def test_ranks_on_cpus_share_their_machine() -> None:
    found, _ = fit([PLAIN], needs(2))
    assert found is not None and found.axes.world == 1 and found.room == 7e9
    assert found.tokens == 2500, "half of what is left: pages beside the host segment"
    assert fit([PLAIN], needs(8))[0] is None
    two = fit([PLAIN, PLAIN], needs(8))[0]
    assert two is not None and str(two.axes) == "tp=2"


def test_axes_that_do_not_divide_are_left_out() -> None:
    found = fit([RankMachine("a", 3, 80_000_000_000)], needs(150))[0]
    assert found is not None and str(found.axes) == "pp=3"
    assert [str(one) for one in cuts(2, 4)] == ["pp=2,tp=4", "tp=8", "pp=8"]


def test_machines_say_what_they_have() -> None:
    ref = common_pb2.InstanceRef(instance_id="ranks@b", address="10.0.0.2:7050", incarnation=1)
    state = ranks_pb2.RankHostState(instance=ref, node_id="b", gpus=8, memory_bytes=H100.memory)
    state.uses.add(instance_id="decode-0@a", ranks=[2, 3])
    (one,) = lenders([state])
    assert (one.name, one.text) == ("b", "8 GPUs of 80 GB")
    assert one.about == "lends ranks at 10.0.0.2:7050, now to decode-0@a (2)"
    assert (size(2.5e9), size(3e6), about(6_559_796), about(7)) == ("2.5 GB", "3.0 MB", 6_600_000, 7)


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_shows_it_whole(width: int) -> None:
    found = findings(str(ROOT / "examples" / "demo-moe"), [PLAIN, PLAIN])
    out = Console(width=width, record=True, file=StringIO())
    out.print(screen(found))
    text = " ".join(out.export_text().split())
    assert "1 rank: weights are" in text and "(--decode-mesh tp=2 --decode-hosts 2)" in text


def test_masters_that_were_named_must_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("KVMESH_STORE", raising=False)
    assert [one.name for one in command._machines("")] == ["this machine"]
    with pytest.raises(Unavailable, match=r"store='127\.0\.0\.1:1': no store master answers there"):
        command._machines("127.0.0.1:1")
