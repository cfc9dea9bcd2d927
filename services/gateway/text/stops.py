"""Stop strings in a stream of text: what may be shown, and where to cut.

A stop is found at the first character that completes one; of several completed there, the longest cuts. So the
answer does not depend on how the text was split into tokens. One automaton (Aho-Corasick) follows all stops at
once: its depth is how many characters at the end might still become a stop, and are held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of a set of stops; immutable, shared by all choices of a request. Stops are not empty."""

    __slots__ = ("_cut", "_depth", "_fail", "_next")

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._cut = [0]  # length of the longest stop that ends here
        for stop in stops:
            node = 0
            for char in stop:
                child = self._next[node].get(char)
                if child is None:
                    child = self._next[node][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self._depth.append(self._depth[node] + 1)
                    self._cut.append(0)
                node = child
            self._cut[node] = len(stop)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], char)
                # A suffix is shorter than the node's own stop, if it has one.
                self._cut[child] = self._cut[child] or self._cut[self._fail[child]]
                queue.append(child)

    def step(self, node: int, char: str) -> int:
        """The node after `char`."""
        following = self._next
        while node and char not in following[node]:
            node = self._fail[node]
        return following[node].get(char, 0)

    def depth(self, node: int) -> int:
        """Characters at the end of the text that are the beginning of some stop."""
        return self._depth[node]

    def cut(self, node: int) -> int:
        """Characters of the stop that ends here; 0: none."""
        return self._cut[node]


class StopMatcher:
    """One text's position among the stops."""

    __slots__ = ("_held", "_node", "_stops", "found", "stopped")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._node = 0
        self._held = ""
        self.stopped = False
        self.found = ""
        """The stop that cut the text."""

    def push(self, text: str) -> str:
        """Append `text`; returns what is certain to come before any stop. Sets `stopped` at a stop, after
        which nothing is shown any more."""
        if self.stopped:
            return ""
        node, stops = self._node, self._stops
        for at, char in enumerate(text, 1):
            node = stops.step(node, char)
            cut = stops.cut(node)
            if cut:
                self.stopped = True
                seen = self._held + text[:at]
                self.found = seen[len(seen) - cut :]
                self._held = ""
                return seen[: len(seen) - cut]
        self._node = node
        seen = self._held + text
        border = len(seen) - stops.depth(node)
        self._held = seen[border:]
        return seen[:border]

    def finish(self) -> str:
        """The end of the text has come: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
