"""Drafts from what others said: answers to the same prompt share a tree of their suffixes.

Samples of one prompt, and attempts of one request, tend to say the same in the same order. What each has said is put
into a tree of all runs of at most DEPTH tokens, with how often each occurred; a row's draft walks from the longest of
its last tokens that the tree knows along what came most often. Where a row's own text has a longer match, it copies
from that, as the n-gram drafter does.

A tree is pinned by the rows that use it. Those that nobody uses stay while there is room, the last used ones.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvmesh.drafts.drafter import NO_DRAFT, Draft
from kvmesh.drafts.ngram import LEAST_MATCH, MOST_MATCH, strength_of
from kvmesh.drafts.token_log import TokenLog

if TYPE_CHECKING:
    import torch

DEPTH = 8
MOST_NODES = 1 << 19  # of all trees; about 100 bytes each


class _Node:
    __slots__ = ("count", "next")

    def __init__(self) -> None:
        self.count = 0
        self.next: dict[int, _Node] = {}


class SuffixTree:
    """Counts every run of at most `depth` tokens among the texts that it is given, each of which grows by itself."""

    def __init__(self, depth: int = DEPTH) -> None:
        self._depth = depth
        self._root = _Node()
        self.nodes = 0

    def add(self, open_runs: deque[_Node], token: int) -> int:
        """Appends a token to one text, whose `open_runs` are the nodes at which its last runs stand, the shortest
        first. Returns how many nodes are new."""
        before = self.nodes
        runs = [self._root, *open_runs]
        open_runs.clear()
        for node in runs[: self._depth]:
            child = node.next.get(token)
            if child is None:
                child = node.next[token] = _Node()
                self.nodes += 1
            child.count += 1
            open_runs.append(child)
        return self.nodes - before

    def continued(self, last: Sequence[int], count: int, least: int = 1) -> tuple[list[int], int]:
        """Returns up to `count` tokens that came most often after the longest suffix of `last`, of `least` tokens at
        least, that has a continuation, and that suffix's length. Of equally frequent tokens the smaller id is taken."""
        text, match = list(last[-(self._depth - 1) :]), 0
        made: list[int] = []
        while len(made) < count:
            node, length = self._deepest(text)
            if node is None or length < least:
                break
            match = match or length
            token = min(node.next, key=lambda token: (-node.next[token].count, token))
            made.append(token)
            text.append(token)
            del text[: -(self._depth - 1)]
        return made, match

    def _deepest(self, text: Sequence[int]) -> tuple[_Node | None, int]:
        for start in range(len(text)):
            node: _Node | None = self._root
            for token in text[start:]:
                node = node.next.get(token) if node is not None else None
            if node is not None and node.next:
                return node, len(text) - start
        return None, 0


class _Row:
    __slots__ = ("key", "log", "runs")

    def __init__(self, key: bytes, log: TokenLog) -> None:
        self.key, self.log = key, log
        self.runs: deque[_Node] = deque()


class SuffixDrafter:
    """Drafts from the tree of all answers to a row's prompt, and from its own text."""

    name = "suffix"
    needs_hidden = False

    def __init__(self, most_nodes: int = MOST_NODES) -> None:
        self._most_nodes = most_nodes
        self._rows: dict[int, _Row] = {}
        self._trees: OrderedDict[bytes, SuffixTree] = OrderedDict()
        self._pins: dict[bytes, int] = {}
        self.nodes = 0  # of all trees

    def begin(self, handle: int, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.end(handle)
        key = hashlib.blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=16).digest()
        row = self._rows[handle] = _Row(key, TokenLog(prompt, answer))
        self._pins[key] = self._pins.get(key, 0) + 1
        if key in self._trees:  # where this row may have been before
            self._trees.move_to_end(key)
            return
        self._trees[key] = SuffixTree()
        self._learn(row, [int(token) for token in answer])

    def extend(self, handle: int, tokens: Sequence[int], hidden: torch.Tensor | None = None) -> None:
        row = self._rows[handle]
        row.log.extend(tokens)
        self._learn(row, tokens)

    def propose(self, handles: Sequence[int], most: Sequence[int]) -> list[Draft]:
        return [self._proposed(self._rows[handle], count) for handle, count in zip(handles, most, strict=True)]

    def end(self, handle: int) -> None:
        row = self._rows.pop(handle, None)
        if row is None:
            return
        self._pins[row.key] -= 1
        if not self._pins[row.key]:
            del self._pins[row.key]

    def _learn(self, row: _Row, tokens: Iterable[int]) -> None:
        """Adds to the row's tree; where there is no room, the trees stay as they are."""
        tree = self._trees[row.key]
        for token in tokens:
            if self.nodes + DEPTH > self._most_nodes:
                self._make_room()
            if self.nodes + DEPTH > self._most_nodes:
                row.runs.clear()
                return
            self.nodes += tree.add(row.runs, token)

    def _make_room(self) -> None:
        """Drops trees that no row uses, the longest unused first, until there is room for many tokens."""
        for key in [key for key in self._trees if key not in self._pins]:
            if self.nodes <= self._most_nodes * 3 // 4:
                return
            self.nodes -= self._trees.pop(key).nodes

    def _proposed(self, row: _Row, count: int) -> Draft:
        own = row.log.last_occurrence(LEAST_MATCH, MOST_MATCH)
        others, match = self._trees[row.key].continued(row.log.ids[-DEPTH:].tolist(), count, LEAST_MATCH)
        if own.length > match or (own.length and own.length == DEPTH - 1 == match):
            return Draft(row.log.continued(own, count), strength_of(own.length))
        return Draft(others, strength_of(match)) if others else NO_DRAFT
