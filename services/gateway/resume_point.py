"""What an attempt starts from: the prompt, and what came of its answer before. Pure."""

from __future__ import annotations

from array import array

from kvmesh.kvcache.keys import TOKEN_BYTES, extend, pack_tokens
from services.gateway.text.prepare import Prepared


class ResumePoint:
    """`token_ids`, `keys` and `chain_digest` as in Prepared, over the prompt and the first `answered` tokens of its
    answer. What was hashed once is not hashed again."""

    __slots__ = ("_step", "answered", "chain_digest", "keys", "token_ids", "tokens")

    def __init__(self, prompt: Prepared, block_tokens: int) -> None:
        self._step = block_tokens * TOKEN_BYTES
        self.answered = 0
        self.tokens = prompt.tokens
        self.token_ids = prompt.token_ids
        self.keys = prompt.keys
        self.chain_digest = prompt.chain_digest

    def extend(self, said: array[int]) -> None:
        """Carry `said`, the whole answer so far: it begins with what is carried already."""
        hashed = self.tokens * TOKEN_BYTES // self._step * self._step
        new = said[self.answered :]
        self.answered += len(new)
        self.tokens += len(new)
        self.token_ids += pack_tokens(new)
        keys, view = [self.keys], memoryview(self.token_ids)
        for end in range(hashed + self._step, len(view) + 1, self._step):
            key, self.chain_digest = extend(self.chain_digest, view[end - self._step : end])
            keys.append(key)
        self.keys = b"".join(keys)
