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
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from kvmesh.errors import CheckpointError

ITEMSIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
MAX_HEADER_BYTES = 100 * 2**20
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


@dataclass(slots=True)
class Checkpoint:
    """Is an opened folder of weights. `raw(name)` maps a tensor's bytes; `close()` (or `with`) lets the mappings go
    once no view of them is left. `mtp` has the tensors of an MTP head, which neither the model's answers nor its
    fingerprint depend on. For `cache_dir` see `kvmesh.engine.fingerprint`."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    cache_dir: str = ""
    mtp: Mapping[str, TensorInfo] = field(default_factory=dict)
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
            with _reading(info.file), info.file.open("rb") as file:
                self._maps[info.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(self._maps[info.file])[info.offset : info.offset + info.nbytes]

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
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder with a Hugging Face checkpoint")
    generation = folder / "generation_config.json"
    try:
        raw, generated = _json(folder / "config.json"), _json(generation) if generation.exists() else None
        config = ModelConfig.from_hf(raw, generated, max_context_tokens)
    except CheckpointError as err:
        if str(folder) in err.message:
            raise
        raise CheckpointError(f"{folder}: {err.message}", field=err.field) from None
    found = {canonical_name(config, name): info for name, info in _shards(folder).items()}
    tensors = {name: found[name] for name in check_tensors(config, found, str(folder))}
    of_head = {**mtp_tensors(config), **mtp_copies(config)} if config.mtp_layers else {}
    return Checkpoint(folder, config, tensors, cache_dir, {name: found[name] for name in of_head if name in found})


def open_weights(path: str | Path, served: ModelConfig, max_context_tokens: int = 0) -> Checkpoint:
    """Opens a folder of other weights for a model that is served as `served` says, checked as `open_checkpoint` does
    it. A folder without a config.json is taken to be of the same model. Raises CheckpointError, also where its
    config.json describes another."""
    folder = Path(path)
    with _reading(folder):  # a name too long, or a folder that this user may not look into
        is_folder = folder.is_dir()
        described = is_folder and (folder / "config.json").exists()
    if described:
        found = open_checkpoint(folder, max_context_tokens)
        if found.config.canonical() != served.canonical():
            text = f"{folder}: config.json is not that of the served model (other sizes, or another family)"
            raise CheckpointError(text, field="config.json")
        return Checkpoint(folder, served, found.tensors)
    if not is_folder:
        raise CheckpointError(f"{folder}: not a folder with safetensors")
    tensors = {canonical_name(served, name): info for name, info in _shards(folder).items()}
    return Checkpoint(folder, served, {name: tensors[name] for name in check_tensors(served, tensors, str(folder))})


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


def _json(file: Path) -> dict[str, Any]:
    with _reading(file):
        text = file.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise CheckpointError(f"{file}: not valid JSON: {err}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, not {type(value).__name__}")
    return value


def _shards(folder: Path) -> dict[str, TensorInfo]:
    """Returns all tensors of the single file, or of the shards in the order that the index names them."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX} (supported weights: safetensors)")
    weight_map = _json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: weight_map is missing or empty")
    headers: dict[str, dict[str, TensorInfo]] = {}
    found: dict[str, TensorInfo] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != os.path.basename(shard) or shard in ("", ".", ".."):
            raise CheckpointError(f"{folder / INDEX}: weight_map[{name!r}]={shard!r} is not a file name")
        if shard not in headers:
            headers[shard] = read_header(folder / shard)
        if name not in headers[shard]:
            raise CheckpointError(f"{folder / shard}: tensor {name}, which the index places here, is missing")
        found[name] = headers[shard][name]
    return found


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Parses one safetensors header and checks it against the file's size."""
    with _reading(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{file}: truncated or not safetensors: header of {length} bytes in {size} bytes")
        text = stream.read(length)
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
