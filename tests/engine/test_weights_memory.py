"""The memory of a model's weights goes and comes back: every family answers as before, whatever was kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine.checkpoint import open_checkpoint, open_weights
from kvmesh.engine.runner import PrefillInput, Runner, SampleParams, shard_layout
from kvmesh.engine.weights_update import tensors_of
from kvmesh.errors import InternalError, KvmeshError
from tests.support.checkpoints import FAMILY_ZOO

PROMPT = tuple((7 * i * i + 3 * i) % 90 + 5 for i in range(30))
ASKED = SampleParams(logprobs=3)


def loaded(path: Path, apart: bool) -> Runner:
    checkpoint = open_checkpoint(path)
    pages = torch.zeros((4, *shard_layout(checkpoint.config, "float32", 16).shape))
    return Runner(checkpoint, "float32", "cpu", 16, pages, weights_apart=apart)


def answer(runner: Runner) -> object:
    return runner.prefill([PrefillInput(PROMPT, 0, (0, 1), ASKED)])


def held(runner: Runner) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for _, t in tensors_of(runner.model.layers)}
    return sum(storages.values())


@pytest.mark.parametrize("name", [*FAMILY_ZOO, "qwen3-gqa1-tied"])
@pytest.mark.parametrize("apart", [True, False], ids=["on a device", "in the host's memory"])
def test_every_family_answers_as_before(zoo: Callable[[str], Path], name: str, apart: bool) -> None:
    try:
        runner = loaded(zoo(name), apart)
    except KvmeshError:
        pytest.skip("not served over one tensor of pages")
    before, whole, memory = answer(runner), held(runner), runner.weights_memory
    memory.save(True, lambda: None)
    kept = memory.release(True)
    assert (kept > 0) == apart, "a CPU's weights that are kept stay where they are"
    assert held(runner) < 0.1 * whole or not apart
    assert memory.restore(lambda: None)
    assert answer(runner) == before
    memory.save(False, lambda: None)
    dropped = memory.release(False)
    assert dropped >= 0.9 * whole and held(runner) < 0.1 * whole
    with pytest.raises(InternalError, match="no memory"):
        memory.written()
    update = runner.new_weights(open_weights(zoo(name), runner.config))
    update.check()  # what is tied is seen without any memory
    assert not memory.restore(lambda: None), "an update has to write them"
    update.apply(lambda: None)
    memory.written()
    assert answer(runner) == before


def test_weights_that_were_kept_may_be_dropped_later(zoo: Callable[[str], Path]) -> None:
    runner = loaded(zoo("llama3"), True)
    memory = runner.weights_memory
    memory.save(True, lambda: None)
    memory.release(True)
    assert memory.release(False) == 0  # the device has none of them any more, and now the host neither
    assert not memory.restore(lambda: None)
