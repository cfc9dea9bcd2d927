"""What a prompt costs to tokenize, by the tokenizers library alone and by words (`EncodedTexts`).

    python -m benchmarks.tokenize_words                     the demo tokenizer
    python -m benchmarks.tokenize_words --model FOLDER      another checkpoint's

Texts are words of docs/, drawn at random, so that nothing but words comes twice. They are tokenized by the library, by
words that have all come before (known), and by words of which none has come in another text (new), in turns, in CPU
time of this thread. A ratio is the median of the rounds', with an interval of 95%.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.turns import interval, ratios
from kvmesh.services.gateway.text.encoded_texts import EncodedTexts
from kvmesh.services.gateway.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent


def cpu_ms(work: Callable[[], object]) -> float:
    """Returns the CPU milliseconds of this thread that `work` takes."""
    start = time.thread_time()
    work()
    return 1000 * (time.thread_time() - start)


def told(above: Sequence[float], below: Sequence[float]) -> str:
    """Returns the median ratio, and its interval."""
    found = ratios(above, below)
    low, high = interval(found)
    return f"{median(found):.2f} [{low:.2f}, {high:.2f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "examples" / "demo-model", help="folder of the tokenizer")
    parser.add_argument("--words", type=int, nargs="+", default=[50, 500, 5000], help="of a text")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args(argv)
    tokenizer = Tokenizer.load(args.model)
    found = sorted((ROOT / "docs").rglob("*.md"))
    vocabulary = [word for path in found for word in path.read_text().split()]
    rng = random.Random(1)
    for start in range(0, len(vocabulary), 5000):  # from here on every word is known
        tokenizer.encode(" " + " ".join(vocabulary[start : start + 5000]), add_special_tokens=False)
    inner = tokenizer.inner
    print(f"{'words':>6} {'chars':>7} {'tokens':>7} {'library ms':>11} {'known ms':>9} {'new ms':>7}"
          "  library/known [95%]    library/new [95%]")  # fmt: skip
    for count in args.words:
        rounds = []
        for _ in range(args.rounds):
            text = " " + " ".join(rng.choices(vocabulary, k=count))
            unknowing = EncodedTexts(inner, tokenizer.count_special, 16 << 20)
            ids = inner.encode(text, add_special_tokens=False).ids
            assert ids == tokenizer.encode(text, add_special_tokens=False)
            rounds.append(
                (
                    cpu_ms(partial(inner.encode_batch_fast, [text], add_special_tokens=False)),
                    cpu_ms(partial(tokenizer.encode, text, add_special_tokens=False)),
                    cpu_ms(partial(unknowing.encode_pieces, [text])),
                )
            )
        library, known, new = (list(column) for column in zip(*rounds, strict=True))
        times = f"{median(library):11.3f} {median(known):9.3f} {median(new):7.3f}"
        print(f"{count:6} {len(text):7} {len(ids):7} {times}  {told(library, known)}   {told(library, new)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
