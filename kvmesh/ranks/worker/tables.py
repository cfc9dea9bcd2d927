"""What the front names by cache group becomes what a step takes: a table of pages for each group, the slot of a state.

Of a STATE group the ids of a request are *roles*, not blocks: `STATE` is the slot that steps write in place, `SNAPSHOT`
the slot that the state is copied to at block borders, `SOURCE` (of a PrefillItem alone) a snapshot that is copied to
the first before its chunk. Those behind the first may be missing, or -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.engine.cache_memory import is_state, table_of
from kvmesh.errors import InternalError
from kvmesh.kvcache.cache_groups import CacheGroup, GroupPages

STATE, SNAPSHOT, SOURCE = range(3)


class GroupTables(NamedTuple):
    """Is what one request has: `tables[g]` as a step takes it, and of each STATE group, in their order, `roles`."""

    tables: tuple[tuple[int, ...], ...]
    roles: tuple[tuple[int, ...], ...]


def tables_of(groups: Sequence[CacheGroup], named: Sequence[GroupPages]) -> GroupTables:
    """Returns the tables of a request whose pages are `named`, each group once. Raises InternalError when a group is
    missing, or a state's slot."""
    by_group = {pages.group: pages for pages in named}
    if len(named) != len(groups) or sorted(by_group) != list(range(len(groups))):
        raise InternalError(f"pages of cache groups {[pages.group for pages in named]}, the model has {len(groups)}")
    tables, roles = [], []
    for number, group in enumerate(groups):
        pages = by_group[number]
        if not is_state(group):
            tables.append(table_of(pages))
            continue
        if not pages.ids or pages.ids[STATE] < 0:
            raise InternalError(f"cache group {group.name}: the request has no slot")
        tables.append((pages.ids[STATE],))
        roles.append(pages.ids)
    return GroupTables(tuple(tables), tuple(roles))


def role(ids: Sequence[int], which: int) -> int:
    """Returns the slot of a state's role; -1 for none."""
    return ids[which] if which < len(ids) else -1
