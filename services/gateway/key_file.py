"""The file of API keys, followed as it changes."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from kvmesh.rpc.errors import ConfigError
from kvmesh.telemetry import names
from services.gateway.api_keys import ANYBODY, KeyRing, Tenant

log = logging.getLogger(__name__)

CHECK_S = 1.0
_MOST_BYTES = 4 << 20

Version = tuple[int, int, int]
"""(mtime_ns, size, inode)."""


class KeyFile:
    """`path` "": no keys, everybody may ask. A file that becomes bad is refused and the keys of before stay."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ring: KeyRing | None = None
        self._seen: Version | str = ""

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return bool(self.path)

    def load(self) -> None:
        """Read it for the first time. ConfigError: missing, unreadable, or not a file of keys."""
        if self.path:
            self._seen, self.ring = _read(self.path)

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
            version: Version | str = _version(os.stat(self.path))
            if version == self._seen:
                return
            version, ring = _read(self.path)
        except (ConfigError, OSError) as err:
            why = err.message if isinstance(err, ConfigError) else f"api_keys={self.path!r}: {err.strerror}"
            version = version if isinstance(err, ConfigError) else why
            if version != self._seen:
                log.error("%s; the keys of before stay", why)
            self._seen = version
            return
        self._seen, self.ring = version, ring
        log.info("api_keys: %d keys read again", len(ring.entries))


def _version(found: os.stat_result) -> Version:
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> tuple[Version, KeyRing]:
    try:
        with Path(path).open("rb") as file:
            version = _version(os.fstat(file.fileno()))  # before the bytes: a later change is seen as one
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as err:
        why = err.strerror if isinstance(err, OSError) else str(err)
        raise ConfigError(f"api_keys={path!r}: {why}", field="api_keys") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"api_keys={path!r}: is longer than {_MOST_BYTES} bytes", field="api_keys")
    try:
        return version, KeyRing.parse(data.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"api_keys={path!r}: is not UTF-8", field="api_keys") from None
    except ConfigError as err:
        raise ConfigError(f"{err.message} (in {path})", field="api_keys") from None
