"""Weights that change in place: every family, alone and cut over two ranks, ends with what a fresh load has; what
cannot be is refused by name, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvmesh.engine.checkpoint import open_checkpoint, open_weights
from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.models.registry import MODELS
from kvmesh.engine.parallel import ALONE, Group, RankMesh, share_of
from kvmesh.engine.weights import Weights
from kvmesh.engine.weights_update import WeightsUpdate, tensors_of
from kvmesh.errors import CheckpointError, InvalidRequest, KvmeshError
from tests.support.checkpoints import FAMILY_ZOO, ZOO, make_checkpoint
from tests.support.engine.given_mesh import GivenMesh
from tests.support.engine.qwen3_next import make_qwen3_next

Zoo = Callable[[str], Path]
CPU = torch.device("cpu")


class OneOf(Group):
    """One of two ranks that has nobody to talk to."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


MESHES = {"alone": ALONE, "second of two": GivenMesh(OneOf(1, 2))}


def loaded(path: Path, dtype: torch.dtype, mesh: RankMesh) -> tuple[DecoderModel, Callable[[Path], WeightsUpdate]]:
    """A model, and what gives it the weights of another folder."""
    checkpoint = open_checkpoint(path)
    config = checkpoint.config

    def build(weights: Weights) -> DecoderModel:
        return MODELS[config.architecture](share_of(config, mesh.axes), weights)

    with torch.inference_mode():
        model = build(Weights(checkpoint, dtype, CPU, mesh))
    return model, lambda other: WeightsUpdate(model, Weights(open_weights(other, config), dtype, CPU, mesh), build)


def values(model: DecoderModel) -> dict[str, torch.Tensor]:
    return {place: tensor.clone() for place, tensor in tensors_of(model)}


def assert_updated(path: Path, other: Path, dtype: torch.dtype, mesh: RankMesh) -> None:
    model, update_to = loaded(path, dtype, mesh)
    before = {place: tensor.data_ptr() for place, tensor in tensors_of(model)}
    old, expected = values(model), values(loaded(other, dtype, mesh)[0])
    between: list[int] = []
    update = update_to(other)
    update.check()
    assert update.apply(lambda: between.append(1)) > 0
    assert len(between) == len(model.layers)
    assert {place: tensor.data_ptr() for place, tensor in tensors_of(model)} == before
    new = values(model)
    assert new.keys() == expected.keys()
    assert any(not torch.equal(old[place], new[place]) for place in new)
    for place, tensor in expected.items():
        assert torch.equal(new[place], tensor), place


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [*FAMILY_ZOO, "qwen3-gqa1-tied"])
def test_every_family_ends_with_what_a_fresh_load_has(zoo: Zoo, tmp_path: Path, name: str, mesh: str) -> None:
    other = make_checkpoint(tmp_path / "b", seed=77, tokenizer=False, **(ZOO | FAMILY_ZOO)[name])
    try:
        loaded(zoo(name), torch.float32, MESHES[mesh])
    except KvmeshError:
        pytest.skip("two ranks cannot share this one")
    assert_updated(zoo(name), other, torch.bfloat16 if mesh == "alone" else torch.float32, MESHES[mesh])


def test_a_model_with_states_too(tmp_path: Path) -> None:
    one, other = (make_qwen3_next(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert_updated(one, other, torch.float32, ALONE)


def test_weights_of_another_model_are_refused_by_name(zoo: Zoo, tmp_path: Path) -> None:
    name = "qwen3-gqa4-yarn"
    config = open_checkpoint(zoo(name)).config
    wider = make_checkpoint(tmp_path / "wide", tokenizer=False, **(FAMILY_ZOO | ZOO)[name] | {"intermediate_size": 128})
    with pytest.raises(CheckpointError, match=r"config.json is not that of the served model"):
        open_weights(wider, config)
    (wider / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"down_proj.weight has shape \[48, 128\]"):
        open_weights(wider, config)
    with pytest.raises(CheckpointError, match="not a folder"):
        open_weights(tmp_path / "nowhere", config)


def test_a_head_of_its_own_cannot_come_where_the_embedding_is_the_head(tmp_path: Path) -> None:
    tied, own = (make_checkpoint(tmp_path / str(t), tie_word_embeddings=t, tokenizer=False) for t in (True, False))
    model, update_to = loaded(tied, torch.float32, ALONE)
    before = values(model)
    (own / "config.json").unlink()
    with pytest.raises(InvalidRequest, match="tie_word_embeddings"):
        update_to(own).check()
    assert all(torch.equal(before[place], tensor) for place, tensor in values(model).items())
