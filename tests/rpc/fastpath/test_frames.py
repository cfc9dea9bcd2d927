"""Frames: what is said is heard, however the stream is cut; what is no frame is refused."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.rpc.fastpath import frames
from kvmesh.rpc.fastpath.frames import BadFrame, CallFrame, FrameReader

HELLO = frames.hello(5)
U32 = st.integers(0, (1 << 32) - 1)
FRAMES = st.one_of(
    st.builds(
        CallFrame,
        kind=st.just(frames.CALL),
        call=U32,
        body=st.binary(max_size=300),
        name=st.binary(max_size=255),
        ms=U32,
    ),
    st.builds(
        CallFrame,
        kind=st.sampled_from([frames.HELLO, frames.ANSWER, frames.ERROR, frames.CANCEL]),
        call=U32,
        body=st.binary(max_size=300),
        name=st.just(b""),
        ms=st.just(0),
    ),
)


def encoded(frame: CallFrame) -> bytes:
    return frames.encode(frame.kind, frame.call, frame.body, frame.name, frame.ms)


def greeted(most: int = frames.MAX_FRAME) -> FrameReader:
    reader = FrameReader(most)
    assert len(reader.feed(HELLO)) == 1
    return reader


@given(said=st.lists(FRAMES, max_size=8), cuts=st.lists(st.integers(0, 5_000), max_size=12))
def test_what_is_said_is_heard_however_it_is_cut(said: list[CallFrame], cuts: list[int]) -> None:
    stream = b"".join(map(encoded, said))
    reader = greeted(1_000)
    heard: list[CallFrame] = []
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, end in itertools.pairwise(places):
        heard += reader.feed(stream[start:end])
        whole = [len(b"".join(map(encoded, said[:n]))) for n in range(len(said) + 1)]
        assert len(heard) == max(n for n, size in enumerate(whole) if size <= end), "each as soon as it is complete"
    assert heard == said


@given(said=st.lists(FRAMES, min_size=1, max_size=3))
def test_byte_by_byte(said: list[CallFrame]) -> None:
    reader = greeted(1_000)
    heard = [frame for byte in b"".join(map(encoded, said)) for frame in reader.feed(bytes([byte]))]
    assert heard == said


@given(noise=st.binary(max_size=200), parts=st.integers(1, 5))
def test_noise_is_no_frame_or_one_that_could_have_been_said(noise: bytes, parts: int) -> None:
    reader = greeted(100)
    heard: list[CallFrame] = []
    step = max(1, len(noise) // parts)
    try:
        for at in range(0, len(noise), step):
            heard += reader.feed(noise[at : at + step])
    except BadFrame:
        return
    assert noise.startswith(b"".join(map(encoded, heard)))
    assert all(len(frame.name) + len(frame.body) <= 100 for frame in heard)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (frames._HEADER.pack(0, 1, 0, 0, 0, 0), "kind=0"),
        (frames._HEADER.pack(0, 1, 6, 0, 0, 0), "kind=6"),
        (frames._HEADER.pack(9, 1, frames.CALL, 10, 0, 0), "name=10"),
        (frames._HEADER.pack(9, 1, frames.ANSWER, 1, 0, 0), "name=1"),
        (frames._HEADER.pack(9, 1, frames.CALL, 4, 7, 0), "kind=2"),
        (frames._HEADER.pack(101, 1, frames.ANSWER, 0, 0, 0), "length=101"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n", "kind="),
    ],
)
def test_a_bad_header_is_refused_before_its_body_is_there(header: bytes, what: str) -> None:
    with pytest.raises(BadFrame, match=what):
        greeted(100).feed(header)
    reader = greeted(100)
    with pytest.raises(BadFrame, match=what):
        [reader.feed(bytes([byte])) for byte in header]


def test_a_large_frame_in_many_pieces() -> None:
    body = random.Random(1).randbytes(3 << 20)
    stream = frames.encode(frames.ANSWER, 7, body) + frames.encode(frames.CANCEL, 8)
    reader = greeted()
    heard = [frame for at in range(0, len(stream), 65_536) for frame in reader.feed(stream[at : at + 65_536])]
    assert heard == [CallFrame(frames.ANSWER, 7, body), CallFrame(frames.CANCEL, 8)]


def test_a_greeting_names_a_life() -> None:
    (frame,) = FrameReader().feed(frames.hello((1 << 64) - 3))
    assert frames.life_of(frame) == (1 << 64) - 3
    for wrong in (
        frame._replace(kind=frames.CALL),
        frame._replace(body=frame.body[:-1]),
        frame._replace(body=b"?" + frame.body[1:]),
    ):
        with pytest.raises(BadFrame):
            frames.life_of(wrong)


def test_a_stranger_is_given_no_room() -> None:
    with pytest.raises(BadFrame, match=f"at most {frames.MAX_HELLO_BYTES}"):
        FrameReader().feed(frames.encode(frames.CALL, 1, bytes(frames.MAX_HELLO_BYTES + 1)))
    call = frames.encode(frames.CALL, 1, bytes(1_000), b"Lease")
    assert [frame.kind for frame in FrameReader().feed(HELLO + call)] == [frames.HELLO, frames.CALL]
