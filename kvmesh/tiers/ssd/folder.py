"""The folder of one SSD tier: one owner at a time, and nobody else's bytes.

lock                        held by the process that uses the folder (flock: it ends with the process)
tier.json                   format version, and the identity that the blocks belong to
bucket-000000000001.kv ...  see `format`
aside-1/ ...                what was found and belongs to another identity, when so configured
                            (with "other_weights" it is removed, in the background: `Purge`)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import threading
from pathlib import Path
from typing import Literal

from kvmesh.errors import ConfigError
from kvmesh.tiers.ssd.format import FORMAT, checksum

log = logging.getLogger(__name__)

_BUCKET = re.compile(r"bucket-(\d{12})\.kv")
_OURS = re.compile(r"lock|tier\.json(\.new)?|probe|bucket-\d{12}\.kv|aside-\d+|lost\+found")
_ASIDE = re.compile(r"aside-\d+")
_WEIGHTS = re.compile(r"\b[0-9a-f]{16}(\+\d+)? (?=(float32|bfloat16|float16) )")  # see Worker._layout_text
OnMismatch = Literal["refuse", "set_aside", "other_weights"]


class FolderInUse(ConfigError):
    """Another process holds the folder, possibly one that was killed a moment ago."""


class TierFolder:
    """The folder of one tier, open and locked until `close`. Raises FolderInUse; ConfigError when it is not a tier's,
    or of another format or identity (unless that is set aside); OSError from the file system."""

    def __init__(self, path: Path, identity: str, on_mismatch: OnMismatch = "refuse") -> None:
        self.path = path
        self.set_aside: Path | None = None
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._check_names()
            self._lock = _lock(path)
        except OSError as error:
            raise ConfigError(f"path={str(path)!r}: {error.strerror}", field="path") from error
        try:
            self._claim(identity, on_mismatch)
        except BaseException:
            self.close()
            raise
        self.identity = checksum(f"{FORMAT} {identity}".encode())

    def bucket(self, number: int) -> Path:
        """Returns the path of the bucket's file."""
        return self.path / f"bucket-{number:012}.kv"

    def buckets(self) -> list[int]:
        """Returns the numbers of the bucket files, ascending."""
        return sorted(int(found[1]) for name in os.listdir(self.path) if (found := _BUCKET.fullmatch(name)))

    def close(self) -> None:
        """Unlocks the folder for other processes."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_names(self) -> None:
        strangers = sorted(name for name in os.listdir(self.path) if not _OURS.fullmatch(name))
        if strangers and not (self.path / "tier.json").exists():
            raise ConfigError(
                f"path={str(self.path)!r}: holds {strangers[0]!r}, not a file of the SSD tier; it needs its own folder",
                field="path",
            )

    def _claim(self, identity: str, on_mismatch: OnMismatch) -> None:
        said = self.path / "tier.json"
        wanted = {"format": FORMAT, "identity": identity}
        found = _read(said)
        if found is None and not self.buckets():
            _write(said, wanted)
            return
        if found is not None and all(found.get(name) == value for name, value in wanted.items()):
            return
        why = _difference(found, wanted)
        if on_mismatch == "refuse" or (on_mismatch == "other_weights" and not _other_weights(found, wanted)):
            raise ConfigError(
                f"path={str(self.path)!r}: {why}; name another folder, or empty this one (its blocks are a cache)",
                field="path",
            )
        self.set_aside = self._move_aside()
        log.warning("%s: %s; its files were moved to %s", self.path, why, self.set_aside)
        _write(said, wanted)

    def asides(self) -> list[Path]:
        """Returns the folders of files that were set aside, now or by an earlier process."""
        return sorted(path for path in self.path.iterdir() if _ASIDE.fullmatch(path.name) and path.is_dir())

    def _move_aside(self) -> Path:
        number = 1
        while (aside := self.path / f"aside-{number}").exists():
            number += 1
        aside.mkdir()
        # What says whose they are goes last: an interrupted move is found, and ended, by the next to open the folder.
        for path in (*map(self.bucket, self.buckets()), self.path / "tier.json"):
            if path.exists():
                path.rename(aside / path.name)
        return aside


class Purge:
    """Removes what was set aside, file by file, at `bytes_per_s` on average; the next process goes on with what `close`
    leaves."""

    def __init__(self, folder: TierFolder, bytes_per_s: int) -> None:
        self.removed_bytes = 0
        self._asides = folder.asides()
        self._bytes_per_s = bytes_per_s
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ssd purge", daemon=True)
        if self._asides:
            self._thread.start()

    def close(self) -> None:
        """Ends the removal after the present file."""
        self._closing.set()
        if self._asides:
            self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Waits, and returns whether nothing is left to remove."""
        if self._asides:
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and not any(aside.exists() for aside in self._asides)

    def _run(self) -> None:
        for aside in self._asides:
            try:
                for path in sorted(aside.iterdir()):
                    size = path.stat().st_size
                    path.unlink()
                    self.removed_bytes += size
                    if self._closing.wait(size / self._bytes_per_s):
                        return
                aside.rmdir()
                log.info("%s: blocks of other weights are removed", aside)
            except OSError as error:
                log.warning("%s: blocks of other weights could not be removed: %s", aside, error)


def identity_of(path: Path) -> str | None:
    """Returns the identity of a tier's folder, or None when it is no such folder or of another format."""
    found = _read(path / "tier.json") or {}
    identity = found.get("identity")
    return identity if isinstance(identity, str) and found.get("format") == FORMAT else None


def _lock(path: Path) -> int:
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(OSError):  # a full disk: the name is for messages alone
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        owner = os.pread(fd, 32, 0).decode(errors="replace")
        os.close(fd)
        raise FolderInUse(f"path={str(path)!r}: in use by process {owner or '?'}", field="path") from None
    except OSError:
        os.close(fd)
        raise
    return fd


def _read(said: Path) -> dict[str, object] | None:
    """Returns the content of tier.json: None when there is none, {} when this tier did not write it."""
    try:
        found = json.loads(said.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _other_weights(found: dict[str, object] | None, wanted: dict[str, object]) -> bool:
    """Says whether the folder holds blocks of the same shape but of other weights (or another epoch of them), which
    nobody reads."""
    theirs, ours = (found or {}).get("identity"), wanted["identity"]
    if (found or {}).get("format") != wanted["format"] or not isinstance(theirs, str) or not isinstance(ours, str):
        return False
    return bool(_WEIGHTS.search(ours)) and _WEIGHTS.sub("", theirs) == _WEIGHTS.sub("", ours)


def _difference(found: dict[str, object] | None, wanted: dict[str, object]) -> str:
    if found is None:
        return "holds buckets, and no tier.json that says whose"
    for name, value in wanted.items():
        if found.get(name) != value:
            return f"its blocks are of {name} {found.get(name)!r}, not {value!r}"
    raise AssertionError("no difference")


def _write(said: Path, wanted: dict[str, object]) -> None:
    """Writes tier.json atomically, also with respect to a power loss."""
    new = said.with_name("tier.json.new")
    with new.open("w") as file:
        json.dump(wanted, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(said)
    fd = os.open(said.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
