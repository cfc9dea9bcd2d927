"""From a checkpoint's bytes to torch tensors of the dtype and device that the engine runs in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.parallel import ALONE, Cut, ExpertsCut, RankMesh
from kvmesh.engine.stages import stage_layers

if TYPE_CHECKING:
    from kvmesh.engine.tensor_sources import TensorSource

STORED = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Weights:
    """Reads tensors of one checkpoint as `dtype` on `device`. Every tensor is copied out of the file mapping; of one
    that the ranks of `mesh` share only this rank's part is touched. `experts_cut` says how they share experts
    (`parallel.cuts_experts_whole`)."""

    def __init__(
        self,
        checkpoint: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        mesh: RankMesh = ALONE,
        experts_cut: ExpertsCut = "auto",
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.mesh = mesh
        self.experts_cut = experts_cut
        self.reads_ends = True  # whether a model made of these has an embedding and a head beside its layers

    @property
    def config(self) -> ModelConfig:
        """The whole model's configuration, whatever this rank has of it: cuts are given in its terms."""
        return self.checkpoint.config

    @property
    def layers(self) -> range:
        """The layers of the model that this rank has."""
        return stage_layers(self.config, self.mesh.axes, self.mesh.rank)

    def __contains__(self, name: str) -> bool:
        return name in self.checkpoint.tensors or name in self.checkpoint.mtp

    def view(self, name: str, *box: range) -> torch.Tensor:
        """Returns the stored tensor, in its stored dtype, over the file mapping or over memory that it was read into
        (CPU); with a `box`, only what these ranges along its first axes span is read."""
        data, shape, inner = self.checkpoint.part(name, box)
        whole = torch.frombuffer(data, dtype=STORED[self.checkpoint.info(name).dtype]).view(shape)
        return whole[tuple(slice(one.start, one.stop) for one in inner)]

    def parts(self, *names: str, cut: Cut | None = None) -> list[torch.Tensor]:
        """Returns views of the stored tensors, in their stored dtypes, over the file mapping; with a `cut`, of this
        rank's part."""
        group = ALONE.world if cut is None else self.mesh.group(*cut.over)
        if cut is None or group.size == 1:
            return [self.view(name) for name in names]
        spans = cut.spans(group)
        if cut.axis == 1:
            [name], [span] = names, spans
            return [self.view(name, range(self.checkpoint.info(name).shape[0]), span)]
        found, base = [], 0  # the rank's spans of the matrices as if they lay one under the other
        for name in names:
            rows = self.checkpoint.info(name).shape[0]
            for span in spans:
                first, end = max(span.start - base, 0), min(span.stop - base, rows)
                if first < end:
                    found.append(self.view(name, range(first, end)))
            base += rows
        return found

    def __call__(self, *names: str, cut: Cut | None = None) -> torch.Tensor:
        """Reads the tensor, or several joined along their first axis (one fused matrix); with a `cut` this rank's
        part."""
        views = self.parts(*names, cut=cut)
        rows = sum(view.shape[0] for view in views)
        out = torch.empty((rows, *views[0].shape[1:]), dtype=self.dtype, device=self.device)
        at = 0
        for view in views:
            out[at : at + view.shape[0]].copy_(view)
            at += view.shape[0]
        self.release(*names)
        return out

    def release(self, *names: str) -> None:
        """Gives back the memory of the file's pages that were read: the tensors have been copied."""
        for name in names:
            self.checkpoint.release(name)
