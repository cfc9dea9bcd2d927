"""What lies in an object store by layout, and its removal. Blocking calls; safe beside a running mesh, for which an
object that went is a miss.

An operator names what goes. By age alone goes only KV of weights that are known and not served; data that clients put
never does."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import obstore
from obstore.exceptions import BaseError

from kvmesh.errors import InvalidRequest
from kvmesh.tiers.object_store.client import DELETE_KEYS, IDENTITY, MAX_IDENTITY, named_error, open_store

_FOLDER = re.compile(r"[0-9a-f]{32}")
_WEIGHTS = re.compile(r"\b([0-9a-f]{16})(?:\+(\d+))? (?=(?:float32|bfloat16|float16) )")  # see Worker._layout_text

Weights = tuple[str, int]  # first 16 digits of a fingerprint, and the epoch


@dataclass(frozen=True, slots=True)
class Folder:
    """The objects of one layout of one rank. `identity` is what they belong to; "" for objects of an older version,
    which did not write it down."""

    name: str
    identity: str
    objects: int
    nbytes: int
    newest: datetime

    @property
    def weights(self) -> Weights | None:
        """Whose KV it is; None if it is no KV or the weights are unknown."""
        found = _WEIGHTS.search(self.identity)
        return (found[1], int(found[2] or 0)) if found else None


def folders(url: str) -> list[Folder]:
    """Returns every layout below `url`, the least recently written first; objects with other names are skipped. Raises
    ConfigError for an unusable URL, a missing bucket or no access, and Unavailable when nothing answers."""
    store = open_store(url)
    sums: dict[str, tuple[int, int, datetime]] = {}
    try:
        for page in obstore.list(store):
            for meta in page:
                name, _, rest = meta["path"].partition("/")
                if not rest or not _FOLDER.fullmatch(name):
                    continue
                objects, nbytes, newest = sums.get(name, (0, 0, meta["last_modified"]))
                sums[name] = objects + 1, nbytes + meta["size"], max(newest, meta["last_modified"])
        found = [Folder(name, _identity(store, name), *told) for name, told in sums.items()]
    except (BaseError, OSError) as error:
        raise named_error(url, error) from None
    return sorted(found, key=lambda one: (one.newest, one.name))


def chosen(
    found: Sequence[Folder],
    names: Collection[str],
    older_than: timedelta | None,
    served: Collection[Weights],
    now: datetime,
) -> list[Folder]:
    """Returns the folders to remove: those named, and those of known weights that are not served and were last written
    `older_than` ago. Pure. Raises InvalidRequest, which names the folder, when a named one does not exist, is of
    weights that are served, or holds clients' data."""
    known = {one.name: one for one in found}
    for name in names:
        one = known.get(name)
        if one is None:
            raise InvalidRequest.of("folder", name, "there is none of this name")
        if _serves(served, one.weights):
            raise InvalidRequest.of("folder", name, f"the mesh serves its weights ({one.identity})")
        if one.identity and one.weights is None:
            raise InvalidRequest.of("folder", name, f"holds no KV of a model ({one.identity})")
    return [one for one in found if one.name in names or _old(one, older_than, served, now)]


def _serves(served: Collection[Weights], weights: Weights | None) -> bool:
    """Whether instances that serve these weights may use a folder of those. A folder is named after the epoch that an
    instance was started with; updates give it later ones, whose blocks it keeps there, too."""
    return weights is not None and any(weights[0] == of and weights[1] <= epoch for of, epoch in served)


def _old(one: Folder, older_than: timedelta | None, served: Collection[Weights], now: datetime) -> bool:
    known = one.weights is not None and not _serves(served, one.weights)
    return known and older_than is not None and now - one.newest > older_than


def remove(url: str, name: str, on_progress: Callable[[int], None] = lambda _: None) -> int:
    """Removes all objects of one folder and returns how many; it calls `on_progress(removed)`. Raises as `folders`
    does; the next call then removes the rest."""
    if not _FOLDER.fullmatch(name):
        raise InvalidRequest.of("folder", name, "32 hex digits")
    store, removed = open_store(f"{url.rstrip('/')}/{name}"), 0
    try:
        for page in obstore.list(store, chunk_size=DELETE_KEYS):
            paths = [meta["path"] for meta in page]
            for path in _gone(store, paths):  # one was missing: some stores stop there
                _gone(store, [path])
            removed += len(paths)
            on_progress(removed)
    except (BaseError, OSError) as error:
        raise named_error(url, error) from None
    return removed


def _gone(store: Any, paths: list[str]) -> list[str]:
    """Deletes objects; returns those that must be deleted one by one."""
    try:
        obstore.delete(store, paths)
    except FileNotFoundError:
        return paths if len(paths) > 1 else []
    return []


def _identity(store: Any, name: str) -> str:
    """Returns the folder's identity as written down, or "" when it cannot be read."""
    try:
        path = f"{name}/{IDENTITY}"
        if obstore.head(store, path)["size"] > MAX_IDENTITY:
            return ""
        return bytes(obstore.get(store, path).bytes()).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
