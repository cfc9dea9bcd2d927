"""Ranks in step: in whatever order commands and turns arrive where, every follower does what the leader did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InternalError
from kvmesh.ranks import protocol as m
from kvmesh.ranks.lockstep import SHARED, Follower, LockstepLeader, LockstepTurns, Turn, check

SAMPLING = m.Sampling(0.0, 1.0, 0, 1)


def command(kind: str, n: int) -> m.ToRank:
    match kind:
        case "join":
            return m.Join(n, (n,), 1, 2, 0, 4, 0, (), SAMPLING)
        case "grant":
            return m.Grant(n, (n,))
        case "leave":
            return m.Leave(n)
        case "step":
            return m.PrefillStep(n, ())
        case "load":
            return m.LoadCopy(n, (n,), (n,))
        case _:
            return m.CopyIn(n, (n,), (n,))


class Model:
    """A rank as far as steps go: what it has, and a record of what it did. A row runs `life` steps; a PrefillStep
    reads what the loads before it bring."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.steps: list[tuple[int, int]] = []  # and the loads before it
        self.asked = self.loaded = 0  # loads
        self.did: list[object] = []

    def take(self, message: m.ToRank) -> None:
        self.did.append(message)
        match message:
            case m.Join(handle):
                self.rows[handle] = 1 + handle % 3
            case m.Grant(handle) if handle in self.rows:
                self.rows[handle] += 2
            case m.Leave(handle):
                self.rows.pop(handle, None)
            case m.PrefillStep(step_id):
                self.steps.append((step_id, self.asked))
            case m.LoadCopy():
                self.asked += 1

    def copy(self, loads: int) -> None:
        self.loaded = min(self.loaded + loads, self.asked)

    @property
    def due(self) -> bool:
        return bool(self.steps) and self.steps[0][1] <= self.loaded

    @property
    def wants(self) -> bool:
        return self.due or bool(self.rows)

    @property
    def stand(self) -> tuple[int, int]:
        return (self.steps[0][0] if self.steps else 0), len(self.rows)

    def run(self, due: bool) -> None:
        assert self.due or not due, "a step ran before what it reads was loaded"
        prefill = self.steps.pop(0)[0] if due else 0
        self.did.append(("step", prefill, tuple(self.rows)))
        for handle in list(self.rows):
            self.rows[handle] -= 1
            if not self.rows[handle]:
                del self.rows[handle]


class Rank:
    """One side: commands and turns that have not arrived yet, and the model that they drive."""

    def __init__(self, commands: list[m.ToRank], lead: bool) -> None:
        self.model = Model()
        self.todo = list(commands)
        self.order: LockstepLeader | Follower = LockstepLeader() if lead else Follower()
        self.turns: list[Turn] = []

    def arrive(self, count: int) -> None:
        self.order.arrived(self.todo[:count])
        del self.todo[:count]

    def lead(self) -> Turn | None:
        assert isinstance(self.order, LockstepLeader)
        while (message := self.order.next()) is not None:
            self.model.take(message)
        turn = self.order.turn(self.model.wants, self.model.due, *self.model.stand)
        if self.model.wants:
            self.model.run(self.model.due)
        return turn

    def follow(self, count: int) -> None:
        assert isinstance(self.order, Follower)
        self.order.take_turns(self.turns[:count])
        del self.turns[:count]
        while True:
            while (message := self.order.next()) is not None:
                self.model.take(message)
            turn = self.order.turn(self.model.due)
            if turn is None:
                return
            check(turn, *self.model.stand)
            if turn.run:
                self.model.run(turn.due)


KINDS = st.sampled_from(["join", "grant", "leave", "step", "copy", "load"])
COMMANDS = st.lists(st.tuples(KINDS, st.integers(1, 9)), max_size=25)
FEW = st.integers(0, 4)
MOVES = st.lists(st.tuples(st.integers(0, 2), FEW, FEW, FEW), max_size=60)


@given(COMMANDS, MOVES)
def test_followers_do_what_the_leader_did_in_every_interleaving(
    spoken: list[tuple[str, int]], moves: list[tuple[int, int, int, int]]
) -> None:
    commands = [command(*words) for words in spoken]
    leader, followers = Rank(commands, True), [Rank(commands, False) for _ in range(2)]

    def tell(turn: Turn | None) -> None:
        for follower in followers:
            follower.turns += [turn] if turn is not None else []

    for who, arriving, turns, loads in moves:
        (leader, *followers)[who].model.copy(loads)
        if who == 0:
            leader.arrive(arriving)
            tell(leader.lead())
        else:
            followers[who - 1].arrive(arriving)
            followers[who - 1].follow(turns)
        for follower in followers:  # never ahead of the leader, and in its order
            steps = [what for what in follower.model.did if isinstance(what, (*SHARED, tuple))]
            led = [what for what in leader.model.did if isinstance(what, (*SHARED, tuple))]
            assert steps == led[: len(steps)]
    leader.arrive(len(commands))
    tell(leader.lead())
    leader.model.copy(len(commands))
    while leader.model.wants:
        tell(leader.lead())
    for follower in followers:
        follower.arrive(len(commands))
        follower.follow(len(follower.turns))
        while follower.model.loaded < follower.model.asked:
            follower.model.copy(1)
            follower.follow(0)
        said = [what for what in follower.model.did if not isinstance(what, tuple)]
        assert said == commands  # nothing is left behind, nothing overtakes
        assert not follower.order.behind  # type: ignore[union-attr]
        steps = [what for what in follower.model.did if isinstance(what, tuple)]
        assert steps == [what for what in leader.model.did if isinstance(what, tuple)]


def test_what_no_step_depends_on_waits_behind_what_the_leader_has_not_announced() -> None:
    """A copy into pages that somebody leaves must not come before that."""
    follower = Follower()
    leave, copy = m.Leave(1), m.CopyIn(2, (1,), (1,))
    follower.arrived([copy, leave, copy])
    assert follower.next() == copy
    assert follower.next() is None and not follower.behind
    follower.take_turns([Turn(1, False, False, 0, 0)])
    assert (follower.next(), follower.next(), follower.next()) == (leave, copy, None)
    assert follower.turn(False) == Turn(1, False, False, 0, 0) and follower.turn(False) is None


def test_turns_cross_the_wire_in_any_pieces() -> None:
    said = [Turn(3, True, True, 9, 2), Turn(2**40, False, False, 0, 0), Turn(5, True, False, 8, 1)]
    wire, turns = b"".join(turn.encode() for turn in said), LockstepTurns()
    assert [turn for i in range(0, len(wire), 7) for turn in turns.feed(wire[i : i + 7])] == said


def test_a_rank_that_stands_elsewhere_says_so() -> None:
    check(Turn(4, True, True, 7, 2), 7, 2)
    for step_id, rows in ((0, 2), (7, 3)):
        with pytest.raises(InternalError, match="out of step with rank 0: it has prefill step 7 and 2 rows"):
            check(Turn(4, True, True, 7, 2), step_id, rows)
