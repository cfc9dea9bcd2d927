"""The file of API keys, followed as it changes."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from kvmesh.errors import ConfigError
from kvmesh.services.gateway.api_keys import ANYBODY, KeyRing, Tenant
from kvmesh.telemetry import names

log = logging.getLogger(__name__)

CHECK_S = 1.0
# A file changed so lately may change again without a new time: clocks of file systems tick every few ms, or seconds.
SETTLED_NS = 3_000_000_000
_MOST_BYTES = 4 << 20

Version = tuple[int, int, int, int]
"""(mtime_ns, ctime_ns, size, inode)."""


class KeyFile:
    """`path` "": no keys, everybody may ask. A file that becomes bad is refused and the keys of before stay."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ring: KeyRing | None = None
        self._seen: Version | str = ""
        self._told = ""

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self.path)

    def load(self) -> None:
        """Read it for the first time. ConfigError: missing, unreadable, or not a file of keys."""
        if not self.path:
            return
        try:
            version, data = _read(self.path)
        except (OSError, ValueError) as err:
            raise ConfigError(_unreadable(self.path, err), field="api_keys") from None
        self.ring = _parse(self.path, data)
        self._seen = _settled(version)

    def tenant(self, authorization: bytes | None, route: str) -> Tenant:
        """Who asks. Unauthorized: nobody with a valid key; counted under `route`."""
        if not self.path:
            return ANYBODY
        assert self.ring is not None, "loaded"
        with names.GATEWAY_UNAUTHORIZED.labels(route=route).count_exceptions():
            return self.ring.tenant(authorization)

    async def follow(self) -> None:
        """Read it again whenever it has changed, until cancelled."""
        while self.path:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(self.check)

    def check(self) -> None:
        """Read it again if it has changed. A bad one is told once."""
        try:
            if _version(os.stat(self.path)) == self._seen:
                return
            version, data = _read(self.path)
        except OSError as err:
            # Not a version: it is tried again, since what hinders (permissions, descriptors) may go unseen.
            self._refuse(_unreadable(self.path, err))
            self._seen = ""
            return
        self._seen = _settled(version)
        try:
            ring = _parse(self.path, data)
        except ConfigError as err:
            self._refuse(err.message)
            return
        self._told = ""
        if self.ring is None or ring.entries != self.ring.entries:
            self.ring = ring
            log.info("api_keys: %d keys read again", len(ring.entries))

    def _refuse(self, why: str) -> None:
        if why != self._told:
            log.error("%s; the keys of before stay", why)
        self._told = why


def _version(found: os.stat_result) -> Version:
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _settled(version: Version) -> Version | str:
    """`version`, or "" while it cannot tell a later change: then the file is read once more."""
    return "" if 0 <= time.time_ns() - version[0] < SETTLED_NS else version


def _read(path: str) -> tuple[Version, bytes]:
    with Path(path).open("rb") as file:
        version = _version(os.fstat(file.fileno()))  # before the bytes: a later change is seen as one
        return version, file.read(_MOST_BYTES + 1)


def _unreadable(path: str, err: OSError | ValueError) -> str:
    return f"api_keys={path!r}: {err.strerror if isinstance(err, OSError) else err}"


def _parse(path: str, data: bytes) -> KeyRing:
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"api_keys={path!r}: is longer than {_MOST_BYTES} bytes", field="api_keys")
    try:
        return KeyRing.parse(data.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"api_keys={path!r}: is not UTF-8", field="api_keys") from None
    except ConfigError as err:
        raise ConfigError(f"{err.message} (in {path})", field="api_keys") from None
