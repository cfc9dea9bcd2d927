"""Disks and object stores that fail under a serving mesh: full, damaged, cut short, read-only, gone. Every answer is
the reference's, each kind of fault is counted where alerts look for it, and afterwards every pool is full.

The disk is a small ext4 in a file, on which somebody else's file can take the room and which the kernel itself turns
read-only, as it does with a disk that fails."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import obstore
import pytest

from kvmesh.kvcache.tiers import Tier
from kvmesh.tiers.object_store.client import IDENTITY, open_store
from tests.chaos import rot
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import prompt, until
from tests.support.mesh.direct import Direct, node_store
from tests.support.mesh.harness import Running
from tests.support.mesh.namespaces import metric
from tests.support.reference import assert_matches_reference
from tests.support.s3_server import S3, s3_server

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300)]

VOCAB, BLOCK, EXTENTS = 301, 16, 32
BLOCKS, ANSWER = 6, 3
LENGTH = BLOCKS * BLOCK + 5
SETS = 8  # prompts; three times what DRAM holds of them
DISK_MB, SSD_MB = 64, 32
FAULTS = "kvmesh_node_tier_faults_total"


class Disk:
    """A file system of its own at `path`."""

    def __init__(self, folder: Path) -> None:
        self.path, self._image = folder / "disk", folder / "disk.img"
        self.path.mkdir()
        with self._image.open("wb") as image:
            image.truncate(DISK_MB << 20)
        _run("mkfs.ext4", "-q", str(self._image))
        _run("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self.path))

    def fill(self) -> None:
        """Takes all the room that is left."""
        free = os.statvfs(self.path)
        with (self.path / "others").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)

    def free(self) -> None:
        """Gives back what `fill` took."""
        (self.path / "others").unlink()

    def turn_read_only(self) -> None:
        """Tells the kernel that the file system is broken."""
        device = _run("findmnt", "-no", "SOURCE", str(self.path)).strip().rpartition("/")[2]
        Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("test")

    def close(self) -> None:
        _run("umount", "--lazy", str(self.path))


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{argv[0]}: {done.stderr.strip()}")
    return done.stdout


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("mounts a small ext4: run as root, with e2fsprogs, where loop devices may be used")
    try:
        made = Disk(tmp_path)
    except OSError as error:
        pytest.skip(f"no loop device can be mounted here ({error}): a machine or a privileged container has them")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


class Load:
    """Asks for prompts at given instances and compares what comes with the reference."""

    def __init__(self, running: Running, direct: Direct, model: Path) -> None:
        self._running, self._direct, self._model = running, direct, model
        self._prompts = [prompt(seed, LENGTH, VOCAB) for seed in range(SETS)]
        self.asked = self.cached = 0

    async def ask(self, prefill: str, salt: str = "") -> None:
        """All prompts, some at a time, prefilled at `prefill`; decoded at both."""
        few = asyncio.Semaphore(3)

        async def one(n: int, tokens: list[int]) -> None:
            async with few:
                answer = await self._direct.generate(
                    tokens, ANSWER, prefill=prefill, decode=f"decode-{n % 2}", salt=salt, timeout_s=60
                )
            assert (answer.error, len(answer.tokens)) == (None, ANSWER), (prefill, salt, n)
            assert_matches_reference(self._model, tokens, answer.tokens)
            self.asked += 1
            self.cached += answer.cached_tokens

        await asyncio.gather(*(one(n, tokens) for n, tokens in enumerate(self._prompts)))

    def faults(self, name: str, tier: str, fault: str) -> float:
        """The faults of this kind that the instance's metrics show."""
        address = next(one.spec.metrics for one in self._running.mesh.processes.values() if one.spec.name == name)
        return metric(address, FAULTS, f'tier="{tier}"', f'fault="{fault}"')

    async def until_fault(self, name: str, tier: str, fault: str, ask: str | None = None) -> None:
        """Asks, with new salts ("new") or the old one, until a fault shows that was not there before."""
        before, turn = self.faults(name, tier, fault), 0

        async def shown() -> bool:
            nonlocal turn
            turn += 1
            await self.ask(name, f"{fault} {turn}" if ask == "new" else "")
            return self.faults(name, tier, fault) > before

        await until(shown, f"{fault} of {tier} at {name}", 60)

    async def written(self, name: str, tier: Tier) -> None:
        """The tier has a third of the prompts' blocks: under load some are evicted before they are written."""

        async def there() -> bool:
            tiers = (await node_store(self._running.mesh.addresses[name])).tiers
            return any(one.tier == tier.value and one.blocks >= SETS * BLOCKS // 3 for one in tiers)

        await until(there, f"the prompts in {tier.name} of {name}")


def damage_objects(bucket: str) -> int:
    """Changes the last byte of every object; how many."""
    store = open_store(f"s3://{bucket}")
    names = [meta["path"] for found in obstore.list(store) for meta in found]
    names = [name for name in names if not name.endswith(f"/{IDENTITY}")]
    for name in names:
        body = bytearray(obstore.get(store, name).bytes())
        body[-1] ^= 1
        obstore.put(store, name, body, use_multipart=False)
    return len(names)


async def test_answers_are_right_whatever_the_disks_do(
    tmp_path: Path, mesh: Callable[..., AbstractAsyncContextManager[Running]], disk: Disk, s3: S3
) -> None:
    model = make_checkpoint(tmp_path / "llama", family="llama", vocab_size=VOCAB)
    bucket = s3.bucket()
    few: dict[str, Any] = {"num_pages": 16, "num_extents": EXTENTS, "ssd_offload_percent": 0}
    flags: dict[str, dict[str, Any]] = {
        "conductor": {"slo_tbt_ms": 60_000, "admission": "off"},
        "*": {"stop_grace_ms": 100},
        "prefill-0": few | {"ssd_path": str(disk.path / "ssd"), "ssd_capacity_mb": SSD_MB},
        "prefill-1": few | {"object_url": f"s3://{bucket}/blocks"},
        "decode": {"num_pages": 64, "num_extents": 32},
    }
    shape: dict[str, Any] = {"prefill": 2, "decode": 2, "pool": 1, "pool_memory_mb": 16, "block_tokens": BLOCK}
    async with mesh(model, flags=flags, **shape) as running:
        for name in running.instances():
            await running.ready(name)
        load = Load(running, await Direct.of(running), model)
        for name, tier in (("prefill-0", Tier.SSD), ("prefill-1", Tier.OBJECT)):
            await load.ask(name)
            await load.written(name, tier)
        load.cached = 0
        await load.ask("prefill-0")
        await load.ask("prefill-1")
        assert load.cached, "nothing was read from a tier: what follows would show nothing"

        # Full: others take the room. What is there is still read; in the end the oldest blocks go.
        disk.fill()
        await load.until_fault("prefill-0", "ssd", "full", "new")
        await load.ask("prefill-0")
        disk.free()

        # Damaged: bits of payloads flip.
        await load.ask("prefill-0")
        await load.written("prefill-0", Tier.SSD)
        assert rot.disk(disk.path / "ssd", random.Random(1), most=1 << 20)
        await load.until_fault("prefill-0", "ssd", "damaged")

        # Cut short, as a torn write leaves a file.
        await load.ask("prefill-0")
        await load.written("prefill-0", Tier.SSD)
        for path in (disk.path / "ssd").rglob("bucket-*.kv"):
            os.truncate(path, 4096)
        await load.until_fault("prefill-0", "ssd", "io")

        # Read-only, by the kernel. An instance that starts then leaves the tier out: see test_left_out.
        disk.turn_read_only()
        await load.until_fault("prefill-0", "ssd", "io", "new")

        # The object store: other bytes, then gone, in the middle of requests.
        assert damage_objects(bucket)
        await load.until_fault("prefill-1", "object", "damaged")
        await load.ask("prefill-1")
        s3.process.send_signal(signal.SIGKILL)
        await load.until_fault("prefill-1", "object", "io", "new")

        await running.settled()
        print(f"{load.asked} answers right")
