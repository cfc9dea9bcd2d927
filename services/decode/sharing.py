"""Rows with equal prompts share its full pages, and the first of them alone is sent them (ADR 41). Pure.

A request finds pages among those of live rows when its landing is reserved, or when its KV comes back from extents.
What another request's landing is bringing just now it waits for: no page is shared before it is complete and no writer
can reach it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmesh.kvcache.page_pool import Pages
from kvmesh.kvcache.shared_pages import SharedPages
from kvmesh.services.decode.events import Phase
from kvmesh.services.decode.handoff import Handoff


class PromptSharing:
    """Knows the pages that rows of one instance share, and who waits for whose landing."""

    def __init__(self, pages: Pages) -> None:
        self.pages = SharedPages(pages)
        self._coming: dict[bytes, Handoff] = {}  # block → the request whose landing brings it
        self._landings: dict[int, list[Handoff]] = {}  # handle of such a request → those that wait for it
        self._entered: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no row has pages that can be found, and nobody may wait for a landing."""
        return not (len(self.pages) or self._entered or self._landings or self._coming)

    def awaited(self, h: Handoff) -> int:
        """Returns the handle of the request whose landing `h` is to wait for; 0 if it lands now. It waits where that
        landing brings at least half of what either of the two is sent: else it would wait longer than it saves."""
        keys = h.shared_keys
        if h.lands_alone or not self._coming:
            return 0
        here = self.pages.count(keys)
        other = self._coming.get(keys[here]) if here < len(keys) else None
        if other is None:
            return 0
        end = next((at for at in range(here, len(keys)) if self._coming.get(keys[at]) is not other), len(keys))
        return other.handle if 2 * (end - here) >= max(h.prompt_blocks, other.prompt_blocks) - here else 0

    def wait(self, h: Handoff, handle: int) -> None:
        """Notes that `h` waits for the landing of the request `handle`."""
        self._landings[handle].append(h)

    def lands(self, h: Handoff, first: int) -> None:
        """Notes that a landing brings the blocks of `h` from block `first` on."""
        self._landings[h.handle] = []
        for key in h.shared_keys[first:]:
            self._coming.setdefault(key, h)

    def moved(self, h: Handoff) -> Sequence[Handoff]:
        """Takes note of a request that is READY, or beyond: its prompt's full blocks are complete, or it has ended.
        Returns those that waited for its landing; they look again."""
        if h.pages and h.phase <= Phase.RUNNING and h.handle not in self._entered:
            self._entered.add(h.handle)
            keys = h.spec.block_keys[: min(len(h.pages), h.sealable)]
            self.pages.enter(h.handle, keys, h.pages[: len(keys)])
        waiting = self._landings.pop(h.handle, None)
        if waiting is None:
            return ()
        for key in h.shared_keys:
            if self._coming.get(key) is h:
                del self._coming[key]
        return [one for one in waiting if one.awaits == h.handle]

    def release(self, holder: int, pages: Sequence[int]) -> None:
        """Drops a row's references to its pages."""
        self._entered.discard(holder)
        self.pages.release(holder, pages)
