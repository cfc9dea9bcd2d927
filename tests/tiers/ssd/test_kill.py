"""kill -9 while blocks are written: all that was acknowledged and neither evicted nor removed is there, and whole.

A process writes, this one reads its acknowledgements and kills it after a number of them drawn by seed; the folder is
then opened here, looked at, and given to the next process, for several rounds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvmesh.tiers.ssd import SsdTier
from tests.support.paths import ROOT
from tests.support.ssd_blocks import BUCKET, config, get, key, settle
from tests.support.ssd_victim import TOTAL, length

ROUNDS = 4


@dataclass
class Said:
    """What victims have said so far; `stored` in the order of the log."""

    stored: list[int] = field(default_factory=list)
    maybe_removed: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)


def run_and_kill(path: Path, said: Said, number: int, capacity: int, direct: str, read_percent: int, acks: int) -> None:
    arguments = [path, number, number * TOTAL, capacity, direct, read_percent]
    victim = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ssd_victim", *map(str, arguments)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert victim.stdout is not None
    with victim.stdout as lines:
        for count, line in enumerate(lines, 1):
            note(said, line)
            if count == acks:
                victim.kill()
                break
        for line in lines:  # what it had said before the kill reached it
            if line.endswith(b"\n"):
                note(said, line)
    assert victim.wait() == -9


def note(said: Said, line: bytes) -> None:
    what, n = line.split()
    if what == b"P":
        said.stored.append(int(n))
    elif what == b"A":
        said.maybe_removed.add(int(n))
    else:
        said.removed.add(int(n))


@pytest.mark.parametrize(("direct", "seed"), [("auto", 1), ("off", 2), ("auto", 3)])
@pytest.mark.slow
def test_with_room_for_all_nothing_acknowledged_is_lost(tmp_path: Path, direct: str, seed: int) -> None:
    rng, said = random.Random(seed), Said()
    for number in range(ROUNDS):
        run_and_kill(tmp_path, said, number, 4000, direct, 0, rng.randint(1, 300))
        with SsdTier(config(tmp_path, capacity_bytes=4000 * BUCKET, direct=direct)) as tier:
            assert tier.report.walked <= 1 and tier.report.corrupt <= 12  # of the batch that was being written
            held = {n for n in said.stored if get(tier, n, length(n))}
            missing = set(said.stored) - held
            assert missing <= said.maybe_removed, (seed, number)
            assert said.removed & held == set()
            # Of what was found beside that (written, and not yet said) every byte is right as well.
            known = {key(n): n for n in range((number + 1) * TOTAL)}
            there: list[bytes] = tier.keys()
            assert all(get(tier, known[k], length(known[k])) for k in there)
            assert tier.stats().counts.corrupt == 0
            tier.check_integrity()


@pytest.mark.parametrize(("direct", "read_percent", "seed"), [("auto", 0, 4), ("off", 0, 5), ("auto", 90, 6)])
@pytest.mark.slow
def test_while_old_blocks_make_room_only_the_oldest_are_missing(
    tmp_path: Path, direct: str, read_percent: int, seed: int
) -> None:
    rng, said, capacity = random.Random(seed), Said(), 6
    for number in range(ROUNDS):
        run_and_kill(tmp_path, said, number, capacity, direct, read_percent, rng.randint(150, 500))
        made = config(
            tmp_path, capacity_bytes=capacity * BUCKET, direct=direct, reinsert_percent=25 if read_percent else 0
        )
        with SsdTier(made) as tier:
            settle(tier)  # it goes on making room where the other had stopped
            held = {n for n in said.stored if get(tier, n, length(n))}
            assert said.removed & held == set()
            assert tier.stats().counts.corrupt == 0
            stayed = [n for n in said.stored if n in held or n in said.maybe_removed]
            if not read_percent:  # nothing is appended again: what is missing is older than all that is there
                order = {n: at for at, n in enumerate(said.stored)}
                first = min(order[n] for n in held)
                assert set(said.stored[first:]) <= set(stayed), (seed, number)
            recent = said.stored[-15:]  # less than the buckets hold that are never given up
            assert set(recent) <= set(stayed), (seed, number)
            assert sum(path.stat().st_size for path in tmp_path.glob("bucket-*")) <= capacity * BUCKET
