"""The decision log's file."""

from __future__ import annotations

from pathlib import Path

from kvmesh.errors import ConfigError
from kvmesh.private_files import private_opener

BUFFER_BYTES = 1 << 20


class LogFile:
    """The decision log's file. Each start of the conductor begins it anew and keeps the former one as NAME.1."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError when the file cannot be written."""
        place = Path(path).expanduser()
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                place.replace(place.with_name(place.name + ".1"))
            self._file = open(place, "wb", buffering=BUFFER_BYTES, opener=private_opener)  # noqa: SIM115
        except OSError as err:
            raise ConfigError(f"decision_log={path!r}: {err.strerror or err}", field="decision_log") from None
        self._bytes = 0

    def write(self, line: bytes) -> int:
        """Writes whole lines, buffered; returns the bytes taken so far."""
        self._file.write(line)
        self._bytes += len(line)
        return self._bytes

    def flush(self) -> None:
        """Writes buffered lines out, so that readers see them."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()
