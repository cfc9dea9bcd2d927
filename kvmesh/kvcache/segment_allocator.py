"""Runs of slabs in one segment: which are free, and where the next run goes.

A binary tree over all slabs knows of each of its parts the longest free run, and those at its two ends; so a run is
found, taken and given back in O(log n), and neighbours that are free are one run without being told so.
"""

from __future__ import annotations


class SegmentAllocator:
    """Runs of units 0..total-1, all free at first. The lowest run that is long enough is taken, so that the upper end
    stays whole."""

    def __init__(self, total: int) -> None:
        if total < 0:
            raise ValueError(f"total={total}: must not be negative")
        self._total = total
        self._leaves = 1 << max(total - 1, 0).bit_length()
        size = 2 * self._leaves
        # Of each node (children of i: 2i and 2i + 1): free units at its left end, at its right end, longest free run.
        self._left, self._right, self._best = [0] * size, [0] * size, [0] * size
        self._free = total
        self._runs: dict[int, int] = {}  # taken: first unit → units
        for tree in (self._left, self._right, self._best):
            tree[self._leaves : self._leaves + total] = [1] * total
        for node in range(self._leaves - 1, 0, -1):
            self._join(node, self._leaves >> node.bit_length())

    @property
    def total(self) -> int:
        """The number of units."""
        return self._total

    @property
    def free(self) -> int:
        """The number of units in no run."""
        return self._free

    @property
    def largest(self) -> int:
        """The length of the longest free run, in units."""
        return self._best[1]

    @property
    def fragmentation(self) -> float:
        """1 - largest / free: the share of the free units that one request could not have; 0 when none is free."""
        return 1 - self.largest / self._free if self._free else 0.0

    def allocate(self, n: int, align: int = 1) -> int | None:
        """Returns the first of `n` consecutive units, a multiple of `align` (a power of two), or None when there is no
        such run. A free run of n + align - 1 units always suffices; the lowest run of `n` is used if it begins aligned.
        """
        if n < 1 or align < 1 or align & (align - 1):
            raise ValueError(f"n={n}, align={align}: at least one unit, aligned to a power of two")
        first = self._find(n)
        if first is not None and first % align:
            first = self._find(n + align - 1)
            first = None if first is None else -(-first // align) * align
        if first is None:
            return None
        self.take(first, n)
        return first

    def take(self, first: int, n: int) -> None:
        """Takes exactly these units. Raises ValueError when not all of them are free."""
        if n < 1 or not 0 <= first <= self._total - n or self._run_at(first) < n:
            raise ValueError(f"units {first}..{first + n - 1}: not free, or not of 0..{self._total - 1}")
        self._set(first, n, 0)
        self._runs[first] = n
        self._free -= n

    def release(self, first: int) -> int:
        """Frees the run that begins at this unit; returns its length. Raises ValueError when no run begins there."""
        n = self._runs.pop(first, None)
        if n is None:
            raise ValueError(f"unit {first}: no run begins there")
        self._set(first, n, 1)
        self._free += n
        return n

    def divide(self, first: int, n: int) -> None:
        """Divides the run that begins at `first` into runs of `n` units. Raises ValueError when no run begins there, or
        its length is no multiple of n."""
        length = self._runs.get(first)
        if length is None or n < 1 or length % n:
            raise ValueError(f"unit {first}: no run of a multiple of {n} units begins there")
        self._runs.update(dict.fromkeys(range(first, first + length, n), n))
        # They may go back one by one: all parts of the long run that stand above theirs must be true from now on.
        above = {node for at in range(first, first + length, n) for node in self._parts(at, n)}
        for node in above:
            self._fill(node, 0)
        while above := {node >> 1 for node in above if self._within(node >> 1, first, length)}:
            for node in above:
                self._fill(node, 0)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tree agrees with the runs. O(total)."""
        taken = bytearray(self._total)
        for first, n in self._runs.items():
            assert not any(taken[first : first + n]), "two runs share a unit"
            taken[first : first + n] = b"\1" * n
        assert self._free == taken.count(0)
        assert self.largest == max(map(len, bytes(taken).split(b"\1")), default=0), "the longest free run is another"

    # ── inner ────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, n: int) -> int | None:
        """Returns the first unit of the lowest free run of at least `n` units, or None."""
        if self._best[1] < n:
            return None
        node, first, span = 1, 0, self._leaves
        while self._best[node] < span:  # a part that is wholly free says nothing true of its own parts
            span //= 2
            low, high = 2 * node, 2 * node + 1
            if self._best[low] >= n:
                node = low
            elif self._right[low] + self._left[high] >= n:
                return first + span - self._right[low]
            else:
                node, first = high, first + span
        return first

    def _run_at(self, first: int) -> int:
        """Returns how many units are free from this one on."""
        node, start, span = 1, 0, self._leaves
        right: list[tuple[int, int]] = []  # parts to the right of the way down, and their units
        while 0 < self._best[node] < span:
            span //= 2
            if first < start + span:
                right.append((2 * node + 1, span))
                node = 2 * node
            else:
                node, start = 2 * node + 1, start + span
        if not self._best[node]:
            return 0
        run = start + span - first
        while right:
            node, span = right.pop()
            run += self._left[node]
            if self._left[node] < span:
                break
        return run

    def _set(self, first: int, n: int, free: int) -> None:
        """Marks units: first the largest parts that they consist of, then the parts above. Below a part that is taken
        as a whole nothing is updated, since nobody looks there until all of it is free again."""
        for node in self._parts(first, n):
            self._fill(node, (self._leaves >> node.bit_length() - 1) * free)
        low, high = self._leaves + first, self._leaves + first + n - 1
        for shift in range(1, low.bit_length()):
            for node in {low >> shift, high >> shift}:
                if not self._within(node, first, n):  # else it was filled as one
                    self._join(node, 1 << shift - 1)

    def _parts(self, first: int, n: int) -> list[int]:
        """Returns the largest parts that these units consist of."""
        found = []
        low, high = self._leaves + first, self._leaves + first + n
        while low < high:
            if low & 1:
                found.append(low)
                low += 1
            if high & 1:
                high -= 1
                found.append(high)
            low, high = low // 2, high // 2
        return found

    def _within(self, node: int, first: int, n: int) -> bool:
        """Says whether all of a part is among these units."""
        shift = self._leaves.bit_length() - node.bit_length()
        start = (node << shift) - self._leaves
        return first <= start <= start + (1 << shift) <= first + n

    def _fill(self, node: int, length: int) -> None:
        self._left[node] = self._right[node] = self._best[node] = length

    def _join(self, node: int, half: int) -> None:
        """Computes a node from its two children of `half` units each."""
        low, high = 2 * node, 2 * node + 1
        left, right = self._left, self._right
        left[node] = left[low] if left[low] < half else half + left[high]
        right[node] = right[high] if right[high] < half else half + right[low]
        self._best[node] = max(self._best[low], self._best[high], right[low] + left[high])
