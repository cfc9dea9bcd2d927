"""How the residual stream of a demo checkpoint is laid out before training: shared by its kinds of model.

A model this small spends most of its training on finding the two heads that every solution
has: one that reads the tokens just before, one that looks up what follows where the same
stood before. Each kind of model starts with rough ones in its first two layers, laid into the
directions that :func:`spread` returns, and training makes the rest of them.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

CODE = 24  # dimensions in which a head of the first layer hands on the token it reads
CONTENT = 44  # dimensions of the token itself that those heads read


@torch.no_grad()
def spread(embedding: Tensor, tokenizer: Tokenizer, content: set[str], heads: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Fill an ``embedding`` (tokens, hidden) and return the directions of the residual stream.

    The stream is split: dimension 0 is the same for all tokens; CODE dimensions for each of the
    ``heads`` that look back take what it reads (the first value returned, a (hidden, CODE) each);
    the rest is for the token itself (the second, (hidden, rest)). Heads read the first CONTENT
    dimensions of that, which words that are in ``content`` alone use fully.
    """
    hidden = embedding.shape[1]
    basis = torch.randn(hidden, hidden)
    basis[:, 0] = 0.0
    basis[0, 0] = 1.0
    basis = torch.linalg.qr(basis).Q
    places = basis[:, 1 : 1 + heads * CODE].split(CODE, dim=1)
    own = basis[:, 1 + heads * CODE :]
    table = torch.randn(embedding.shape[0], own.shape[1])
    vocab = tokenizer.get_vocab()
    for word, index in vocab.items():
        if word.lstrip("\u0120") not in content:
            # What stands before "is" is telling when it is a name, and misleading when it is "of".
            table[index, :CONTENT] *= 0.2
            table[index, CONTENT:] *= 1.8
    for word, index in sorted(vocab.items()):
        # A word with its leading space (U+0120 in byte-level BPE) and without is the same name.
        spaced = vocab.get("\u0120" + word)
        if spaced is not None and len(word) > 1:
            table[index] = 0.8 * table[spaced] + 0.6 * table[index]
    embedding.copy_(0.14 * table @ own.T)
    embedding[:, 0] = 0.3
    return places, own
