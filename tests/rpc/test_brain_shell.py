"""The shell around a pure machine: order, errors, the timer."""

from __future__ import annotations

import asyncio

import pytest

from kvmesh.clock import NEVER, Tick
from kvmesh.rpc.brain_shell import BrainShell


class Machine:
    """Answers each word with its letters; wants a Tick at `due`."""

    def __init__(self) -> None:
        self.due = NEVER
        self.heard: list[tuple[str | Tick, int]] = []

    def step(self, event: str | Tick, now: int) -> list[str]:
        self.heard.append((event, now))
        if isinstance(event, Tick):
            self.due = NEVER
            return ["tick"]
        if event == "bad":
            raise ValueError(event)
        return list(event)

    def next_due(self) -> int:
        return self.due


async def test_an_event_that_comes_up_meanwhile_waits_its_turn() -> None:
    machine, done, idle = Machine(), [], []

    def do(letter: str, now: int) -> None:
        done.append((letter, now))
        if letter == "a":
            shell.feed("xy")

    times = iter((1, 2, 3))
    shell = BrainShell[str, str](machine.step, machine.next_due, do, lambda: next(times))
    shell.fed = lambda: idle.append(len(done))
    shell.feed("ab")
    assert done == [("a", 1), ("b", 1), ("x", 2), ("y", 2)]
    assert idle == [4], "told once, when no event is left"


async def test_what_the_machine_raises_goes_to_who_fed_and_the_rest_comes_with_the_next_event() -> None:
    machine, done = Machine(), []

    def do(letter: str, now: int) -> None:
        done.append(letter)
        if letter == "a":
            shell.feed("bad")
            shell.feed("c")

    shell = BrainShell[str, str](machine.step, machine.next_due, do)
    with pytest.raises(ValueError, match="bad"):
        shell.feed("a")
    assert done == ["a"]
    shell.feed("d")
    assert done == ["a", "c", "d"]


async def test_a_tick_comes_when_the_machine_is_due_and_none_after_the_end() -> None:
    machine, ticked = Machine(), asyncio.Event()
    shell = BrainShell[str, str](machine.step, machine.next_due, lambda word, now: ticked.set())
    machine.due = 0  # long ago
    shell.feed("")
    assert not ticked.is_set(), "a timer, and no step within the step"
    await asyncio.wait_for(ticked.wait(), 30)
    assert [event for event, _ in machine.heard] == ["", Tick()]

    machine.due = 0
    shell.feed("")
    shell.close()
    ticked.clear()
    shell.feed("z")
    assert ticked.is_set(), "events are still taken"
    assert shell._timer is None
