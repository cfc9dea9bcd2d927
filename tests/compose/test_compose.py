"""The whole mesh in containers, under continuous load, struck again and again: `make test-compose`.

Every request ends in the right tokens or one clear error; right answers flow again within seconds; in the end all
pools are full. The table of faults is printed, and written where COMPOSE_TEST_TABLE says.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.compose.containers import Containers, Refused, until
from tests.support.compose.faults import FAULTS, IN_CI, Fault
from tests.support.compose.load import BROKEN, HUNG, WRONG, Load, Question, ask

pytestmark = [
    pytest.mark.skipif(
        "COMPOSE_TEST" not in os.environ, reason="needs a Docker daemon and an image: run `make test-compose`"
    ),
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
]

QUESTIONS, ANSWERED_AT_ONCE = 24, 4
BASELINE_S = 15.0
SHARE = 0.5  # of the right answers a second before: half of prefill or decode may be away
PATIENCE_S = 180.0  # twelve containers on two slow cores: one that starts anew imports for a minute
QUIET_S = 3.0
BEFORE_S = 4.0
ENV = {
    "KVMESH_MEMORY_MB": "96",
    "KVMESH_POOL_MEMORY_MB": "96",
    "KVMESH_STOP_DELAY_MS": "2000",  # clients look every LOOK_S
    "KVMESH_STOP_GRACE_MS": "300",  # of prefill and decode: shorter than an answer, so that some of them migrate
    "KVMESH_EVACUATE_MS": "4000",
    "KVMESH_ADMISSION": "off",  # two cores for twelve containers: TTFT is no matter here
}
MIGRATIONS = re.compile(r'^kvmesh_gateway_migrations_total\{.*outcome="moved".*\} (\S+)$', re.M)
WORDS = "mesh block prefix token layer page lease leader standby drain pool ring shard queue".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Row:
    """Of the table. `seconds`: with less than SHARE of the goodput before; None: to the end of our
    patience."""

    fault: Fault
    outcomes: Counter[str]
    migrated: int
    seconds: float | None
    gap_s: float

    def cells(self) -> str:
        others = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()) if name != "ok") or "none"
        seconds = "never" if self.seconds is None else f"{self.seconds:.1f}"
        cells = (self.fault.name, self.outcomes["ok"], self.migrated, others, seconds, f"{self.gap_s:.1f}")
        return f"| {' | '.join(map(str, cells))} |"


TITLES = (
    "fault", "right answers", "migrated", "errors", f"seconds below {SHARE:.0%} of goodput", "longest pause, s",
)  # fmt: skip
HEAD = f"| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Containers]:
    containers = Containers(ENV)
    await containers.down()
    try:
        await containers.up(prefill=2, decode=2, gateway=2)
        yield containers
    finally:
        if logs := os.environ.get("COMPOSE_TEST_LOGS"):
            keep(logs, await containers.compose("logs", "--timestamps", "--no-color"))
        await containers.down()


def keep(path: str, text: str) -> None:
    Path(path).write_text(text)


def questions() -> list[Question]:
    """Of all lengths, half of them with a beginning in common."""
    rng = random.Random(8)

    def words(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    common = words(60)
    return [
        Question(f"{common if number % 2 else ''} {words(rng.randint(5, 80))}:", rng.choice((32, 96, 224)))
        for number in range(QUESTIONS)
    ]


async def answered(mesh: Containers) -> list[Question]:
    """With the answers of the undisturbed mesh, each of them given twice."""
    load, lanes = Load(mesh, []), asyncio.Semaphore(ANSWERED_AT_ONCE)

    async def one(question: Question) -> Question:
        async with lanes:
            first, again = [(await ask(load.at(load.gateways[0]), question))[0] for _ in range(2)]
        assert first and first == again, "greedy answers do not change"
        return Question(question.prompt, question.max_tokens, first)

    try:
        await load._look_once()
        return await asyncio.gather(*map(one, questions()))
    finally:
        for client in load._open.values():
            await client.close()


async def migrated(mesh: Containers, seen: dict[str, float]) -> int:
    """Answers that went on elsewhere, since the last look."""
    more = 0.0
    for gateway in await mesh.of("gateway"):
        if not gateway.running:
            continue
        try:
            total = sum(map(float, MIGRATIONS.findall(await mesh.metrics(gateway))))
        except Exception:  # it is just being started or stopped
            continue
        before = seen.get(gateway.name, 0.0)
        more += total - before if total >= before else total
        seen[gateway.name] = total
    return round(more)


async def calm(load: Load, begun: float, wanted: float) -> None:
    """Right answers have flowed for QUIET_S. Refused: they have not within PATIENCE_S."""

    async def quiet() -> bool:
        return load.disturbed(begun, time.monotonic(), wanted)[1] >= QUIET_S

    await until(quiet, "right answers flow", PATIENCE_S)


async def struck(mesh: Containers, load: Load, fault: Fault, baseline: float, seen: dict[str, float]) -> Row:
    """One row: the blow, what came of requests, and when all was well again. No better than just before: machines that
    tests run on have other things to do, too."""
    begun = time.monotonic()
    wanted = SHARE * min(baseline, load.goodput(begun - BEFORE_S, begun))
    failed: Refused | None = None
    try:
        async with fault.strike(mesh):
            await calm(load, begun, wanted)
        await calm(load, begun, wanted)
    except Refused as err:
        failed = err
    now = time.monotonic()
    outcomes = load.since(begun)
    low, _ = load.disturbed(begun, now, wanted)
    row = Row(
        fault,
        outcomes,
        await migrated(mesh, seen),
        low if failed is None else None,
        max((one.gap_s for one in load.done if one.ended >= begun), default=0.0),
    )
    print(row.cells(), flush=True)
    if failed is not None:
        print(f"  {failed}", flush=True)
    return row


async def test_requests_survive_whatever_befalls_the_mesh(mesh: Containers, capsys: pytest.CaptureFixture[str]) -> None:
    asked = await answered(mesh)
    only = os.environ.get("COMPOSE_TEST_FAULTS") or "|".join(IN_CI)
    faults = [fault for fault in FAULTS if re.search(only, fault.name)]
    seen: dict[str, float] = {}
    rows: list[Row] = []
    with capsys.disabled():
        async with Load(mesh, asked) as load:
            await asyncio.sleep(5.0)  # the first answers have ended by then
            begun = time.monotonic()
            await asyncio.sleep(BASELINE_S)
            baseline = load.goodput(begun, begun + BASELINE_S)
            assert baseline > 0.2, f"{baseline} right answers a second: {load.since(begun)}"
            print(f"\n\n{baseline:.1f} right answers a second before all faults\n\n{HEAD}", flush=True)
            for fault in faults:
                rows.append(await struck(mesh, load, fault, baseline, seen))
        bad = [one for one in load.done if one.outcome in (WRONG, HUNG, "unnamed")]
        broken = [one for one in load.done if one.outcome == BROKEN]
        print(f"\n{len(load.done)} requests: {dict(load.since(0.0))}", flush=True)
        for one in [*bad, *broken][:10]:
            print(f"  {one}", flush=True)
    if table := os.environ.get("COMPOSE_TEST_TABLE"):
        keep(table, "\n".join([HEAD, *(row.cells() for row in rows), ""]))
    assert not bad
    assert not broken or any(row.fault.breaks for row in rows), "connections break only with their gateway"
    never = [row.fault.name for row in rows if row.seconds is None]
    assert not never, "goodput recovers"

    async def full() -> bool:
        left[:] = await mesh.full()
        return not left

    left: list[str] = []
    try:
        await until(full, "pools are full again", 60.0)
    except Refused:
        pytest.fail(f"pools are not full: {left}")
