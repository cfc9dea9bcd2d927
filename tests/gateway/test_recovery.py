"""What becomes of failed attempts, by itself: who is tried again, what is carried, and that nobody can see it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import HandoffLost, InternalError, InvalidRequest, KvmeshError, Overloaded, Unavailable
from kvmesh.kvcache.keys import Namespace, chain_tip, pack_tokens
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2
from kvmesh.services.gateway.attempts import AnswerAttempts, ResumePoint
from kvmesh.services.gateway.recovery import AttemptRecovery, Failure, RecoveryPatience, RecoveryPlan
from kvmesh.services.gateway.text.completion import Alternatives, Completion, Delta, TokenLogprob
from kvmesh.services.gateway.text.prepare import Prepared
from kvmesh.services.gateway.text.stops import StopMatcher, StopStrings
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.gateway import tokenizers_made

TOKENIZER = Tokenizer(tokenizers_made.byte_level(), {}, {})
EOS = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)[0]
SPACE = Namespace(fingerprint="feed", kv_dtype="float32")
BLOCK = 4
LOST = HandoffLost("decode-0 is lost")


def failure(
    error: KvmeshError = LOST, *, answered: int = 5, fresh: int = 0, delivered: bool = True, taken: bool = True
) -> Failure:
    return Failure(error, "decode-0", answered, fresh, delivered, taken)


def patience(**more: Any) -> RecoveryPatience:
    return RecoveryPatience(
        **({"max_retries": 2, "reach_s": 5.0, "max_migrations": 3, "migration_timeout_s": 30.0} | more)
    )


# ── what is decided ───────────────────────────────────────────────────────────────────────────────


def test_before_the_first_token_there_are_so_many_retries() -> None:
    one = AttemptRecovery(patience())
    assert [one.failed(failure(answered=0), 0.0, 1.0) for _ in range(2)] == [
        RecoveryPlan(0.05, True),
        RecoveryPlan(0.2, True),
    ]
    with pytest.raises(HandoffLost, match=r"^decode-0 is lost$"):
        one.failed(failure(answered=0), 0.0, 1.0)
    assert one.migrations == 0


def test_before_the_first_token_who_cannot_be_reached_counts_by_time() -> None:
    """The mesh has not noticed yet that they are gone."""
    one, now = AttemptRecovery(patience()), 100.0
    gone = failure(Unavailable("cannot be reached"), answered=0, taken=False)
    for _ in range(6):
        now += one.failed(gone, now, 1.0).delay_s
    assert 103.0 < now < 104.1
    one.failed(failure(answered=0), 103.9, 1.0)  # an instance that had it
    with pytest.raises(Unavailable, match=r"^cannot be reached$"):
        one.failed(gone, 104.1, 1.0)
    slow = AttemptRecovery(patience())
    for _ in range(2):  # however long each attempt took
        now += 10.0 + slow.failed(gone, now, 1.0).delay_s
    with pytest.raises(Unavailable, match=r"^cannot be reached$"):
        slow.failed(gone, now, 1.0)


def test_without_migration_only_what_nobody_has_seen_is_made_anew() -> None:
    one = AttemptRecovery(patience(max_migrations=0))
    assert one.failed(failure(fresh=5, delivered=False), 0.0, 1.0).anew
    with pytest.raises(HandoffLost, match=r"^decode-0 is lost$"):
        one.failed(failure(fresh=5), 0.0, 1.0)


def test_a_loss_is_gone_on_with_at_once_and_so_many_times() -> None:
    one = AttemptRecovery(patience(max_migrations=2))
    for _ in range(2):
        assert one.failed(failure(fresh=2), 0.0, 1.0) == RecoveryPlan(0.0, False)
        one.went_on()
    with pytest.raises(HandoffLost) as caught:
        one.failed(failure(answered=9, fresh=2), 0.0, 1.0)
    assert str(caught.value) == (
        "the answer was lost at decode-0 after 9 tokens (decode-0 is lost) and cannot go on: "
        "it was moved max_migrations=2 times before"
    )


def test_until_its_next_token_it_is_placed_again_and_again_for_a_while() -> None:
    one, now, delays = AttemptRecovery(patience()), 100.0, []
    one.failed(failure(fresh=5), now, 1.0)
    nobody = failure(Unavailable("no decode instance is ready"), taken=False)
    for _ in range(17):
        delays.append(one.failed(nobody, now, 1.0).delay_s)
        now += delays[-1] + 0.8
    assert delays[:4] == [0.05, 0.2, 0.8, 1.0] and max(delays) == 1.0
    assert 128.0 < now < 129.0
    assert one.failed(nobody, 128.9, 1.0).delay_s == 1.0
    with pytest.raises(Unavailable, match=r"after 5 tokens .*within migration_timeout_s=30 .no decode instance"):
        one.failed(nobody, 129.0, 1.0)


def test_a_migration_that_runs_out_while_an_attempt_is_on_its_way_says_why_the_last_one_failed() -> None:
    one = AttemptRecovery(patience())
    one.failed(failure(fresh=5), 0.0, 1.0)
    assert str(one.late()).endswith("within migration_timeout_s=30")
    one.failed(failure(Unavailable("no decode instance is ready"), taken=False), 1.0, 1.0)
    assert str(one.late()).endswith("within migration_timeout_s=30 (no decode instance is ready)")
    one.went_on()
    one.failed(failure(fresh=5), 2.0, 1.0)
    assert str(one.late()).endswith("within migration_timeout_s=30")


def test_few_instances_may_fail_what_goes_on() -> None:
    """It may be the request that kills them."""
    one = AttemptRecovery(patience())
    one.failed(failure(fresh=5), 0.0, 1.0)
    for error in (LOST, Overloaded("no pages"), LOST, Overloaded("no pages")):
        one.failed(failure(error), 0.0, 1.0)
    with pytest.raises(HandoffLost, match="cannot go on: max_retries=2 and one more attempt failed, the last one"):
        one.failed(failure(), 0.0, 1.0)


def test_new_tokens_begin_the_count_anew() -> None:
    one = AttemptRecovery(patience(max_migrations=9))
    for _ in range(5):
        one.failed(failure(fresh=1), 0.0, 1.0)
        assert one.failed(failure(), 0.0, 1.0).delay_s == 0.05
        one.failed(failure(), 0.0, 1.0)
        one.went_on()


def test_what_is_not_retryable_ends_it() -> None:
    one = AttemptRecovery(patience())
    with pytest.raises(InternalError, match=r"^logits"):
        one.failed(failure(InternalError("logits are not finite"), fresh=3), 0.0, 1.0)
    one.failed(failure(fresh=3), 0.0, 1.0)
    with pytest.raises(InvalidRequest, match=r"after 5 tokens .* cannot go on: other weights"):
        one.failed(failure(InvalidRequest("other weights")), 0.0, 1.0)


# ── what is carried ───────────────────────────────────────────────────────────────────────────────


def prepared(ids: list[int]) -> Prepared:
    packed = pack_tokens(ids)
    keys, digest = chain_tip(SPACE, packed, BLOCK)
    return Prepared(len(ids), packed, keys, digest, "", (), blank=False)


@given(
    prompt=st.lists(st.integers(0, 400), min_size=1, max_size=13),
    parts=st.lists(st.lists(st.integers(0, 400), max_size=9), max_size=5),
)
def test_keys_go_on_as_if_all_had_been_prompt(prompt: list[int], parts: list[list[int]]) -> None:
    carried, said = ResumePoint(prepared(prompt), BLOCK), array("I")
    for part in parts:
        said.extend(part)
        carried.extend(said)
        whole = prepared([*prompt, *said])
        assert (carried.tokens, carried.answered) == (whole.tokens, len(said))
        assert (carried.token_ids, carried.keys, carried.chain_digest) == (
            whole.token_ids,
            whole.keys,
            whole.chain_digest,
        )


# ── what the client sees ──────────────────────────────────────────────────────────────────────────


@dataclass
class Lane:
    granted: int = 0
    cancelled: str = ""

    def grant(self, tokens: int) -> None:
        self.granted += tokens

    def cancel(self, reason: str) -> None:
        self.cancelled = reason


@dataclass
class Owner:
    stops: list[str] = field(default_factory=list)
    served_model: str = "m"
    wants_logprobs: bool = False
    prompt_logprobs: int = -1
    prompt_only: bool = False
    goes_on_exactly: bool = True
    silent: frozenset[int] = frozenset({EOS})
    credit_tokens: int = 8
    block_tokens: int = BLOCK
    patience: RecoveryPatience = field(default_factory=lambda: patience(max_migrations=100))

    def touch(self, choice: AnswerAttempts) -> None: ...

    def new_answer(self, prompt: Prepared) -> Completion:
        matcher = StopMatcher(StopStrings(self.stops)) if self.stops else None
        return Completion(TOKENIZER.detokenizer((), opens=True), matcher, self.silent)


@dataclass
class Seen:
    """Of one client."""

    deltas: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [one for delta in self.deltas for one in delta.logprobs]

    @property
    def tokens(self) -> list[int]:
        tokens: list[int] = []
        for delta in self.deltas:
            assert delta.first == len(tokens), "no gap, nothing twice"
            tokens += delta.token_ids
        return tokens


def choice_of(owner: Owner, max_tokens: int, prompt: list[int] | None = None) -> AnswerAttempts:
    choice = AnswerAttempts(owner, 0, prepared(prompt or [7, 8, 9, 10, 11]), 1, max_tokens)  # type: ignore[arg-type]
    begin(choice)
    return choice


def begin(choice: AnswerAttempts) -> Lane:
    choice.placement = conductor_pb2.Placement(
        prefill=common_pb2.InstanceRef(instance_id="p"), decode=common_pb2.InstanceRef(instance_id="d")
    )
    lane = Lane()
    choice.started(lane)  # type: ignore[arg-type]
    return lane


def told(owner: Owner, token: int) -> Alternatives | None:
    return (-float(token), ((token, -1.0),)) if owner.wants_logprobs else None


def answer(owner: Owner, ids: list[int], breaks: set[int], every: int) -> tuple[Seen, AnswerAttempts]:
    """An engine that says `ids`; attempts die at the positions of `breaks`, and the client looks now and then."""
    choice, seen = choice_of(owner, len(ids)), Seen()
    breaks = set(breaks)
    while not choice.done:
        start = choice.carried.answered
        assert choice.carried.token_ids == choice.prompt.token_ids + pack_tokens(ids[:start])
        dies_at = min((at for at in breaks if at >= start), default=-1)
        breaks.discard(dies_at)
        for at in range(start, len(ids)):
            if at == dies_at:
                break
            choice.on_token(ids[at], at - start, told(owner, ids[at]))
            if at % every == 0:
                seen.deltas.append(choice.take(0.0))
                if choice.done:
                    return seen, choice
        if dies_at >= 0:
            choice.on_failed(LOST, at_decode=True)
        else:
            stopped = not owner.silent.isdisjoint(ids[-1:])
            reason = common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
            choice.on_finished(decode_pb2.Finished(reason=reason, completion_tokens=len(ids) - start))
        seen.deltas.append(choice.take(0.0))
        lost = choice.failure()
        if lost is not None:
            plan = choice.recovery.failed(lost, 0.0, 1.0)
            choice.again(anew=plan.anew)
            begin(choice)
        elif seen.deltas[-1].token_ids:
            choice.recovery.went_on()
    return seen, choice


@given(
    text=st.text("abcé🦊 ", min_size=1, max_size=25),
    stops=st.lists(st.text("abcé", min_size=1, max_size=3), max_size=2),
    breaks=st.sets(st.integers(0, 60), max_size=5),
    every=st.integers(1, 4),
    logprobs=st.booleans(),
    eos=st.booleans(),
    ignore_eos=st.booleans(),
)
def test_wherever_attempts_die_the_client_sees_the_same(
    text: str, stops: list[str], breaks: set[int], every: int, logprobs: bool, eos: bool, ignore_eos: bool
) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False) + [EOS] * eos
    owner = Owner(stops, logprobs, frozenset() if ignore_eos else frozenset({EOS}))
    right, undisturbed = answer(owner, ids, set(), every)
    found, choice = answer(owner, ids, breaks, every)
    assert (found.text, found.tokens, found.logprobs) == (right.text, right.tokens, right.logprobs)
    assert choice.answer.finish == undisturbed.answer.finish
    assert choice.answer.count == undisturbed.answer.count


@pytest.mark.parametrize(
    ("last", "limit", "finish"), [(EOS, 9, "stop"), (EOS, 2, "stop"), (5, 2, "length"), (5, 3, "")]
)
def test_an_end_that_was_lost_is_told_all_the_same(last: int, limit: int, finish: str) -> None:
    choice = choice_of(Owner(), limit)
    choice.on_token(6, 0, None)
    choice.on_token(last, 1, None)
    choice.on_failed(LOST, at_decode=True)
    assert choice.take(0.0).finish == finish
    assert choice.done == bool(finish)
    assert (choice.failure() is None) == bool(finish)


def test_the_engines_own_count_is_of_its_attempt() -> None:
    choice = choice_of(Owner(), 9)
    choice.on_token(5, 0, None)
    choice.on_failed(LOST, at_decode=True)
    choice.take(0.0)
    lost = choice.failure()
    assert lost == Failure(LOST, "d", answered=1, fresh=1, delivered=False, taken=True)
    choice.again(anew=False)
    begin(choice)
    choice.on_token(6, 0, None)
    choice.on_finished(decode_pb2.Finished(completion_tokens=2))
    choice.take(0.0)
    wrong = choice.failure()
    assert wrong is not None and "made 2 tokens, 1 arrived" in str(wrong.error)


def test_who_is_avoided() -> None:
    choice = choice_of(Owner(), 9)
    for token, error, at_decode, avoided in (
        (5, LOST, True, ["d"]),  # a loss: of old ones nobody is avoided any more
        (None, LOST, False, ["d", "p"]),
        (None, Overloaded("no pages"), False, ["d", "p"]),
        (5, LOST, True, ["d"]),
    ):
        if token is not None:
            choice.on_token(token, 0, None)
        choice.on_failed(error, at_decode=at_decode)
        choice.take(0.0)
        assert choice.failure() is not None
        choice.again(anew=False)
        begin(choice)
        assert choice.avoid == avoided
    choice.refused(Unavailable("no instance"))
    assert choice.failure() is not None
    choice.again(anew=False)
    assert choice.avoid == ["d"]  # nobody had it


# ── silence ───────────────────────────────────────────────────────────────────────────────────────


def test_silence_after_a_token_is_a_loss() -> None:
    choice = choice_of(Owner(), 99)
    lane = choice.lane
    for now in (0.0, 10.0, 20.0):
        choice.watch(now, 5.0)
    assert choice.failure() is None, "its first token has all the time there is"
    choice.on_token(5, 0, None)
    choice.watch(30.0, 5.0)
    choice.on_token(5, 1, None)
    choice.watch(34.9, 5.0)
    choice.watch(39.8, 5.0)
    assert choice.failure() is None
    choice.watch(39.9, 5.0)
    choice.take(0.0)
    lost = choice.failure()
    assert lost is not None and "d has sent no token for token_timeout_s=5" in str(lost.error)
    assert isinstance(lane, Lane) and "token_timeout_s" in lane.cancelled
    assert choice.lane is None


def test_a_client_that_takes_nothing_is_not_an_instances_silence() -> None:
    choice = choice_of(Owner(credit_tokens=4), 99)
    for index in range(4):
        choice.on_token(5, index, None)
    for now in range(0, 100, 5):
        choice.watch(float(now), 5.0)
    assert choice.failure() is None, "decode may send no more"
    choice.take(100.0)  # four more are granted now
    choice.watch(100.0, 5.0)
    choice.watch(104.9, 5.0)
    assert choice.failure() is None
    choice.watch(105.0, 5.0)
    assert choice.failure() is not None
