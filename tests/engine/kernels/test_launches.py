"""What a layer of a decode step launches on a GPU: kernels and operations of torch, one after the other, as the
interpreter and torch run them on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvmesh.engine import ops
from kvmesh.engine.attention import choice
from kvmesh.engine.attention.torch_backend import TorchAttention
from kvmesh.engine.parallel import SOLO, Group
from kvmesh.engine.runner import _attend
from tests.support.engine.given_mesh import GivenMesh
from tests.support.engine.stepper import Stepper

MADE = ("empty", "new_empty", "_unsafe_view", "_reshape_alias")  # operations that launch nothing, beside views
ATTENTION = ["_rotate_and_write", "_attend"]
MLP = ["mm", "_gated"]


class Recorder(TorchDispatchMode):
    """Notes what would be launched. A kernel of the interpreter is one launch, whatever it does with torch."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self._inside = False

    def kernel(self, name: str, kernel: Any) -> Any:
        recorder = self

        class Launched:
            def __getitem__(self, grid: Any) -> Callable[..., None]:
                def launch(*args: Any, **named: Any) -> None:
                    recorder.launches.append(name)
                    recorder._inside = True
                    try:
                        kernel[grid](*args, **named)
                    finally:
                        recorder._inside = False

                return launch

        return Launched()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._inside:
            with self:  # in inference mode, an operation that consists of others comes as one
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
            name = func.overloadpacket.__name__
            if not (func.is_view or name in MADE):
                self.launches.append(name)
        return func(*args, **kwargs)


class TwoRanks(Group):
    """One of two ranks, whose sums are noted in place of being made."""

    size = 2

    def __init__(self, launches: list[str]) -> None:
        self._launches = launches

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._launches.append("all_reduce")
        return x


# Behind each product that a residual follows, its addition is part of the product (addmm) or of the next norm.
LAYERS = {
    "llama": ("llama-gqa4-llama3", 1, [*ATTENTION, "addmm", "_rms_norm", *MLP, "addmm", "_rms_norm", "mm"]),
    "qwen3": ("qwen3-gqa1-tied", 1, [*ATTENTION, "addmm", "_rms_norm", *MLP, "addmm", "_rms_norm", "mm"]),
    "gemma3": ("gemma3", 1, [*ATTENTION, "mm", "_add_rms_norm", *MLP, "mm", "_add_rms_norm", "mm"]),
    "llama, two ranks": (
        "llama-gqa4-llama3",
        2,
        [*ATTENTION, "mm", "all_reduce", "_add_rms_norm", *MLP, "mm", "all_reduce", "_add_rms_norm", "mm"],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_launches_of_a_layer_and_what_they_answer(
    name: str, zoo: Callable[[str], Path], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvmesh.engine.attention import triton_backend
    from kvmesh.engine.kernels import decode, fused, write

    if device.type == "cuda":
        pytest.skip("launches are counted in the interpreter: run this without a GPU")
    checkpoint, ranks, wanted = LAYERS[name]
    recorder = Recorder()
    monkeypatch.setitem(choice.BACKENDS, "cpu", triton_backend.TritonAttention)
    group = TwoRanks(recorder.launches) if ranks > 1 else SOLO
    stepper = Stepper(zoo(checkpoint), num_pages=2, mesh=GivenMesh(group))
    stepper.pages.zero_()  # the tokens before the one that is computed
    model, attention = stepper.runner.model, stepper.runner.attention
    token = torch.tensor([7])
    by_torch = TorchAttention(stepper.pages.clone(), attention.num_heads, attention.specs).plan_decode([(1,)], [3])
    with torch.inference_mode():
        answer = model.hidden(token, by_torch.positions, _attend(by_torch, None))
    recorder.launches.clear()
    for module in (decode, fused, write):
        for kernel in ("_attend", "_join", "_rms_norm", "_add_rms_norm", "_rotate_and_write", "_gated", "_write"):
            if hasattr(module, kernel):
                monkeypatch.setattr(module, kernel, recorder.kernel(kernel, getattr(module, kernel)))
    monkeypatch.setattr(ops, "on_native", lambda x: False)
    monkeypatch.setattr(ops, "kernels_for", lambda kind, name: fused)
    plan = attention.plan_decode([(1,)], [3])
    begun: list[int] = []
    with torch.inference_mode(), recorder:
        hidden = model.hidden(token, plan.positions, _attend(plan, lambda layer: begun.append(len(recorder.launches))))
    # From one layer's write to the next one's.
    layers = [recorder.launches[a - 1 : b - 1] for a, b in itertools.pairwise(begun)]
    print(f"{name}: {len(layers[0])} launches a layer: {', '.join(layers[0])}")
    assert all(layer == wanted for layer in layers), layers
    torch.testing.assert_close(hidden, answer, atol=1e-4, rtol=1e-4)
