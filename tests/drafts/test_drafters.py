"""Drafters against what they are in words, written out as slowly as possible."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.drafts.drafter import NO_DRAFT
from kvmesh.drafts.ngram import LEAST_MATCH, MOST_MATCH, NgramDrafter, strength_of
from kvmesh.drafts.suffix import NONE, AnswersTold, SuffixDrafter
from kvmesh.drafts.token_log import TokenLog

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def occurrence(ids: list[int], least: int, most: int) -> tuple[int, int]:
    """The longest suffix that occurred before, and the last place behind it."""
    for length in range(min(most, len(ids) - 1), least - 1, -1):
        for start in range(len(ids) - length - 1, -1, -1):
            if ids[start : start + length] == ids[-length:]:
                return start + length, length
    return 0, 0


@given(TEXTS, st.lists(TEXTS, max_size=5), st.integers(1, 3), st.integers(3, 9))
def test_the_longest_suffix_that_occurred_before(
    prompt: list[int], more: list[list[int]], least: int, most: int
) -> None:
    log, ids = TokenLog(prompt), list(prompt)
    for tokens in more:
        log.extend(tokens)
        ids += tokens
    assert log.ids.tolist() == ids
    assert tuple(log.last_occurrence(least, most)) == occurrence(ids, least, most)


def test_a_text_that_repeats_itself_goes_on_repeating_itself() -> None:
    log = TokenLog([9, 1, 2, 3, 1, 2, 3])
    found = log.last_occurrence(2, 8)
    assert found == (4, 3)
    assert log.continued(found, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_ngram_copies_what_came_last() -> None:
    drafter = NgramDrafter()
    drafter.begin(1, [5, 6, 7, 5, 6, 8], [5])
    drafter.begin(2, [1, 2, 3], [4])
    drafter.extend(1, [6])
    assert drafter.propose([1, 2], [1, 3]) == [([8], strength_of(2)), NO_DRAFT]
    drafter.end(1)
    drafter.end(1)
    assert [strength_of(n) for n in (1, 2, 3, 4, 5, 6, 8, 9, 15, 16, MOST_MATCH)] == [1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert LEAST_MATCH == 2


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS, st.integers(1, 5), st.data())
def test_what_came_most_often_after_the_longest_suffix(
    texts: list[list[int]], last: list[int], count: int, data: st.DataObject
) -> None:
    told, ends, left = AnswersTold(), [NONE] * len(texts), [list(text) for text in texts]
    while any(left):  # they grow beside each other
        at = data.draw(st.sampled_from([at for at, tokens in enumerate(left) if tokens]))
        ends[at] = told.add(ends[at], left[at].pop(0))
    assert len(told) == sum(map(len, texts))
    behind: list[list[int]] = []
    for length in range(len(last), 0, -1):
        behind = [
            text[at + length :]
            for text in texts
            for at in range(len(text) - length)
            if text[at : at + length] == last[-length:]
        ]
        if behind:
            break
    expected: list[int] = []
    for place in range(count):
        counts = Counter(text[place] for text in behind if len(text) > place)
        if not counts:
            break
        expected.append(min(counts, key=lambda token: (-counts[token], token)))
        behind = [text for text in behind if len(text) > place and text[place] == expected[-1]]
    assert told.continued(np.array(last, np.int32), count, 1) == (expected, length if expected else 0)


def test_samples_of_a_prompt_learn_from_each_other() -> None:
    drafter = SuffixDrafter()
    drafter.begin(1, [1, 2], [3])
    drafter.begin(2, [1, 2], [3])
    drafter.begin(3, [1, 9], [3])
    drafter.extend(1, [4, 5, 6, 7])
    for handle in (2, 3):
        drafter.extend(handle, [4, 5])
    assert list(drafter.propose([2], [4])[0].tokens) == [6, 7]
    assert drafter.propose([3], [4]) == [NO_DRAFT], "another prompt's answers are not known"


def test_answers_are_bounded_and_kept_by_their_rows() -> None:
    drafter = SuffixDrafter(most_tokens=100)
    drafter.begin(1, [1], [2])
    drafter.extend(1, list(range(100, 120)))
    for other in range(2, 30):
        drafter.begin(other, [other], [2])
        drafter.extend(other, [other * 1000 + at for at in range(30)])
        assert drafter.tokens == sum(map(len, drafter._told.values())) <= 100
        drafter.end(other)
        assert drafter._told.keys() >= {drafter._rows[1].key}
    drafter.begin(31, [1], [2, 100, 101])
    assert list(drafter.propose([31], [3])[0].tokens) == [102, 103, 104]
    drafter.begin(32, [1], [9])
    drafter.extend(32, [*range(1000, 1100), 118])
    assert drafter.tokens == 100, "no room: what is told stays as it is"
    assert drafter.propose([32], [3]) == [NO_DRAFT]
    for handle in (31, 32, 1):
        drafter.end(handle)
    assert not drafter._pins and not drafter._rows


def test_prompts_with_short_answers_are_bounded() -> None:
    drafter = SuffixDrafter(most_prompts=8)
    drafter.begin(0, [0], [1, 2, 3])
    for other in range(1, 100):
        drafter.begin(other, [other], [2])
        drafter.end(other)
        assert len(drafter._told) <= 8
        assert drafter.tokens == sum(map(len, drafter._told.values()))
    drafter.begin(100, [0], [1, 2])
    assert list(drafter.propose([100], [3])[0].tokens) == [3], "answers that a row has are kept"


@pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
@given(st.data())
@settings(max_examples=30)
def test_drafts_depend_on_what_was_given_alone(make: type[NgramDrafter], data: st.DataObject) -> None:
    """Two ranks come to the same drafts, and none is longer than asked."""
    one, other, live = make(), make(), 0
    for _ in range(data.draw(st.integers(1, 12))):
        if not live or data.draw(st.booleans()):
            live += 1
            prompt, answer = data.draw(TEXTS), data.draw(TEXTS)
            for drafter in (one, other):
                drafter.begin(live, prompt, answer)
        tokens, handle, most = data.draw(TEXTS), data.draw(st.integers(1, live)), data.draw(st.integers(1, 7))
        for drafter in (one, other):
            drafter.extend(handle, tokens)
        drafts = one.propose(range(1, live + 1), [most] * live)
        assert drafts == other.propose(range(1, live + 1), [most] * live)
        assert all(len(draft.tokens) <= most for draft in drafts)
