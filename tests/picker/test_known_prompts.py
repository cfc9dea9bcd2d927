"""What is known of prompts' beginnings gives the same tokens and keys as the whole prompt does."""

from __future__ import annotations

import random
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.keys import Namespace, chain, pack_tokens
from kvmesh.services.gateway.text.encoded_texts import EncodedTexts
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from kvmesh.services.picker.known_prompts import KnownPrompts, Piece, in_pieces
from tests.support.paths import ROOT

DEMO = Tokenizer.load(ROOT / "examples" / "demo-model")
SPACES = [Namespace(fingerprint=f"external-{name}", kv_dtype="float16") for name in "xy"]
WORDS = ["the", " cat", "\n\n", " 1999", "\u8a9e", *DEMO.special_texts]

prompts = st.lists(
    st.tuples(
        st.sampled_from(SPACES),
        st.sampled_from([1, 4, 16]),
        st.integers(0, 3),  # which beginning
        st.integers(0, 900),  # how much of it
        st.lists(st.sampled_from(WORDS), max_size=20),
        st.booleans(),  # ids instead of a text
    ),
    min_size=1,
    max_size=12,
)


def tokens_and_keys(known: KnownPrompts, space: Namespace, block: int, pieces: list[Piece]) -> tuple[int, int, bytes]:
    steps = known.finish(space, block, pieces, known.begin(space, block, pieces))
    return steps[-1].tokens, steps[-1].special, b"".join(step.keys for step in steps)


@settings(max_examples=40)
@given(prompts, st.sampled_from([3_000, 20_000, 1 << 20]))
def test_known_or_new_the_keys_are_those_of_the_whole(
    asked: list[tuple[Namespace, int, int, int, list[str], bool]], room: int
) -> None:
    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 1 << 20)
    known = KnownPrompts(texts, room)
    begins = [" ".join(random.Random(n).choices(["one", "two", "three"], k=400)) for n in range(4)]
    for space, block, begin, length, words, as_ids in asked:
        text = begins[begin][:length] + "".join(words) + " end"
        ids = DEMO.inner.encode(text, add_special_tokens=False).ids
        pieces = in_pieces(pack_tokens(ids)) if as_ids else [*texts.cut(text)]
        special = 0 if as_ids else DEMO.count_special(ids)
        assert tokens_and_keys(known, space, block, pieces) == (len(ids), special, chain(space, ids, block))
        assert known.held_bytes <= room


def test_only_what_is_new_is_tokenized_and_hashed() -> None:
    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 1)  # which remembers nothing
    known = KnownPrompts(texts, 1 << 20)
    begin = " ".join(random.Random(1).choices(["one", "two", "three"], k=2000))
    first, second = ([*texts.cut(begin + end)] for end in (" and an end", " and quite another one"))
    assert known.begin(SPACES[0], 16, first) == []
    steps = known.finish(SPACES[0], 16, first, ())
    assert known.begin(SPACES[0], 16, first) == steps
    assert known.begin(SPACES[0], 16, second) == steps[:-1]
    assert known.begin(SPACES[1], 16, first) == known.begin(SPACES[0], 4, first) == []
    assert known.begin(SPACES[0], 16, first[1:]) == []  # the same piece at another place is another one


def test_threads_agree() -> None:
    texts = EncodedTexts(DEMO.inner, DEMO.count_special, 1 << 20)
    known = KnownPrompts(texts, 40_000)
    rng = random.Random(2)
    begins = [" ".join(rng.choices(["alpha", "beta", "gamma"], k=300)) for _ in range(3)]
    bodies = [rng.choice(begins) + " " + " ".join(rng.choices(["x", "yy"], k=100)) for _ in range(30)]
    right = [chain(SPACES[0], DEMO.inner.encode(body, add_special_tokens=False).ids, 16) for body in bodies]
    wrong = []

    def work() -> None:
        for body, keys in zip(bodies, right, strict=True):
            if tokens_and_keys(known, SPACES[0], 16, [*texts.cut(body)])[2] != keys:
                wrong.append(body)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong
    assert 0 < known.held_bytes <= 40_000
