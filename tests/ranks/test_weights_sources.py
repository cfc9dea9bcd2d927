"""What a rank reads of new weights: no more than it keeps, from nowhere but where it may."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import obstore
import pytest
import torch

from kvmesh.engine.checkpoint import Checkpoint, open_checkpoint
from kvmesh.engine.models.blocks import DecoderModel
from kvmesh.engine.models.registry import MODELS
from kvmesh.engine.parallel import ALONE, Group, RankMesh, share_of
from kvmesh.engine.tensor_sources import MAX_SPANS, RemoteSource, TensorSource, box_spans
from kvmesh.engine.weights import Weights
from kvmesh.engine.weights_update import WeightsUpdate, tensors_of
from kvmesh.errors import CheckpointError, DeadlinePassed, InvalidRequest, PermissionDenied, Unavailable
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.weights_sources import ObjectTensors, TrainerTensors, WeightsLimits
from kvmesh.rollout.trainer import TrainerSegment
from kvmesh.tiers.object_store import ranged
from kvmesh.tiers.object_store.client import open_store
from kvmesh.tiers.object_store.ranged import RangedReader
from kvmesh.transfer import EngineConfig, SegmentDescriptor, TransferEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.engine.given_mesh import GivenMesh
from tests.support.rank_driver import staged_configure
from tests.support.s3_server import S3, s3_server

CPU = torch.device("cpu")


class OneOfTwo(Group):
    """One of two ranks that has nobody to talk to."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of one model whose MLPs are most of it, so that the rows of a cut along inputs are long."""
    root = tmp_path_factory.mktemp("wide")
    wide = {"intermediate_size": 2560, "hidden_size": 64, "tokenizer": False}
    return [make_checkpoint(root / str(seed), seed=seed, **wide) for seed in range(2)]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


def uploaded(s3: S3, folder: Path) -> str:
    url = f"s3://{s3.bucket()}/step"
    store = open_store(url)
    for file in folder.iterdir():
        obstore.put(store, file.name, file.read_bytes())
    return url


def limits(model: Path, *folders: str, **settings: object) -> WeightsLimits:
    configure = msgspec.structs.replace(staged_configure(model), rollout_folders=folders, **settings)
    return WeightsLimits(configure)


def loaded(source: TensorSource, mesh: RankMesh) -> DecoderModel:
    with torch.inference_mode():
        config = source.config
        return MODELS[config.architecture](share_of(config, mesh.axes), Weights(source, torch.float32, CPU, mesh))


def update(model: DecoderModel, source: TensorSource, mesh: RankMesh) -> None:
    def build(weights: Weights) -> DecoderModel:
        return MODELS[source.config.architecture](share_of(source.config, mesh.axes), weights)

    changed = WeightsUpdate(model, Weights(source, torch.float32, CPU, mesh), build)
    changed.check()
    changed.apply(lambda: None)


def shares(folder: Path, cut: tuple[str, ...]) -> tuple[int, int]:
    """The bytes of the tensors that two ranks share, by how their names end, and of all others."""
    with open_checkpoint(folder) as checkpoint:
        sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    of_cut = sum(size for name, size in sizes.items() if name.endswith(cut))
    return of_cut, sum(sizes.values()) - of_cut


ROWS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up"))


def assert_updated(folders: list[Path], source: RemoteSource, mesh: RankMesh) -> None:
    with open_checkpoint(folders[0]) as old, open_checkpoint(folders[1]) as new:
        model = loaded(old, mesh)
        update(model, source, mesh)
        expected = dict(tensors_of(loaded(new, mesh)))
    for place, tensor in tensors_of(model):
        assert torch.equal(tensor, expected[place]), place


def trainer_of(checkpoint: Checkpoint) -> TrainerSegment:
    trainer = TrainerSegment(EngineConfig())
    for name, info in checkpoint.tensors.items():
        trainer.add(name, info.dtype, info.shape, checkpoint.raw(name))
    return trainer


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_reads_half_of_a_trainers_memory(folders: list[Path], rank: int) -> None:
    """Along outputs and, where what lies between is worth it, along inputs; the embedding is not shared."""
    mesh = GivenMesh(OneOfTwo(rank))
    with open_checkpoint(folders[1]) as checkpoint, trainer_of(checkpoint) as trainer:
        engine = TransferEngine(f"reader-{rank}", EngineConfig())
        order = m.PrepareWeights(1, segment=trainer.descriptor, tensors=trainer.tensors)
        source = TrainerTensors(engine, order, checkpoint.config, limits(folders[0]))
        try:
            assert_updated(folders, source, mesh)
        finally:
            source.close()
            engine.close()
    halved, whole = shares(folders[1], (*ROWS, "down_proj.weight", "lm_head.weight"))
    assert halved > 0.9 * (halved + whole)
    assert source.nbytes_read == pytest.approx(halved / 2 + whole, rel=0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_object_storage_each_rank_reads_its_rows(folders: list[Path], s3: S3, rank: int) -> None:
    url = uploaded(s3, folders[1])
    mesh = GivenMesh(OneOfTwo(rank))
    with open_checkpoint(folders[0]) as served:
        config = served.config
    source = ObjectTensors(m.PrepareWeights(1, path=url), config, limits(folders[0], url))
    try:
        assert_updated(folders, source, mesh)
    finally:
        source.close()
    halved, whole = shares(folders[1], (*ROWS, "lm_head.weight"))
    assert source.nbytes_read == pytest.approx(halved / 2 + whole, rel=0.01)


def test_spans_of_a_box_are_its_bytes() -> None:
    stored = np.arange(6 * 8 * 10, dtype=np.uint16).reshape(6, 8, 10)
    flat = stored.tobytes()
    boxes: list[tuple[range, ...]] = [
        (),
        (range(2, 4),),
        (range(6), range(3, 5)),
        (range(1, 2), range(8), range(4, 9)),
        (range(1, 3), range(2, 6), range(10)),
        (range(6), range(8), range(10)),
    ]
    for box in boxes:
        for gap in (1, 11, 1000):
            read, spans = box_spans(stored.shape, 2, box, gap)
            told = np.frombuffer(b"".join(flat[first:end] for first, end in spans), np.uint16)
            assert np.array_equal(told, stored[tuple(slice(r.start, r.stop) for r in read)].ravel()), (box, gap)
            assert all(after[0] - before[1] >= gap for before, after in itertools.pairwise(spans))
    assert len(box_spans(stored.shape, 2, boxes[2], 1)[1]) == 6
    assert box_spans((MAX_SPANS + 1, 2), 2, (range(MAX_SPANS + 1), range(1)), 1)[1] == [(0, 4 * (MAX_SPANS + 1))]


def test_an_object_that_changes_is_not_mixed(folders: list[Path], s3: S3) -> None:
    url = uploaded(s3, folders[1])
    reader = RangedReader(url)
    try:
        into = memoryview(bytearray(16))
        reader.read("model.safetensors", [(0, 8), (32, 40)], into)
        first = (folders[1] / "model.safetensors").read_bytes()
        assert bytes(into) == first[:8] + first[32:40]
        obstore.put(open_store(url), "model.safetensors", first[:-1] + b"x")
        with pytest.raises(CheckpointError, match="has changed while it was being read"):
            reader.read("model.safetensors", [(0, 8), (32, 40)], into)
        assert reader.version("nothing") is None
        with pytest.raises(CheckpointError, match="nothing: no such object"):
            reader.read("nothing", [(0, 8)], into[:8])
    finally:
        reader.close()


def test_reading_is_tried_again_until_its_deadline(
    folders: list[Path], s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RangedReader(uploaded(s3, folders[1]))
    into, failures, get = memoryview(bytearray(8)), [2], obstore.get

    def failing(*args: object, **more: object) -> obstore.GetResult:
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError("connection reset")
        return get(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(ranged, "BACKOFF_S", 0.001)
    monkeypatch.setattr(ranged.obstore, "get", failing)
    try:
        reader.read("model.safetensors", [(0, 8)], into)
        assert bytes(into) == (folders[1] / "model.safetensors").read_bytes()[:8]
        failures[0] = 10**6
        with pytest.raises(Unavailable, match="connection reset"):
            reader.read("model.safetensors", [(0, 8)], into)
        assert failures[0] == 10**6 - ranged.ATTEMPTS
        reader.until = time.monotonic()
        with pytest.raises(DeadlinePassed, match="was not read in time"):
            reader.read("model.safetensors", [(0, 8)], into)
    finally:
        reader.close()


def test_where_a_trainer_may_be() -> None:
    with TrainerSegment(EngineConfig(transports=("tcp",))) as trainer:
        here = SegmentDescriptor.decode(trainer.descriptor)
    model = Path("/models/m")

    def at(host: str) -> SegmentDescriptor:
        return replace(here, endpoints={"tcp": {"host": host, "port": "1", "nics": "x"}})

    assert limits(model).trainers(at("127.0.0.1")).endpoints == {"tcp": {"host": "127.0.0.1", "port": "1"}}
    for host in ("10.0.0.5", "metadata.internal", ""):
        with pytest.raises(PermissionDenied, match="is outside of rollout_trainers"):
            limits(model).trainers(at(host))
    named = limits(model, rollout_trainers=("10.0.0.0/24", "trainer.internal"))
    for host in ("10.0.0.5", "trainer.internal"):
        assert named.trainers(at(host)).endpoints
    for host in ("10.0.1.5", "127.0.0.1"):
        with pytest.raises(PermissionDenied, match="outside of rollout_trainers"):
            named.trainers(at(host))
    assert limits(model, tls={"tls_ca": "ca.pem"}).trainers(at("10.0.0.5")).endpoints  # it shows a certificate
    with pytest.raises(PermissionDenied):  # no socket of another program
        limits(model).trainers(replace(here, endpoints={"shm": {"path": "/run/docker.sock", "network": "n"}}))
    for wrong in (replace(here, token="a\nSET x y"), replace(here, name="a\n")):
        with pytest.raises(InvalidRequest, match="segment="):
            limits(model).trainers(wrong)


def test_the_folder_beside_the_model_is_where_weights_may_lie(tmp_path: Path) -> None:
    assert str(limits(tmp_path / "models" / "m").folders) == str(tmp_path / "models")
    assert str(limits(Path("/model")).folders) == "/model"


def test_all_of_a_remote_tensor_is_read_by_one_rank_alone(folders: list[Path], s3: S3) -> None:
    with open_checkpoint(folders[0]) as served:
        config = served.config
    url = uploaded(s3, folders[1])
    source = ObjectTensors(m.PrepareWeights(1, path=url), config, limits(folders[0], url))
    try:
        assert_updated(folders, source, ALONE)
    finally:
        source.close()
    assert source.nbytes_read == sum(info.nbytes for info in source.tensors.values())
    assert source.nbytes_read > 0 and not math.isinf(source.until)
