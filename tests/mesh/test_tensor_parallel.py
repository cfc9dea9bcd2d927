"""Instances of two ranks in a real mesh, which share heads or layers: handoffs from two ranks to one, from one to two
and from two to two, blocks that are used again and go from one cut to the other, a rank that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from kvmesh.cli.instances import call_instance
from kvmesh.rpc.pb import instance_pb2
from tests.support.checkpoints import make_checkpoint
from tests.support.mesh.client import Answer, until
from tests.support.mesh.direct import Direct, blocks_at
from tests.support.mesh.harness import Running, running_mesh
from tests.support.reference import assert_matches_reference

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCK, VOCAB, TOKENS = 16, 301, 24
SHAPE: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "vocab_size": VOCAB}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "qwen3-tp", family="qwen3", **SHAPE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def four(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """prefill-0 and decode-0 of one rank, decode-1 and coupled-0 of two, coupled-1 of two stages. What prefill-0 sends
    goes through staging."""
    two = {"tensor_parallel": 2}
    flags = {
        "prefill": {"prefill_chunk_tokens": 48, "device": "cpu-staged"},
        "decode-1": two,
        "coupled-0": two | {"prefill_chunk_tokens": 48, "rank_timeout_ms": 4000},
        "coupled-1": {"mesh": "pp=2", "prefill_chunk_tokens": 48},
    }
    shape: dict[str, Any] = {"prefill": 1, "decode": 2, "coupled": 2, "block_tokens": BLOCK, "memory_mb": 16}
    async with running_mesh(model, tmp_path_factory.mktemp("run"), flags=flags, **shape) as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    return [(seed * 31 + 7 * i * i + 3 * i) % (VOCAB - 45) for i in range(length)]


def check(model: Path, asked: list[int], answer: Answer) -> None:
    assert answer.error is None
    assert len(answer.tokens) == TOKENS
    assert_matches_reference(model, asked, answer.tokens)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("coupled-0", "decode-0"),
        ("prefill-0", "decode-1"),
        ("coupled-0", "decode-1"),
        ("coupled-0", "coupled-0"),
        ("coupled-1", "decode-0"),
        ("coupled-1", "decode-1"),
        ("prefill-0", "coupled-1"),
        ("coupled-1", "coupled-1"),
    ],
)
async def test_tokens_do_not_depend_on_how_many_ranks_either_side_has(
    four: Running, model: Path, prefill: str, decode: str
) -> None:
    """Several requests at a time, so that rows join and leave while others run; then the same prompts again, whose
    blocks lie at both ends already."""
    direct, salt = await Direct.of(four), f"{prefill}{decode}"
    asked = [prompt(length, seed) for seed, length in enumerate((130, 17, 16, 95, 3))]

    async def ask() -> list[Answer]:
        calls = [direct.generate(one, TOKENS, prefill=prefill, decode=decode, salt=salt) for one in asked]
        return list(await asyncio.gather(*calls))

    for _ in range(2):
        answers = await ask()
        for one, answer in zip(asked, answers, strict=True):
            check(model, one, answer)
    assert [answer.cached_tokens for answer in answers] == [128, 16, 0, 80, 0]
    await four.settled()


@pytest.mark.parametrize(
    ("holder", "reader", "decode"),
    [
        ("prefill-0", "coupled-0", "decode-0"),
        ("coupled-0", "prefill-0", "decode-1"),
        ("coupled-1", "coupled-0", "decode-0"),
    ],
)
async def test_stored_blocks_go_from_one_cut_to_the_other(
    four: Running, model: Path, holder: str, reader: str, decode: str
) -> None:
    """A prompt that one instance has computed is read by a prefill instance of another cut, and by decode for its own
    part of the next turn."""
    direct, salt, asked = await Direct.of(four), f"from {holder}", prompt(130, 9)
    other = "decode-1" if decode == "decode-0" else "decode-0"
    check(model, asked, await direct.generate(asked, TOKENS, prefill=holder, decode=other, salt=salt))
    keys = direct.keys(asked, salt)

    async def sealed() -> bool:
        return set(keys) <= await blocks_at(four.mesh.addresses[holder])

    await until(sealed, f"{len(keys)} blocks at {holder}")
    answer = await direct.generate(
        asked,
        TOKENS,
        prefill=reader,
        decode=decode,
        salt=salt,
        pulls=[(holder, 0, len(keys))],
        decode_pulls=[(holder, 0, len(keys))],
    )
    check(model, asked, answer)
    assert answer.timings is not None
    assert answer.timings.pulled_tokens == answer.timings.at_decode_tokens == 128
    await four.settled()


async def test_a_profile_times_the_same_steps_at_every_rank(four: Running, model: Path) -> None:
    direct, asked = await Direct.of(four), prompt(60, 5)
    ask = instance_pb2.ProfileRequest(steps=8, deadline_ms=60_000)
    timed = asyncio.ensure_future(call_instance(four.mesh.addresses["decode-1"], "Profile", ask, 100))
    while not timed.done():  # whether they came before or after it, its steps are those of some answer
        check(model, asked, await direct.generate(asked, TOKENS, prefill="prefill-0", decode="decode-1", salt="timed"))
    first, second = (await timed).ranks
    what = [[(step.rows, step.context_tokens, step.prefill_tokens) for step in rank.steps] for rank in (first, second)]
    assert len(what[0]) == 8
    assert what[0] == what[1]
    for rank in (first, second):
        (sums,) = [one for one in rank.functions if one.name == "collectives"]
        assert sums.busy_ns > 0
        assert sums.activation_bytes > 0
    await four.settled()


@pytest.mark.parametrize(
    ("name", "sign", "cause"),
    [
        ("decode-1", signal.SIGKILL, "rank 1 (pid {1}) was killed by SIGKILL"),
        ("coupled-1", signal.SIGKILL, "rank 1 (pid {1}) was killed by SIGKILL"),
        ("coupled-0", signal.SIGSTOP, "rank 0 (pid {0}) gave up: rank 0 lost the other ranks in a step: "),
    ],
)
async def test_a_rank_that_dies_or_freezes_ends_its_instance(
    four: Running, model: Path, name: str, sign: signal.Signals, cause: str
) -> None:
    """Its sister is in the middle of a step with it. No process is left, the log has the cause, and the supervisor
    brings the instance back."""
    direct, front = await Direct.of(four), four.pid(name)
    ranks = sorted(four.rank_pids(name), key=lambda pid: psutil.Process(pid).create_time())
    assert len(ranks) == 2
    begun = asyncio.Event()
    request = direct.generate(prompt(20, 3), 1500, prefill="prefill-0", decode=name, begun=begun)
    running = asyncio.ensure_future(request)
    async with asyncio.timeout(30):
        await begun.wait()  # a rank that freezes before the first step keeps nobody waiting in one
    os.kill(ranks[1], sign)
    answer = await running
    assert answer.error is not None

    async def over() -> bool:
        return not any(psutil.pid_exists(pid) for pid in (front, *ranks))

    path = Path(four.mesh.settings.run_dir) / "logs" / f"{name}.log"
    try:
        await until(over, f"the end of {name}", 60.0)
    except AssertionError as error:
        left = {pid: psutil.Process(pid).status() for pid in (front, *ranks) if psutil.pid_exists(pid)}
        log = await asyncio.to_thread(path.read_text)
        raise AssertionError(f"{error}; of front and ranks {front, *ranks} are left {left}; {log[-3000:]}") from None
    log = await asyncio.to_thread(path.read_text)
    assert cause.format(*ranks) in log
    await four.restarted(name, front)
    await direct.refresh()
    check(model, prompt(20, 3), await direct.generate(prompt(20, 3), TOKENS, prefill="prefill-0", decode=name))
