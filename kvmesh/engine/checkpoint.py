"""A Hugging Face checkpoint folder: config, tensors and fingerprint (both read lazily); validated before anything is
loaded.

safetensors: u64 little-endian header length, JSON header `{name: {dtype, shape, data_offsets}}`, then the data,
which the offsets must tile exactly. No torch here (`weights.py` has it), so a front process may look inside too.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.fingerprint import Fingerprint, Progress, fingerprint
from kvmesh.engine.tensors import (
    HEAD,
    MTP_JOIN,
    Shape,
    canonical_name,
    expected_tensors,
    layer_prefix,
    mtp_copies,
    mtp_tensors,
)
from kvmesh.errors import CheckpointError, PermissionDenied

ITEMSIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES = 100 * 2**20
MAX_JSON_BYTES = 100 * 2**20
HEADER_READ = 64 * 2**10  # bytes that hold most headers
CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Says where one tensor lies: `nbytes` bytes at `offset` of `file`."""

    name: str
    dtype: str  # "F32" | "BF16" | "F16" | "F64"
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


class TensorPart(NamedTuple):
    """Holds the bytes of an array of `shape`; `box` is where in it the wanted part lies."""

    data: memoryview
    shape: tuple[int, ...]
    box: tuple[range, ...]


@dataclass(slots=True)
class Checkpoint:
    """Is an opened folder of weights. `raw(name)` maps a tensor's bytes; `close()` (or `with`) lets the mappings go
    once no view of them is left. `mtp` has the tensors of an MTP head, which neither the model's answers nor its
    fingerprint depend on. For `cache_dir` see `kvmesh.engine.fingerprint`. Files are opened only where `allowed`."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    cache_dir: str = ""
    mtp: Mapping[str, TensorInfo] = field(default_factory=dict)
    allowed: AllowedFolders | None = None
    _fingerprinted: Future[Fingerprint] | None = None
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def has_mtp(self) -> bool:
        """Whether the files have an MTP head, or parts of one."""
        return layer_prefix(self.config.layers) + MTP_JOIN in self.mtp

    def check_mtp(self) -> None:
        """Raises CheckpointError unless the files have a whole MTP head of a model that may have one."""
        if not self.config.mtp_layers:
            raise CheckpointError(f"{self.path}: {self.config.architecture} has no MTP head", field="speculate")
        expected = mtp_tensors(self.config)
        expected |= {name: shape for name, shape in mtp_copies(self.config).items() if name in self.mtp}
        for _ in _checked(expected, self.mtp, str(self.path)):
            pass

    def info(self, name: str) -> TensorInfo:
        """Says where a tensor of the model, or of its MTP head, lies."""
        return self.tensors.get(name) or self.mtp[name]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def fingerprint(self) -> str:
        """Names the model: hex of a digest over its configuration and every byte of its weights, the same however it is
        sharded. Where nobody has taken it yet, all of the weights are read. Raises CheckpointError."""
        return self.fingerprinted().hexdigest

    def fingerprinted(self, on_progress: Progress | None = None) -> Fingerprint:
        """Returns the fingerprint and the files that it is true for. Raises CheckpointError when a file cannot be read,
        or changes."""
        return self.begin_fingerprint(on_progress, here=True).result()

    def begin_fingerprint(self, on_progress: Progress | None = None, *, here: bool = False) -> Future[Fingerprint]:
        """Takes the fingerprint, once, in a thread beside what the caller does next; with `here`, before this
        returns."""
        if self._fingerprinted is None:
            made = self._fingerprinted = Future()

            def run() -> None:
                try:
                    found = fingerprint(
                        self.path,
                        self.config.canonical(),
                        self.tensors,
                        cache_dir=self.cache_dir,
                        on_progress=on_progress,
                    )
                except BaseException as error:
                    made.set_exception(error)
                else:
                    made.set_result(found)

            if here:
                run()
            else:
                threading.Thread(target=run, name="fingerprint", daemon=True).start()
        return self._fingerprinted

    def raw(self, name: str) -> memoryview:
        """Maps the tensor's bytes. The mapping is private: writes to it reach neither the file nor anyone else."""
        info = self.info(name)
        if info.file not in self._maps:
            with _reading(info.file), open_regular(info.file, self.allowed) as file:
                self._maps[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(self._maps[info.file])[info.offset : info.offset + info.nbytes]

    def part(self, name: str, box: Sequence[range]) -> TensorPart:
        """Returns the whole mapping: of it only what is touched is read."""
        shape = self.info(name).shape
        return TensorPart(self.raw(name), shape, tuple(box))

    def release(self, name: str) -> None:
        """Gives back the memory that reading the tensor took; views of it stay valid and read the file again."""
        info = self.info(name)
        first = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and info.file in self._maps:
            self._maps[info.file].madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        self._maps.clear()  # each is unmapped when its last view dies

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(path: str | Path, max_context_tokens: int = 0, cache_dir: str = "") -> Checkpoint:
    """Reads and checks config.json and every shard's header; tensor data is read when somebody asks for it.

    `max_context_tokens` is the longest context that will be asked for (0: the model's own limit). Models with longrope
    choose their factors by it, and with them their fingerprint.
    Raises CheckpointError naming the file or tensor: not a folder, broken JSON, unsupported config, missing or
    truncated shard, missing index entry, missing tensor, wrong shape or dtype."""
    path, folder = Path(path), DiskFolder(Path(path))
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a folder with a Hugging Face checkpoint")
    config = read_config(folder, max_context_tokens)
    found = {canonical_name(config, name): info for name, info in _shards(folder).items()}
    tensors = {name: found[name] for name in check_tensors(config, found, str(path))}
    of_head = {**mtp_tensors(config), **mtp_copies(config)} if config.mtp_layers else {}
    return Checkpoint(path, config, tensors, cache_dir, {name: found[name] for name in of_head if name in found})


def open_weights(
    path: str | Path, served: ModelConfig, max_context_tokens: int = 0, allowed: AllowedFolders | None = None
) -> Checkpoint:
    """Opens a folder of other weights for a model that is served as `served` says, checked as `open_checkpoint` does
    it. A folder without a config.json is taken to be of the same model. Raises CheckpointError, also where its
    config.json describes another, and PermissionDenied where the folder, or a file that a link in it leads to, is not
    `allowed`."""
    folder = Path(path)
    if allowed is not None:
        allowed.check(str(path), os.path.realpath(folder))
    with _reading(folder):  # a name too long, or a folder that this user may not look into
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not a folder with safetensors")
    tensors = served_tensors(DiskFolder(folder, allowed), served, max_context_tokens)
    return Checkpoint(folder, served, tensors, allowed=allowed)


def served_tensors(folder: WeightsFolder, served: ModelConfig, max_context_tokens: int = 0) -> dict[str, TensorInfo]:
    """Returns the tensors of other weights for a model that is served as `served` says, checked. Raises CheckpointError
    as `open_weights` does."""
    if folder.has(CONFIG) and read_config(folder, max_context_tokens).canonical() != served.canonical():
        text = f"{folder}: config.json is not that of the served model (other sizes, or another family)"
        raise CheckpointError(text, field=CONFIG)
    tensors = {canonical_name(served, name): info for name, info in _shards(folder).items()}
    return {name: tensors[name] for name in check_tensors(served, tensors, str(folder))}


class WeightsFolder(Protocol):
    """Has files of weights: a folder on disk, or a prefix in object storage, as `str` says."""

    def has(self, name: str) -> bool: ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, first: int, length: int) -> bytes:
        """Returns at most `length` bytes of a file from byte `first` on. Raises CheckpointError naming a file that
        cannot be read."""

    def file(self, name: str) -> Path:
        """What names the file."""


class DiskFolder:
    """Reads regular files of one folder, or what links in it lead to where that is `allowed`."""

    def __init__(self, path: Path, allowed: AllowedFolders | None = None) -> None:
        self._path, self._allowed = path, allowed

    def __str__(self) -> str:
        return str(self._path)

    def has(self, name: str) -> bool:
        with _reading(self.file(name)):
            return self.file(name).exists()

    def size(self, name: str) -> int:
        with _reading(self.file(name)):
            return self.file(name).stat().st_size

    def read(self, name: str, first: int, length: int) -> bytes:
        with _reading(self.file(name)), open_regular(self.file(name), self._allowed) as file:
            file.seek(first)
            return file.read(length)

    def file(self, name: str) -> Path:
        return self._path / name


class AllowedFolders:
    """Says where weights may lie that somebody else names: below these folders on disk, links resolved, and below these
    prefixes of object storage ("s3://bucket/steps")."""

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(os.path.realpath(one) for one in folders if "://" not in one)
        self._prefixes = tuple(one.rstrip("/") for one in folders if "://" in one)

    def __str__(self) -> str:
        return ", ".join((*self._folders, *self._prefixes)) or "none"

    def check(self, named: str, found: str) -> None:
        """Raises PermissionDenied unless `found`, a path without links or a URL, is allowed; `named` is what it was
        called."""
        roots = self._prefixes if "://" in found else self._folders
        if not any(found == root or found.startswith(root.rstrip("/") + "/") for root in roots):
            leads = "" if found == named else f", which leads to {found},"
            text = f"path={named!r}{leads} is outside of rollout_folders ({self})"
            raise PermissionDenied(text, field="path")


def open_regular(file: Path, allowed: AllowedFolders | None = None) -> BinaryIO:
    """Opens a regular file to read. Raises OSError, CheckpointError for what is none (a pipe would block whoever opens
    it), PermissionDenied for one that lies elsewhere than `allowed`: what was opened is looked at, not its name."""
    opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise CheckpointError(f"{file}: not a regular file")
        if allowed is not None:
            allowed.check(str(file), os.readlink(f"/proc/self/fd/{opened}"))
        return os.fdopen(opened, "rb")
    except BaseException:
        os.close(opened)
        raise


class _reading:  # noqa: N801 - reads like a statement
    """Turns an OSError on one file into a CheckpointError that names it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, err: BaseException | None, _trace: object) -> None:
        if isinstance(err, FileNotFoundError):
            raise CheckpointError(f"{self.file}: no such file") from None
        if isinstance(err, OSError):
            raise CheckpointError(f"{self.file}: cannot be read: {err.strerror or err}") from None


def read_config(folder: WeightsFolder, max_context_tokens: int = 0) -> ModelConfig:
    """Reads config.json, and generation_config.json where there is one. Raises CheckpointError, which names them."""
    try:
        raw = _json(folder, CONFIG)
        generated = _json(folder, GENERATION) if folder.has(GENERATION) else None
        return ModelConfig.from_hf(raw, generated, max_context_tokens)
    except CheckpointError as err:
        if str(folder) in err.message:
            raise
        raise CheckpointError(f"{folder}: {err.message}", field=err.field) from None


def _json(folder: WeightsFolder, name: str) -> dict[str, Any]:
    text, where = folder.read(name, 0, MAX_JSON_BYTES + 1), f"{folder}/{name}"
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{where}: more than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{where}: not valid JSON: {err}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: must hold a JSON object, not {type(value).__name__}")
    return value


def _shards(folder: WeightsFolder) -> dict[str, TensorInfo]:
    """Returns all tensors of the single file, or of the shards in the order that the index names them."""
    if folder.has(SINGLE):
        return _header(folder, SINGLE)
    if not folder.has(INDEX):
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX} (supported weights: safetensors)")
    weight_map, index = _json(folder, INDEX).get("weight_map"), f"{folder}/{INDEX}"
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    headers: dict[str, dict[str, TensorInfo]] = {}
    found: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != os.path.basename(shard) or shard in ("", ".", ".."):
            raise CheckpointError(f"{index}: weight_map[{name!r}]={shard!r} is not a file name")
        if shard not in headers:
            headers[shard] = _header(folder, shard)
        if name not in headers[shard]:
            raise CheckpointError(f"{folder}/{shard}: tensor {name}, which the index places here, is missing")
        found[name] = headers[shard][name]
    return found


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Parses one safetensors header and checks it against the file's size."""
    return _header(DiskFolder(file.parent), file.name)


def _header(folder: WeightsFolder, name: str) -> dict[str, TensorInfo]:
    size, file = folder.size(name), folder.file(name)
    begun = folder.read(name, 0, HEADER_READ)
    length = int.from_bytes(begun[:8], "little")
    if len(begun) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{file}: truncated or not safetensors: header of {length} bytes in {size} bytes")
    text = begun[8 : 8 + length]
    if len(text) < length:
        text += folder.read(name, len(begun), length - len(text))
    try:
        header = json.loads(text)
        entries = [_entry(file, 8 + length, name, raw) for name, raw in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise CheckpointError(f"{file}: broken safetensors header: {type(err).__name__}: {err}") from None
    end = 8 + length
    for info in sorted(entries, key=lambda info: (info.offset, info.nbytes)):
        if info.offset != end:
            raise CheckpointError(f"{file}: tensor {info.name} begins at byte {info.offset}, expected {end}")
        end += info.nbytes
    if end != size:
        why = "truncated" if end > size else "has bytes after the last tensor"
        raise CheckpointError(f"{file}: {why}: its header describes {end} bytes, the file has {size}")
    return {info.name: info for info in entries}


def _entry(file: Path, base: int, name: str, raw: dict[str, Any]) -> TensorInfo:
    """Reads one header entry. Wrong types raise what `read_header` turns into a CheckpointError."""
    begin, end = (int(offset) for offset in raw["data_offsets"])
    shape = tuple(int(dim) for dim in raw["shape"])
    dtype = str(raw["dtype"])
    if begin < 0 or end < begin or any(dim < 0 for dim in shape):
        raise ValueError(f"{name}: offsets {begin}..{end}, shape {list(shape)}")
    if dtype in ITEMSIZE and end - begin != math.prod(shape) * ITEMSIZE[dtype]:
        raise ValueError(f"{name}: {end - begin} bytes for shape {list(shape)} of {dtype}")
    return TensorInfo(name, dtype, shape, file, base + begin, end - begin)


def check_tensors(config: ModelConfig, found: Mapping[str, TensorInfo], where: str) -> Iterator[str]:
    """Returns the names of the tensors that the model uses, each checked; others that are `found` are ignored. Raises
    CheckpointError for one that is missing or has another shape or dtype."""
    expected = expected_tensors(config)
    if HEAD in found:  # config says tied but the file brings a head of its own: transformers uses it
        expected.setdefault(HEAD, (config.vocab_size, config.hidden_size))
    return _checked(expected, found, where)


def _checked(expected: Mapping[str, Shape], found: Mapping[str, TensorInfo], where: str) -> Iterator[str]:
    """Returns the names of the tensors that are expected, each checked; others in the files are ignored."""
    for name, shape in expected.items():
        info = found.get(name)
        if info is None:
            raise CheckpointError(f"{where}: tensor {name} is missing from the checkpoint", field=name)
        if info.shape != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}, config.json asks for {list(shape)}",
                field=name,
            )
        if info.dtype not in ITEMSIZE:
            raise CheckpointError(
                f"{info.file}: tensor {name} has dtype {info.dtype}; supported: {', '.join(ITEMSIZE)}", field=name
            )
        yield name
