"""Stop strings: the answer depends on the text alone, never on how it was cut into tokens."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvmesh.services.gateway.text.stops import StopMatcher, StopStrings

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def by_the_book(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; at the first stop that is complete, the longest such one is cut off."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def pieces(text: str, borders: list[int]) -> list[str]:
    cuts = sorted({min(border, len(text)) for border in borders} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


@given(text=LETTERS, stops=STOPS, borders=st.lists(st.integers(0, 24), max_size=10))
def test_text_ends_where_the_naive_reader_ends(text: str, stops: list[str], borders: list[int]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = [matcher.push(piece) for piece in pieces(text, borders)]
    expected, stopped = by_the_book(text, stops)
    assert matcher.stopped == stopped
    assert "".join(shown) + matcher.finish() == expected


@given(text=LETTERS, stops=STOPS)
def test_nothing_is_held_back_that_cannot_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for char in text:
        shown += matcher.push(char)
        if matcher.stopped:
            return
    rest = text[len(shown) :]
    assert rest == "" or any(stop.startswith(rest) and stop != rest for stop in stops)
    assert not any(
        len(stop) > len(rest) and stop.startswith(text[-n:])
        for stop in stops
        for n in range(len(rest) + 1, len(text) + 1)
    )


def test_nothing_comes_after_a_stop() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert [matcher.push(piece) for piece in ("one E", "ND two", " three")] == ["one ", "", ""]
    assert matcher.stopped
    assert matcher.finish() == ""


def test_the_longest_of_the_stops_that_end_together_is_cut() -> None:
    matcher = StopMatcher(StopStrings(["\n", "ly\n", "y\n"]))
    assert matcher.push("only\n") == "on"


def test_many_long_stops_are_one_walk() -> None:
    stops = [("ab" * 127) + chr(1000 + i) for i in range(16)]
    matcher = StopMatcher(StopStrings(stops))
    text = "ab" * 127 + "c" + "ab" * 127 + chr(1007)
    assert "".join(matcher.push(char) for char in text) == "ab" * 127 + "c"
    assert matcher.stopped
