"""Rank groups over real engines, one process for each rank: bytes right whatever the ranks hold, an end mark of every
writer, a dead or frozen writer noticed, and fences that cover them all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvmesh.kvcache.groups import GroupPlan, plan_group
from kvmesh.kvcache.layout import ShardLayout, joined
from kvmesh.transfer import EngineConfig
from tests.support.transfer.peer import Peer
from tests.support.transfer.rank import RankActor
from tests.transfer.conftest import TRANSPORTS, Nest, equipped

LAYERS, HEADS, TOKENS, DIM, BLOCKS = 4, 4, 16, 8, 5
WRITERS, READERS = 4, 2
REGION = BLOCKS * LAYERS * 2 * HEADS * TOKENS * DIM * 4
CANARY = b"\xa5"
IDLE_S = 1.0


def ranks(pp: int, tp: int, planes: int = 2, heads: int = HEADS) -> tuple[ShardLayout, ...]:
    """pp × tp ranks; with more of them than heads, neighbours are replicas."""
    width, copies = max(heads // tp, 1), max(tp // heads, 1)
    return tuple(
        ShardLayout(LAYERS // pp, width, TOKENS, DIM, 4, i * LAYERS // pp, j // copies * width, planes)
        for i in range(pp)
        for j in range(tp)
    )


def shard_of(s: ShardLayout, block: int, salt: int) -> bytes:
    heads = max(HEADS, s.first_head + s.kv_heads)
    model = np.random.default_rng([salt, block]).integers(0, 1 << 32, (LAYERS, s.planes, heads, TOKENS, DIM), np.uint32)
    return model[s.first_layer : s.first_layer + s.layers, :, s.first_head : s.first_head + s.kv_heads].tobytes()


class Mesh:
    """Engine processes that know one another."""

    def __init__(self, transport: str, writers: int, readers: int) -> None:
        config = EngineConfig(transports=(transport,), ack_timeout_s=2.0, request_timeout_s=20.0)
        self.writers = [Peer(f"writer-{i}@1", equipped(config, 0), RankActor) for i in range(writers)]
        self.readers = [Peer(f"reader-{i}@1", equipped(config, 1), RankActor) for i in range(readers)]
        for writer in self.writers:
            writer.allocate(REGION)
        self.bases = [reader.allocate(REGION) for reader in self.readers]
        for reader, writer in itertools.product(self.readers, self.writers):
            writer.open(reader.descriptor())

    def land(self, plan: GroupPlan, epoch: int) -> None:
        for r, reader in enumerate(self.readers[: len(plan.readers)]):
            reader.put(0, CANARY * REGION)
            reader.land(epoch, [f"writer-{w}@1" for w in sorted(plan.marks(r))])

    def legs(self, plan: GroupPlan, writer: int, blocks: Sequence[int]) -> list[tuple[str, list[tuple[int, int, int]]]]:
        """Blocks lie one behind the other at the writer, in reverse at the reader."""
        near, legs = plan.writers[writer].shard_bytes, []
        for r in plan.targets(writer):
            far = plan.readers[r].shard_bytes
            runs = (
                (block * near + a, self.bases[r] + (BLOCKS - 1 - block) * far + b, length)
                for block in blocks
                for a, b, length in plan.runs(writer, r, block)
            )
            legs.append((f"reader-{r}@1", joined(runs)))
        return legs

    def start(
        self, plan: GroupPlan, epoch: int, blocks: Sequence[int] = range(BLOCKS), batch_bytes: int = 3000
    ) -> None:
        for w, layout in enumerate(plan.writers):
            self.writers[w].put(0, b"".join(shard_of(layout, block, epoch) for block in range(BLOCKS)))
        for w in range(len(plan.writers)):
            self.writers[w].write(epoch, self.legs(plan, w, blocks), batch_bytes)

    def end(self) -> None:
        for peer in (*self.writers, *self.readers):
            peer.end()


@pytest.fixture(scope="module", params=TRANSPORTS)
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    made = Mesh(request.param, WRITERS, READERS)
    yield made
    made.end()


EPOCHS = itertools.count(1)
CASES = {
    "tp2-tp1": (ranks(1, 2), ranks(1, 1)),
    "tp1-tp2": (ranks(1, 1), ranks(1, 2)),
    "tp4-tp2": (ranks(1, 4), ranks(1, 2)),
    "pp2-tp2": (ranks(2, 1), ranks(1, 2)),
    "pp2tp2-pp2": (ranks(2, 2), ranks(2, 1)),
    "tp4-of-2-heads": (ranks(1, 4, heads=2), ranks(1, 2, heads=2)),
    "latent-4-1": (ranks(1, 4, 1, heads=1), ranks(1, 1, 1, heads=1)),
    "latent-4-2": (ranks(1, 4, 1, heads=1), ranks(1, 2, 1, heads=1)),
    "latent-1-2": (ranks(1, 1, 1, heads=1), ranks(1, 2, 1, heads=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_reader_gets_its_shards(mesh: Mesh, case: str) -> None:
    plan = plan_group(*CASES[case])
    epoch = next(EPOCHS)
    mesh.land(plan, epoch)
    mesh.start(plan, epoch)
    for r, layout in enumerate(plan.readers):
        reader = mesh.readers[r]
        assert reader.landed(10.0) == ""
        # The marks are the reader's only sign: everything must be there now.
        size = layout.shard_bytes
        got = reader.read(0, REGION)
        for block in range(BLOCKS):
            at = (BLOCKS - 1 - block) * size
            assert got[at : at + size] == shard_of(layout, block, epoch), (r, block)
        assert got[BLOCKS * size :] == CANARY * (REGION - BLOCKS * size)
        reader.fence_all()
    sent = 0
    for writer in mesh.writers[: len(plan.writers)]:
        cause, certain, nbytes = writer.written()
        assert (cause, certain) == ("", True)
        sent += nbytes
    assert sent == BLOCKS * sum(layout.shard_bytes for layout in plan.readers), "nothing goes twice"


def test_a_writer_without_bytes_marks_all_the_same(mesh: Mesh) -> None:
    """Of four replicas one sends the only block."""
    plan = plan_group(*CASES["latent-4-1"])
    epoch = next(EPOCHS)
    mesh.land(plan, epoch)
    assert mesh.readers[0].missing() == [f"writer-{w}@1" for w in range(4)]
    mesh.start(plan, epoch, blocks=[2])
    assert mesh.readers[0].landed(10.0) == ""
    assert sorted(writer.written()[2] for writer in mesh.writers) == [0, 0, 0, plan.readers[0].shard_bytes]
    mesh.readers[0].fence_all()


def test_a_window_that_is_closed_fails_the_whole_write(mesh: Mesh) -> None:
    """One reader has fenced already: the writer says so, once, and the other gets no mark of a half transfer later."""
    plan = plan_group(ranks(1, 1), ranks(1, 2))
    epoch = next(EPOCHS)
    mesh.land(plan, epoch)
    mesh.readers[1].fence_all()
    mesh.start(plan, epoch)
    cause, certain, _ = mesh.writers[0].written()
    assert cause and certain
    mesh.readers[0].fence_all()


@pytest.mark.parametrize("how", ["killed", "frozen"])
@pytest.mark.slow
def test_a_writer_that_dies_is_named_and_fenced(nest: Nest, transport: str, how: str) -> None:
    """The others' marks come; the reader's wait ends with the name of the one that did not, and once every window is
    fenced nothing lands, whatever a frozen writer still has in hand when it wakes."""
    plan = plan_group(ranks(1, 2), ranks(1, 1))
    mesh = Mesh(transport, 2, 1)
    nest.peers += [*mesh.writers, *mesh.readers]
    reader, victim = mesh.readers[0], mesh.writers[1]
    mesh.land(plan, 7)
    victim.put(0, b"\x11" * REGION)
    legs = mesh.legs(plan, 1, range(BLOCKS))
    victim.flood("write", *legs[0], 7)  # over and over, in the middle of something at any moment
    mesh.writers[0].write(7, mesh.legs(plan, 0, range(BLOCKS)), 1 << 20)
    assert mesh.writers[0].written()[0] == ""
    assert reader.missing() == ["writer-1@1"]
    (victim.kill if how == "killed" else victim.freeze)()
    why = reader.landed(IDLE_S)
    assert "no end mark of writer-1@1" in why and "writer-0" not in why
    reader.fence_all()
    reader.put(0, CANARY * REGION)
    if how == "frozen":
        victim.thaw()
        assert victim.flood_result(), "it was refused"
    assert reader.read(0, REGION) == CANARY * REGION
