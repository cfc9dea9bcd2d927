"""The soak of benchmarks/soak.py, for seconds: coupled and disaggregated answer alike, and nothing is lost."""

from pathlib import Path

import pytest

from benchmarks import soak

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(300)]


async def test_mixed_load_on_both_meshes_leaves_nothing_behind(tmp_path: Path) -> None:
    words = ["--minutes", "0.1", "--cancel-after", "0.15", "--growth-mb", "60", "--clients", "3"]
    told = await soak.run(soak.parse(words), tmp_path)
    assert told["faults"] == []
    assert told["done"]["compared"] > 0
    assert told["done"]["cancelled"] > 0


def test_what_is_wrong_is_found() -> None:
    found = soak.Soak()
    work = soak.Work([1, 2, 3], 3, None)
    same = soak.Answer(tokens=[4, 5, 6])
    soak.judge(work, {"coupled": same, "1P+1D": soak.Answer(tokens=[4, 5, 6])}, found)
    soak.judge(work, {"coupled": same, "1P+1D": None}, found)
    assert (found.faults, found.done["compared"], found.done["cancelled"]) == ([], 1, 1)
    soak.judge(work, {"coupled": same, "1P+1D": soak.Answer(tokens=[4, 7, 6])}, found)
    soak.judge(work, {"coupled": same, "1P+1D": soak.Answer(tokens=[4, 5])}, found)
    for fault, why in zip(found.faults, ("differ from token 1", "2 tokens, not 3", "differ from token 2"), strict=True):
        assert why in fault
    steady, grown = ([(float(t), (100 + each * t) << 20) for t in range(60)] for each in (0, 1))
    found = soak.Soak(memory={"steady": steady, "grown": grown})
    told = soak.judge_memory(soak.parse(["--minutes", "1"]), found)
    assert told["grown"]["mb_per_minute"] == pytest.approx(60)
    assert [fault.split()[0] for fault in found.faults] == ["grown"]
