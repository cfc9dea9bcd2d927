"""The fingerprint of a checkpoint: SHA-256 over its configuration and every byte of its weights, computed once.

    leaf        = SHA-256(up to 8 MiB of a tensor's bytes, as stored)
    tensor      = SHA-256(domain, number of bytes, its leaves)
    fingerprint = SHA-256(domain, canonical configuration, then name, dtype, shape and digest of every tensor by name)

Block keys are rooted in it, so whoever can make two checkpoints of one fingerprint makes their users share KV: the hash
has to be collision-resistant, and no byte may be left out. Leaves are hashed by several threads (hashlib lets the GIL
go) and do not depend on how tensors are spread over files.

Digests of tensors are kept beside the files in `RECORD`, or in a cache folder where that cannot be written. They are
believed for a file of the same name, size, mtime, ctime and inode, from a record that this user or root wrote, that
nobody else may write to, and whose own digest is right; anything else is hashed again. One process hashes (`_Turn`),
the others wait as long as it makes progress. A file that changes meanwhile is noticed by the same stamp.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import random
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvmesh.errors import CheckpointError

log = logging.getLogger(__name__)

RECORD, LOCK = ".kvmesh-fingerprint.json", ".kvmesh-fingerprint.lock"
CACHE_ENV = "KVMESH_CACHE_DIR"
LEAF_BYTES = 8 << 20  # part of what is hashed: another size makes other fingerprints
MAX_THREADS = 8  # each has a buffer of LEAF_BYTES
MAX_RECORD_BYTES = 64 << 20
RACY_S = 2.0  # a file that changed so lately could change again within the same tick of its file system's clock
TRIES = 3  # for a file that changes while it is read
STALLED_S = 30.0  # a process that hashes and has made no progress for so long is not waited for
WAIT_S = 3600.0  # for another process, whatever it does
TELL_S = 5.0  # between lines of the log

_FORMAT = 1
_DOMAIN, _TENSOR_DOMAIN = b"kvmesh.fingerprint.2\x00", b"kvmesh.tensor.2\x00"

Progress = Callable[[int, int], None]  # (bytes hashed, bytes to hash); from any thread


class Tensor(Protocol):
    """A `kvmesh.engine.checkpoint.TensorInfo`."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def file(self) -> Path: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Stamp(NamedTuple):
    """What tells whether a file is still the one that was hashed. No user can set ctime back."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stamp:
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def settled(self, now_s: float) -> bool:
        """Whether a later change cannot leave this stamp as it is."""
        return max(self.mtime_ns, self.ctime_ns) < (now_s - RACY_S) * 1e9


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """`hashed_bytes`: read by this call; 0: all was known. `stamps`: of the files that it is true for."""

    hexdigest: str
    hashed_bytes: int
    stamps: Mapping[Path, Stamp]

    def check(self) -> None:
        """Raises CheckpointError when a file is no longer the one that was hashed."""
        for file, stamp in self.stamps.items():
            if _stamp(file) != stamp:
                raise CheckpointError(f"{file}: has changed since its fingerprint was taken: start again")


def fingerprint(
    folder: Path,
    canonical: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    cache_dir: str = "",
    on_progress: Progress | None = None,
    threads: int = 0,
) -> Fingerprint:
    """The fingerprint of these tensors (by canonical name) under this configuration.

    `cache_dir`: where digests are kept when `folder` cannot be written; empty: `cache_folder()`.
    Raises CheckpointError: a file cannot be read, or keeps changing."""
    by_file: dict[Path, list[Tensor]] = {}
    for tensor in tensors.values():
        by_file.setdefault(tensor.file, []).append(tensor)
    places = [folder, Path(cache_dir).expanduser() if cache_dir else cache_folder()]
    names = [RECORD, hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32] + ".json"]
    records = [place / name for place, name in zip(places, names, strict=True)]
    known = _Known(by_file)
    known.learn(_read_records(records))
    if known.missing:
        # Without a folder that can be written nobody can wait for anybody: each hashes by itself.
        with _Turn([place / LOCK if place is folder else place / f"{names[1]}.lock" for place in places]) as turn:
            turn.take(lambda: known.learn(_read_records(records)))
            if known.missing:
                told = _Told(folder, known.missing_bytes, on_progress, turn.progress)
                known.hash(threads or _threads(), told)
                told.end()
                _keep(records, known)
    return Fingerprint(_combined(canonical, tensors, known), known.hashed_bytes, known.stamps)


def cache_folder() -> Path:
    """Where digests are kept of folders that cannot be written: KVMESH_CACHE_DIR, else the user's cache folder."""
    if told := os.environ.get(CACHE_ENV):
        return Path(told).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kvmesh"


def _combined(canonical: Mapping[str, Any], tensors: Mapping[str, Tensor], known: _Known) -> str:
    digest = hashlib.sha256(_DOMAIN + json.dumps(canonical, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(known.digests[tensor.file][tensor.name])
    return digest.hexdigest()


def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS)


def _stamp(file: Path) -> Stamp:
    try:
        return Stamp.of(file.stat())
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None


# ── hashing ──────────────────────────────────────────────────────────────────────────────────────


class _Known:
    """Digests of the tensors of each file, and the stamp of the file that they are of."""

    def __init__(self, by_file: Mapping[Path, Sequence[Tensor]]) -> None:
        self._by_file = by_file
        self.digests: dict[Path, dict[str, bytes]] = {}
        self.stamps: dict[Path, Stamp] = {}
        self.hashed_bytes = 0

    @property
    def missing(self) -> list[Path]:
        return [file for file in self._by_file if file not in self.digests]

    @property
    def missing_bytes(self) -> int:
        return sum(tensor.nbytes for file in self.missing for tensor in self._by_file[file])

    def learn(self, records: Iterable[Mapping[str, _Entry]]) -> bool:
        """Take what records say of files that are still the same; whether nothing is missing any more."""
        for record in records:
            for file in self.missing:
                entry, stamp = record.get(file.name), _stamp(file)
                names = {tensor.name for tensor in self._by_file[file]}
                if entry is not None and entry.stamp == stamp and names <= entry.digests.keys():
                    self.digests[file], self.stamps[file] = dict(entry.digests), stamp
        return not self.missing

    def hash(self, threads: int, told: _Told) -> None:
        """Everything that is missing. Raises CheckpointError."""
        for file in self.missing:
            for attempt in range(1, TRIES + 1):
                try:
                    self.stamps[file], self.digests[file] = _hash_file(file, self._by_file[file], threads, told)
                    break
                except _Changed:
                    if attempt == TRIES:
                        why = f"changed while it was read, {TRIES} times: is somebody still writing it?"
                        raise CheckpointError(f"{file}: {why}") from None
                    told.more(sum(tensor.nbytes for tensor in self._by_file[file]))
                except OSError as error:
                    raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
        self.hashed_bytes = told.done


class _Changed(Exception):
    """The file is not the one that reading it began with."""


def _hash_file(file: Path, tensors: Sequence[Tensor], threads: int, told: _Told) -> tuple[Stamp, dict[str, bytes]]:
    """Digests of these tensors of the file. OSError; _Changed."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = Stamp.of(os.fstat(fd))
        leaves: list[list[bytes]] = [[b""] * -(-tensor.nbytes // LEAF_BYTES) for tensor in tensors]
        _Leaves(fd, tensors, leaves, told).run(threads)
        if before != Stamp.of(os.fstat(fd)) or before != _stamp(file):
            raise _Changed
    finally:
        os.close(fd)
    return before, {
        tensor.name: hashlib.sha256(_TENSOR_DOMAIN + struct.pack("<Q", tensor.nbytes) + b"".join(found)).digest()
        for tensor, found in zip(tensors, leaves, strict=True)
    }


class _Leaves:
    """Hashes the leaves of one file, in the order in which they lie, with several threads."""

    def __init__(self, fd: int, tensors: Sequence[Tensor], leaves: list[list[bytes]], told: _Told) -> None:
        self._fd = fd
        self._leaves = leaves
        self._told = told
        self._lock = threading.Lock()
        order = sorted(range(len(tensors)), key=lambda at: tensors[at].offset)
        self._work = iter(
            (at, number, tensors[at].offset + number * LEAF_BYTES, size)
            for at in order
            for number in range(len(leaves[at]))
            if (size := min(LEAF_BYTES, tensors[at].nbytes - number * LEAF_BYTES))
        )
        self._largest = min(LEAF_BYTES, max((tensor.nbytes for tensor in tensors), default=0))
        self._useful = -(-sum(tensor.nbytes for tensor in tensors) // LEAF_BYTES)  # threads
        self._failed: list[BaseException] = []
        self._stopped = False

    def run(self, threads: int) -> None:
        """Returns when no thread of it is left. OSError; _Changed: the file is shorter than it was."""
        helpers = [
            threading.Thread(target=self._run, name="fingerprint", daemon=True)
            for _ in range(min(threads, self._useful) - 1)
        ]
        for helper in helpers:
            helper.start()
        try:
            self._run()
        finally:
            self._stopped = True  # also when the caller is interrupted
            for helper in helpers:
                helper.join()
        if self._failed:
            raise self._failed[0]

    def _run(self) -> None:
        buffer = memoryview(bytearray(self._largest))
        try:
            while not self._stopped:
                with self._lock:
                    piece = next(self._work, None)
                if piece is None:
                    return
                at, number, offset, size = piece
                self._leaves[at][number] = hashlib.sha256(self._read(buffer[:size], offset)).digest()
                self._told.more_done(size)
        except BaseException as error:  # every thread ends, and the caller says why
            self._failed.append(error)
            self._stopped = True

    def _read(self, into: memoryview, offset: int) -> memoryview:
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if not count:
                raise _Changed
            done += count
        return into


@dataclass
class _Told:
    """Says how far hashing is: to the caller, to processes that wait, and now and then to the log."""

    folder: Path
    total: int
    on_progress: Progress | None
    shared: Progress
    done: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began: float = field(default_factory=time.monotonic)
    _said: float = field(default_factory=time.monotonic)

    def more(self, nbytes: int) -> None:
        """So many bytes have to be hashed again."""
        with self._lock:
            self.total += nbytes

    def more_done(self, nbytes: int) -> None:
        """So many bytes are hashed."""
        with self._lock:
            self.done += nbytes
            if self.on_progress is not None:
                self.on_progress(self.done, self.total)
            now = time.monotonic()
            if now - self._said < TELL_S:
                return
            self._said = now
            self.shared(self.done, self.total)
            if self.on_progress is None:
                log.info("%s: fingerprint of the weights: %s", self.folder, self._figures(now))

    def end(self) -> None:
        """All is hashed."""
        now = time.monotonic()
        if now - self._began >= TELL_S and self.on_progress is None:
            log.info("%s: fingerprint of the weights: %s, done", self.folder, self._figures(now))

    def _figures(self, now: float) -> str:
        speed = self.done / max(now - self._began, 1e-9) / 1e9
        return f"{self.done / 1e9:.1f} of {self.total / 1e9:.1f} GB at {speed:.2f} GB/s"


# ── records ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a record says of one file."""

    stamp: Stamp
    digests: Mapping[str, bytes]


def _read_records(records: Iterable[Path]) -> Iterator[Mapping[str, _Entry]]:
    for record in records:
        try:
            raw = _trusted_bytes(record)
            if raw is not None:
                yield _parse(raw)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s: not a record of digests (%s): the weights are hashed again", record, error)


def _trusted_bytes(record: Path) -> bytes | None:
    """What a record holds; None: somebody else could have written it. OSError; ValueError: it cannot be one."""
    fd = os.open(record, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_RECORD_BYTES:
            raise ValueError(f"mode {found.st_mode:o}, {found.st_size} bytes")
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            log.warning(
                "%s: of user %d with mode %o: others could have written it, so it is not believed",
                record,
                found.st_uid,
                stat.S_IMODE(found.st_mode),
            )
            return None
        return file.read(MAX_RECORD_BYTES + 1)


def _parse(raw: bytes) -> dict[str, _Entry]:
    """ValueError and the like: damaged, or nothing that we wrote."""
    said = json.loads(raw)
    if said.pop("digest") != _sum(said):
        raise ValueError("its own digest is wrong")
    if (said["format"], said["domain"], said["leaf_bytes"]) != (_FORMAT, _TENSOR_DOMAIN.hex(), LEAF_BYTES):
        return {}  # of another version: its digests are others
    found = {}
    for name, entry in said["files"].items():
        size, mtime_ns, ctime_ns, inode = map(int, entry["stamp"])
        digests = {str(tensor): bytes.fromhex(text) for tensor, text in entry["tensors"].items()}
        if any(len(digest) != 32 for digest in digests.values()):
            raise ValueError(f"digests of {name!r}")
        found[name] = _Entry(Stamp(size, mtime_ns, ctime_ns, inode), digests)
    return found


def _sum(said: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _keep(records: Sequence[Path], known: _Known) -> None:
    """Write what is known to the first place that takes it, whole or not at all. A file that changed a moment ago is
    left out: it could change again and keep its stamp."""
    now = time.time()
    files = {
        file.name: {
            "stamp": list(known.stamps[file]),
            "tensors": {name: digest.hex() for name, digest in digests.items()},
        }
        for file, digests in known.digests.items()
        if known.stamps[file].settled(now)
    }
    if not files:
        return
    said: dict[str, Any] = {
        "format": _FORMAT,
        "domain": _TENSOR_DOMAIN.hex(),
        "leaf_bytes": LEAF_BYTES,
        "files": files,
    }
    raw = json.dumps({**said, "digest": _sum(said)}, sort_keys=True).encode()
    why = ""
    for record in records:
        try:
            _replace(record, raw)
            if _trusted_bytes(record) == raw:
                return
            why = f"{record}: is not ours when read back"
        except (OSError, ValueError) as error:
            why = f"{record}: {error}"
    log.warning("digests of the weights cannot be kept (%s): they are hashed at every start", why)


def _replace(record: Path, raw: bytes) -> None:
    record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = record.with_name(f"{record.name}.{os.getpid()}.{random.getrandbits(32):08x}.new")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "wb") as file:
            os.fchmod(fd, 0o644)  # whatever the umask: who reads it looks at this
            file.write(raw)
            file.flush()
            os.fsync(fd)
        new.rename(record)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


# ── one process at a time ────────────────────────────────────────────────────────────────────────


class _Turn:
    """The right to hash a folder: an flock, on the first of these files that can be locked; the holder writes down how
    far it is. Where nothing can be locked, everybody has it: the work is then done twice, which harms nobody."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._fd = -1
        self._held = False

    def __enter__(self) -> _Turn:
        for file in self._files:
            try:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
                if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                    raise OSError(f"{file} is no file")
                break
            except OSError:
                self._close()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()  # which unlocks it

    def take(self, done: Callable[[], bool]) -> None:
        """Wait until it is our turn, somebody else has done the work (`done`), or the holder makes no progress."""
        began = moved = time.monotonic()
        last, pause = b"", 0.02
        while not self._lock():
            if done():
                return
            now, said = time.monotonic(), self._said()
            if said != last:
                last, moved = said, now
            if now - moved > STALLED_S or now - began > WAIT_S:
                log.warning(
                    "%s: locked by a process that has made no progress for %.0f s: hashing without it",
                    self._files[0].parent,
                    now - moved,
                )
                return
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 2.0)
        done()  # whoever had it before us may have done it

    def progress(self, done: int, total: int) -> None:
        """For those who wait."""
        if self._held:
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, f"{os.getpid():>10} {done:>20} of {total:>20}\n".encode(), 0)

    def _lock(self) -> bool:
        """Whether it is ours, or cannot be had at all."""
        if self._fd < 0:
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # this file system knows no locks
            return True
        self._held = True
        return True

    def _said(self) -> bytes:
        try:
            return os.pread(self._fd, 128, 0)
        except OSError:
            return b""

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
