"""The weights of real ranks, changed while they live: out of a folder and out of a trainer's memory, over two ranks;
what is refused leaves the old ones, what ends in the middle leaves neither."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import obstore
import pytest
import pytest_asyncio

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.errors import (
    CheckpointError,
    FailedWeights,
    InternalError,
    InvalidRequest,
    KvmeshError,
    Overloaded,
    PermissionDenied,
    Unavailable,
)
from kvmesh.instance.front import Front
from kvmesh.instance.served_weights import LiveWeights, NewWeights
from kvmesh.instance.sleeping import InstanceSleep
from kvmesh.ranks import protocol as m
from kvmesh.ranks.worker.weights_worker import WeightsWorker
from kvmesh.rollout.trainer import TrainerSegment
from kvmesh.tiers.object_store.client import open_store
from kvmesh.transfer import EngineConfig
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt
from tests.support.rank_driver import BLOCK, GREEDY, AllRanks, ranks
from tests.support.reference import assert_matches_reference
from tests.support.s3_server import s3_server

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROMPT = prompt(3, 40, 250)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of one model, as three steps of a trainer have them."""
    root = tmp_path_factory.mktemp("steps")
    return [make_checkpoint(root / str(seed), seed=seed, num_hidden_layers=4) for seed in range(3)]


class Served:
    """Two ranks and what changes their weights."""

    def __init__(self, both: AllRanks) -> None:
        self.both = both
        self.live = LiveWeights([driver.client for driver in both.drivers], 0)
        for at, driver in enumerate(both.drivers):
            driver.on_message = lambda message, at=at: self.live.rank_said(at, message)  # type: ignore[misc]
        self._handles = iter(range(1, 100))

    async def answer(self, count: int = 6) -> list[int]:
        handle, pages = next(self._handles), tuple(range(-(-(len(PROMPT) + count) // BLOCK)))
        item = m.PrefillItem(handle, tuple(PROMPT), 0, pages, GREEDY, push=False)
        self.both.send(m.PrefillStep(handle, (item,)))
        first = (await self.both.take(m.PrefillStepDone)).sampled[0].token_id
        self.both.send(m.Join(handle, pages, len(PROMPT), first, 0, count, 0, (), GREEDY))
        said = [first]
        while len(said) < count:
            said += [token.token_id for token in (await self.both.take(m.DecodeStepDone)).tokens]
        return said


@pytest.fixture(scope="module")
def bucket(folders: list[Path]) -> Iterator[str]:
    """Object storage that ranks find by their environment, with the first step's weights under two prefixes."""
    with s3_server() as server:
        url = f"s3://{server.bucket()}"
        for prefix in ("steps/1", "private"):
            store = open_store(f"{url}/{prefix}")
            for file in sorted(folders[1].iterdir()):
                obstore.put(store, file.name, file.read_bytes())
        yield url


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served(
    forked_ranks: None, folders: list[Path], bucket: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    root = str(tmp_path_factory.getbasetemp())
    allowed = (root, f"{bucket}/steps")
    async with ranks("w", folders[0], 2, tmp_path_factory.mktemp("ranks"), rollout_folders=allowed) as both:
        yield Served(both)


@pytest.mark.asyncio(loop_scope="module")
async def test_out_of_a_folder_and_out_of_a_trainers_memory(served: Served, folders: list[Path]) -> None:
    assert_matches_reference(folders[0], PROMPT, await served.answer())
    taken = await served.live.update(NewWeights(5, path=str(folders[1])), 60)
    assert_matches_reference(folders[1], PROMPT, await served.answer())
    with open_checkpoint(folders[1]) as checkpoint:
        assert checkpoint.nbytes / 2 < taken.nbytes < 2 * checkpoint.nbytes  # each rank its part; norms at both
    assert 0 < taken.apply_s <= taken.seconds

    with TrainerSegment(EngineConfig()) as trainer:
        with open_checkpoint(folders[2]) as checkpoint:
            for name, info in checkpoint.tensors.items():
                trainer.add(name, info.dtype, info.shape, checkpoint.raw(name))
        await served.live.update(NewWeights(6, segment=trainer.descriptor, tensors=trainer.tensors), 60)
    assert_matches_reference(folders[2], PROMPT, await served.answer())
    assert (served.live.epoch, served.live.torn) == (6, "")


@pytest.mark.asyncio(loop_scope="module")
async def test_out_of_object_storage(served: Served, folders: list[Path], bucket: str) -> None:
    epoch = served.live.epoch
    await served.live.update(NewWeights(epoch + 1, path=str(folders[1])), 60)
    from_disk = await served.answer()
    await served.live.update(NewWeights(epoch + 2, path=str(folders[2])), 60)
    assert await served.answer() != from_disk
    await served.live.update(NewWeights(epoch + 3, path=f"{bucket}/steps/1"), 60)
    assert await served.answer() == from_disk
    assert (served.live.epoch, served.live.torn) == (epoch + 3, "")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_refused_changes_nothing(
    served: Served, folders: list[Path], bucket: str, tmp_path: Path
) -> None:
    before, epoch = await served.answer(), served.live.epoch
    one = make_checkpoint(tmp_path / "other", num_hidden_layers=4, intermediate_size=128)
    (one / "config.json").unlink()
    link, linked, pipe = (tmp_path / name for name in ("link", "linked", "pipe"))
    link.symlink_to("/etc")
    for folder in (linked, pipe):
        folder.mkdir()
    (linked / "model.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(pipe / "model.safetensors")
    bad: list[tuple[NewWeights, type[KvmeshError], str]] = [
        (NewWeights(epoch, path=str(folders[1])), InvalidRequest, f"epoch={epoch}: must be greater than {epoch}"),
        (NewWeights(2**64, path=str(folders[1])), InvalidRequest, "epoch="),
        (NewWeights(20), InvalidRequest, "either a folder, or a trainer's segment"),
        (NewWeights(20, path=str(one)), CheckpointError, r"has shape \[64, 128\].*rank 0"),
        (NewWeights(20, path=str(tmp_path / "none")), CheckpointError, "not a folder"),
        (NewWeights(20, segment=b"x", tensors=(m.RemoteTensor("a", "F32", (0,), 0),)), InvalidRequest, "tensors.a"),
        (NewWeights(20, segment=b"x", tensors=(m.RemoteTensor("a", "F32", (2,) * 9, 0),)), InvalidRequest, "tensors.0"),
        (NewWeights(20, path=str(tmp_path / ("n" * 300))), CheckpointError, "cannot be read: File name too long"),
        (NewWeights(20, path=f"{bucket}/private"), PermissionDenied, "private' is outside of rollout_folders"),
        (NewWeights(20, path=f"{bucket}/steps/2"), CheckpointError, "has neither model.safetensors nor"),
        (NewWeights(20, path=f"{bucket}/steps/../private"), InvalidRequest, "must be like s3://bucket/prefix"),
        (NewWeights(20, path="s3://a:b@127.0.0.1:9/c"), InvalidRequest, "must be like s3://bucket/prefix"),
        (NewWeights(20, path="/etc"), PermissionDenied, "path='/etc' is outside of rollout_folders"),
        (NewWeights(20, path=str(link)), PermissionDenied, "which leads to /etc, is outside"),
        (NewWeights(20, path=str(linked)), PermissionDenied, r"model.safetensors', which leads to /.*, is outside"),
        (NewWeights(20, path=str(pipe)), CheckpointError, "model.safetensors: not a regular file"),
        (NewWeights(2**64 - 1, path=str(folders[1])), InvalidRequest, "weights_epoch=18446744073709551615: at most"),
    ]
    for new, kind, words in bad:
        with pytest.raises(kind, match=words):
            await served.live.update(new, 30)
    assert served.live.epoch == epoch and not served.live.torn
    assert await served.answer() == before


@pytest.mark.asyncio(loop_scope="module")
async def test_a_trainer_cannot_stand_for_a_peer(served: Served, folders: list[Path]) -> None:
    """Descriptors name segments, and KV goes to a name: one that a rank has open, or its own, is not replaced."""
    for name in (served.both.drivers[0].client.ready.engine_name, served.both.drivers[1].client.ready.engine_name):
        with TrainerSegment(EngineConfig(), name) as trainer:
            with open_checkpoint(folders[1]) as checkpoint:
                for tensor, info in checkpoint.tensors.items():
                    trainer.add(tensor, info.dtype, info.shape, checkpoint.raw(tensor))
            new = NewWeights(served.live.epoch + 1, segment=trainer.descriptor, tensors=trainer.tensors)
            with pytest.raises(InvalidRequest, match="another segment of this name is in use"):
                await served.live.update(new, 30)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_trainer_that_goes_in_the_middle_leaves_nothing_that_serves(
    served: Served, folders: list[Path]
) -> None:
    """The embedding is read last: what stands for it lies outside the trainer's segment."""
    epoch = served.live.epoch
    with TrainerSegment(EngineConfig()) as trainer:
        with open_checkpoint(folders[1]) as checkpoint:
            for name, info in checkpoint.tensors.items():
                trainer.add(name, info.dtype, info.shape, checkpoint.raw(name))
        torn = [
            m.RemoteTensor(one.name, one.dtype, one.shape, one.offset + (1 << 40) * ("embed" in one.name))
            for one in trainer.tensors
        ]
        with pytest.raises(FailedWeights, match=rf"rank \d did not get all weights of epoch {epoch + 1}"):
            await served.live.update(NewWeights(epoch + 1, segment=trainer.descriptor, tensors=tuple(torn)), 60)
    assert served.live.torn and served.live.epoch == epoch
    with pytest.raises(InvalidRequest, match="must be greater"):  # no weights of that epoch are ever whole
        await served.live.update(NewWeights(epoch + 1, path=str(folders[1])), 60)
    await served.live.update(NewWeights(epoch + 2, path=str(folders[1])), 60)
    assert not served.live.torn
    assert_matches_reference(folders[1], PROMPT, await served.answer())


async def test_a_rank_killed_in_the_middle_ends_the_update(folders: list[Path], tmp_path: Path) -> None:
    """No files are there any more when the ranks come to read them, but for one rank, which is dead."""
    gone = shutil.copytree(folders[1], tmp_path / "gone")
    async with ranks("k", folders[0], 2, tmp_path, rollout_folders=(str(tmp_path),)) as both:
        served = Served(both)
        for driver in both.drivers:
            driver.client._on_lost = lambda _, cause: served.live.ranks_lost(cause)
        update = asyncio.create_task(served.live.update(NewWeights(1, path=str(gone)), 60))
        process = both.drivers[1].client._process
        assert process is not None
        process.kill()
        with pytest.raises(Unavailable, match="SIGKILL"):
            await update


def test_a_rank_outlives_whatever_opening_weights_raises() -> None:
    class NoMemory:
        @property
        def config(self) -> Any:
            raise MemoryError("none is left")

    said: list[m.ToFront] = []
    worker = WeightsWorker(cast(Any, NoMemory()), *cast(Any, (None, None)), lambda: False, said.append, lambda: None)
    worker.handle(m.PrepareWeights(3, "/w", b"", ()))
    why = "new weights cannot be opened: none is left"
    assert said == [m.WeightsPrepared(3, why, InternalError.code, "")]


def test_an_instance_does_not_go_on_while_its_weights_are_being_changed() -> None:
    """Else requests would come in between the ranks' look at the new weights and the change."""
    front: Any = SimpleNamespace(
        instance_id="a", _live=SimpleNamespace(changing=True, torn="", epoch=0), _sleep=InstanceSleep([])
    )
    front._share_experts = (front,)
    front._check_whole = lambda: Front._check_whole(front)
    with pytest.raises(Overloaded, match="a: its weights are being changed"):
        Front.resume(front)
