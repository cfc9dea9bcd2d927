"""A real rank times its steps when it is asked, by functions that add up, and then runs as before."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.ranks import protocol as m
from kvmesh.ranks.devices import STAGED_CPU
from kvmesh.ranks.worker.profiler import limits
from tests.support.checkpoints import make_checkpoint
from tests.support.rank_driver import GREEDY, Driver, rank, ranks

SECOND_NS = 1_000_000_000


async def tokens_of(driver: Driver) -> list[int]:
    """The answer of the only row, to its end."""
    tokens: list[int] = []
    while True:
        done = await driver.take(m.DecodeStepDone)
        tokens += [token.token_id for token in done.tokens]
        if any(token.finish for token in done.tokens):
            return tokens


def profile(ticket: int, steps: int, seconds: float = 30.0) -> m.Profile:
    return m.Profile(ticket, steps, time.monotonic_ns() + int(seconds * SECOND_NS))


async def computed(driver: Driver, step_id: int, *, push: bool = False) -> None:
    item = m.PrefillItem(step_id, tuple(range(5, 25)), 0, (20, 21), None, push)
    driver.client.send(m.PrefillStep(step_id, (item,)))
    await driver.take(m.PrefillStepDone)


@pytest.mark.parametrize(("device", "order"), [("cpu", "auto"), (STAGED_CPU, "on")])
async def test_steps_are_timed_and_answers_stay_the_same(checkpoint: Path, device: str, order: str) -> None:
    """Where steps are launched ahead, those that are timed are waited for."""
    async with rank("p", checkpoint, device=device, async_steps=order) as driver:
        await computed(driver, 1)  # the KV behind rows: the same for both
        driver.client.send(m.Join(1, (20, 21, 0, 1), 20, 7, 0, 40, 0, (), GREEDY))
        expected = await tokens_of(driver)
        before = time.time_ns()
        driver.client.send(profile(5, 10))
        driver.client.send(m.Join(2, (20, 21, 2, 3), 20, 7, 0, 40, 0, (), GREEDY))
        told = await driver.take(m.Profiled)
        after = time.time_ns()
        assert await tokens_of(driver) == expected
    assert (told.ticket, told.why_not, len(told.steps)) == (5, "", 10)
    assert [step.rows for step in told.steps] == [1] * 10
    assert [step.context_tokens for step in told.steps] == list(range(20, 30))
    assert before < told.steps[0].start_ns < told.steps[-1].end_ns < after
    took = sum(step.end_ns - step.start_ns for step in told.steps)
    assert sum(one.busy_ns for one in told.functions) == took
    by_name = {one.name: one for one in told.functions}
    for name in ("norm", "projections", "rotary", "write", "attention", "mlp", "embedding", "head", "sampling"):
        assert by_name[name].busy_ns > 0, name
    assert "collectives" not in by_name
    assert by_name["mlp"].weight_bytes % 10 == 0
    assert told.bytes_per_s > 0
    assert told.products_per_s > 0
    assert told.pieces is not None
    assert set(told.pieces.names) == by_name.keys() - {"host", "rest"}
    ends = [a + b for a, b in zip(told.pieces.starts_ns, told.pieces.took_ns, strict=True)]
    assert all(end <= start for end, start in zip(ends, told.pieces.starts_ns[1:], strict=False))
    assert ends[-1] <= told.steps[-1].end_ns - told.steps[0].start_ns


async def test_prompt_chunks_are_steps_too_and_a_deadline_ends_it(checkpoint: Path) -> None:
    async with rank("p", checkpoint) as driver:
        await computed(driver, 1)
        asked = time.monotonic()
        driver.client.send(profile(1, 50, seconds=0.5))
        await computed(driver, 2)
        told = await driver.take(m.Profiled)
        assert time.monotonic() - asked >= 0.5
        assert [(step.rows, step.prefill_tokens) for step in told.steps] == [(0, 20)]
        # Nothing runs: it ends by itself, and says so.
        driver.client.send(profile(2, 1, seconds=0.1))
        assert await driver.take(m.Profiled) == m.Profiled(2)
        # Nobody waits: it ends at once, and another ticket's end is nothing to it.
        driver.client.send(profile(3, 1))
        driver.client.send(m.ProfileStop(2))
        driver.client.send(m.ProfileStop(3))
        assert await driver.take(m.Profiled) == m.Profiled(3)
        await computed(driver, 4)
        assert not any(isinstance(message, m.Profiled) for message in driver.inbox)


def test_limits_are_those_of_a_machine() -> None:
    moved, multiplied = limits(torch.device("cpu"), torch.float32, seconds=0.01)
    assert 1e8 < moved < 1e13
    assert 1e8 < multiplied < 1e14


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["pp=2", "cp=2"])
async def test_ranks_that_share_layers_or_contexts_count_what_is_theirs(tmp_path: Path, mesh: str) -> None:
    """Two stages of two layers each; two ranks that share the tokens of a chunk. What they answer stays the same."""
    path = make_checkpoint(tmp_path / "four", family="llama", num_hidden_layers=4, num_attention_heads=8)
    tokens = tuple(range(5, 45))
    async with ranks("two", path, 2, tmp_path, mesh=mesh) as both:
        said = []
        for number in (1, 2):
            if number == 2:
                for driver in both.drivers:
                    driver.client.send(profile(7, 1))
            item = m.PrefillItem(number, tokens, 0, (3, 4, 5), GREEDY, False)
            both.send(m.PrefillStep(number, (item,)))
            said.append((await both.take(m.PrefillStepDone)).sampled[0].token_id)
        told = [await driver.take(m.Profiled) for driver in both.drivers]
    assert said[0] == said[1] and [one.why_not for one in told] == ["", ""]
    names = [{one.name: one for one in each.functions} for each in told]
    layers = 2 if mesh == "pp=2" else 4
    assert [each.layers for each in told] == [layers, layers]
    assert [names[0]["projections"].weight_bytes % layers, names[0]["write"].busy_ns > 0] == [0, True]
    config = open_checkpoint(path).config
    of_layer = (config.heads + 2 * config.kv_heads) * config.head_dim + config.heads * config.head_dim
    assert names[1]["projections"].weight_bytes == layers * config.hidden_size * of_layer * 4
    if mesh == "pp=2":
        assert "embedding" in names[0] and "head" not in names[0]
        assert names[1]["head"].products > 0 and names[1]["embedding"].weight_bytes == 0
