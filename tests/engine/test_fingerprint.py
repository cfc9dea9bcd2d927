"""The fingerprint sees every byte, is taken once, and believes no record that could be wrong."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvmesh.engine import fingerprint as fp
from kvmesh.engine.checkpoint import Checkpoint, open_checkpoint
from kvmesh.engine.config import ModelConfig
from kvmesh.engine.fingerprint import LOCK, RECORD, Fingerprint
from kvmesh.errors import CheckpointError
from tests.support.checkpoints import make_checkpoint

EMBED = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 1.3 MB in three files, with tensors that are larger than what was once hashed whole."""
    folder = tmp_path_factory.mktemp("made") / "model"
    return make_checkpoint(folder, vocab_size=5003, tokenizer=False, shards=3)


@pytest.fixture
def model(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "model", ignore=shutil.ignore_patterns(".kvmesh*")))


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's own cache folder; files count as settled as soon as they are written."""
    monkeypatch.setenv(fp.CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.setattr(fp, "RACY_S", -1.0)


def taken(folder: Path, **options: Any) -> Fingerprint:
    with open_checkpoint(folder, **options) as checkpoint:
        return checkpoint.fingerprinted()


def total(folder: Path) -> int:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.nbytes


def flip(checkpoint: Checkpoint, tensor: str, at: int) -> None:
    """Change one byte where it lies, as an editor of weights would."""
    info = checkpoint.tensors[tensor]
    with info.file.open("r+b") as file:
        file.seek(info.offset + at)
        (old,) = file.read(1)
        file.seek(info.offset + at)
        file.write(bytes([old ^ 0x41]))


def test_an_edit_between_what_was_once_sampled(model: Path) -> None:
    """42 kB of the embeddings are zeroed, none of them in the 16 KiB that older versions hashed."""
    checkpoint = open_checkpoint(model)
    before, info = checkpoint.fingerprint, checkpoint.tensors[EMBED]
    first = info.nbytes // 15 + 1024  # behind the second of 16 samples
    assert first + 42_000 < 2 * info.nbytes // 15
    with info.file.open("r+b") as file:
        file.seek(info.offset + first)
        file.write(bytes(42_000))
    assert open_checkpoint(model).fingerprint != before


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_every_byte_counts(model: Path, data: st.DataObject) -> None:
    checkpoint = open_checkpoint(model)
    before = checkpoint.fingerprint
    name = data.draw(st.sampled_from(sorted(checkpoint.tensors)))
    at = data.draw(st.integers(0, checkpoint.tensors[name].nbytes - 1))
    flip(checkpoint, name, at)
    assert open_checkpoint(model).fingerprint != before
    flip(checkpoint, name, at)
    assert open_checkpoint(model).fingerprint == before


def test_leaves_join_up(monkeypatch: pytest.MonkeyPatch, made: Path, tmp_path: Path) -> None:
    """Many leaves a tensor, hashed by many threads, are what one thread makes of them."""
    monkeypatch.setattr(fp, "LEAF_BYTES", 1000)
    checkpoint = open_checkpoint(made)
    seen = {
        fp.fingerprint(
            tmp_path / str(threads), checkpoint.config.canonical(), checkpoint.tensors, threads=threads
        ).hexdigest
        for threads in (1, 2, 7)
    }
    assert len(seen) == 1
    info = checkpoint.tensors[EMBED]
    raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    leaves = b"".join(hashlib.sha256(raw[at : at + 1000]).digest() for at in range(0, len(raw), 1000))
    said = json.loads((tmp_path / "1" / RECORD).read_text())["files"][info.file.name]["tensors"][EMBED]
    assert said == hashlib.sha256(b"kvmesh.tensor.2\0" + len(raw).to_bytes(8, "little") + leaves).hexdigest()


def test_golden(tmp_path: Path) -> None:
    """What is hashed is part of every block key: whoever changes this changes all keys, and names a new domain."""
    file = tmp_path / "x.safetensors"
    file.write_bytes(bytes(range(200)))

    class Piece:
        name, dtype, shape, offset, nbytes = "a", "F32", (2, 3), 10, 24

    piece = Piece()
    piece.file = file  # type: ignore[attr-defined]
    found = fp.fingerprint(tmp_path, {"layers": 1, "rope": {"theta": 1e4}}, {"model.a": piece})  # type: ignore[dict-item]
    leaf = hashlib.sha256(bytes(range(10, 34))).digest()
    tensor = hashlib.sha256(b"kvmesh.tensor.2\0" + (24).to_bytes(8, "little") + leaf).digest()
    text = b'{"layers": 1, "rope": {"theta": 10000.0}}'
    assert (
        found.hexdigest
        == hashlib.sha256(b"kvmesh.fingerprint.2\0" + text + b"\0model.a\0F32\0[2, 3]\0" + tensor).hexdigest()
    )


# ── taken once ───────────────────────────────────────────────────────────────────────────────────


def test_taken_once_and_kept_beside_the_files(model: Path, tmp_path: Path) -> None:
    first = taken(model)
    assert first.hashed_bytes == total(model)
    again = taken(model)
    assert again == Fingerprint(first.hexdigest, 0, first.stamps)
    assert (model / RECORD).is_file() and not (tmp_path / "cache").exists()


def test_nothing_is_hashed_until_somebody_asks(model: Path) -> None:
    with open_checkpoint(model) as checkpoint:
        assert checkpoint.nbytes
    assert not (model / RECORD).exists()


def test_only_the_file_that_was_touched_is_hashed_again(model: Path) -> None:
    first = taken(model)
    with open_checkpoint(model) as checkpoint:
        file = checkpoint.tensors[EMBED].file
        there = sum(info.nbytes for info in checkpoint.tensors.values() if info.file == file)
    file.touch()
    again = taken(model)
    assert (again.hexdigest, again.hashed_bytes) == (first.hexdigest, there)
    assert taken(model).hashed_bytes == 0


def test_an_edit_that_sets_the_times_back_is_seen(model: Path) -> None:
    first, checkpoint = taken(model), open_checkpoint(model)
    file = checkpoint.tensors[EMBED].file
    before = file.stat()
    flip(checkpoint, EMBED, 7)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_mtime_ns, file.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert taken(model).hexdigest != first.hexdigest


def test_a_record_that_travels_with_the_folder_is_not_believed(model: Path, tmp_path: Path) -> None:
    first = taken(model)
    copied = Path(shutil.copytree(model, tmp_path / "copied"))  # copies mtimes, too
    assert (copied / RECORD).read_bytes() == (model / RECORD).read_bytes()
    again = taken(copied)
    assert (again.hexdigest, again.hashed_bytes) == (first.hexdigest, total(model))


def test_another_configuration_needs_no_hashing(model: Path) -> None:
    first = taken(model)
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**raw, "rope_theta": 10001.0}))
    again = taken(model)
    assert again.hashed_bytes == 0 and again.hexdigest != first.hexdigest


def test_a_file_that_changed_a_moment_ago_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one tick of the file system's clock it could change again and keep its times."""
    monkeypatch.setattr(fp, "RACY_S", 1e6)
    assert taken(model).hashed_bytes == taken(model).hashed_bytes == total(model)
    assert not (model / RECORD).exists()


# ── records ──────────────────────────────────────────────────────────────────────────────────────


def damage(kind: str, record: Path) -> None:
    text = record.read_text()
    match kind:
        case "cut":
            record.write_text(text[: len(text) // 2])
        case "empty":
            record.write_bytes(b"")
        case "binary":
            record.write_bytes(os.urandom(4096))
        case "deep":
            record.write_text("[" * 100_000)
        case "list":
            record.write_text("[]")
        case "one digest changed":
            digest = next(iter(next(iter(json.loads(text)["files"].values()))["tensors"].values()))
            record.write_text(text.replace(digest, "0" * 64))
        case "others may write":
            record.chmod(0o666)
        case "folder":
            record.unlink()
            record.mkdir()
        case "fifo":
            record.unlink()
            os.mkfifo(record)
        case "link":
            record.rename(record.with_name("elsewhere"))
            record.symlink_to("elsewhere")
        case "huge":
            os.truncate(record, fp.MAX_RECORD_BYTES + 1)
        case "short digests":
            said = json.loads(text)
            for entry in said["files"].values():
                entry["tensors"] = dict.fromkeys(entry["tensors"], "ab")
            del said["digest"]
            record.write_text(json.dumps({**said, "digest": fp._sum(said)}))


DAMAGES = ("cut", "empty", "binary", "deep", "list", "one digest changed", "others may write", "folder", "fifo", "link")


@pytest.mark.parametrize("kind", [*DAMAGES, "huge", "short digests"])
def test_a_damaged_or_hostile_record_is_hashed_again(model: Path, kind: str) -> None:
    first = taken(model)
    damage(kind, model / RECORD)
    again = taken(model)
    assert (again.hexdigest, again.hashed_bytes) == (first.hexdigest, total(model))
    assert taken(model).hashed_bytes == 0, "a good one stands there, or in the cache folder"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_record_of_another_user_is_not_believed(model: Path) -> None:
    """Who may write the folder, but is neither us nor root, must not say whose KV we share."""
    first = taken(model)
    os.chown(model / RECORD, 12345, -1)
    again = taken(model)
    assert (again.hexdigest, again.hashed_bytes) == (first.hexdigest, total(model))


def test_a_folder_that_cannot_be_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, opened = fp._replace, os.open

    def read_only(
        record: Path, raw: bytes
    ) -> None:  # root writes everywhere: the file system's word is put in its mouth
        if record.parent == model:
            raise OSError(30, "Read-only file system")
        replace(record, raw)

    def no_lock(path: Any, flags: int, *rest: Any) -> int:
        if Path(path).parent == model and flags & os.O_CREAT:
            raise OSError(30, "Read-only file system")
        return opened(path, flags, *rest)

    monkeypatch.setattr(fp, "_replace", read_only)
    monkeypatch.setattr(fp.os, "open", no_lock)
    first = taken(model)
    assert taken(model) == Fingerprint(first.hexdigest, 0, first.stamps)
    assert not (model / RECORD).exists() and not (model / LOCK).exists()
    (record,) = (tmp_path / "cache").glob("*.json")
    assert stat.S_IMODE(record.parent.stat().st_mode) == 0o700
    configured = taken(model, cache_dir=str(tmp_path / "configured"))
    assert configured.hashed_bytes == total(model) and list((tmp_path / "configured").glob("*.json"))


def test_nowhere_to_write_at_all(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(record: Path, raw: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fp, "_replace", full)
    assert taken(model).hexdigest == taken(model).hexdigest


def test_links_as_in_the_hub_cache(made: Path, tmp_path: Path) -> None:
    """snapshots/<revision>/model-1.safetensors -> ../../blobs/<sha256>."""
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in made.iterdir():
        if file.name.startswith(".kvmesh"):
            continue
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    first = taken(snapshot)
    assert (first.hexdigest, first.hashed_bytes) == (taken(made).hexdigest, total(made))
    assert taken(snapshot).hashed_bytes == 0
    target = (snapshot / "model-00001-of-00003.safetensors").resolve()
    swapped = target.with_name("swapped")
    shutil.copy(target, swapped)
    link = snapshot / "model-00001-of-00003.safetensors"
    link.unlink()
    link.symlink_to(os.path.relpath(swapped, snapshot))
    assert taken(snapshot).hashed_bytes > 0, "the link leads to another file now"


# ── races ────────────────────────────────────────────────────────────────────────────────────────


class Racing:
    """Runs `act` while the fingerprint is taken, after so many reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Any, times: int) -> None:
        read, self.left = fp._Leaves._read, times

        def racing(leaves: Any, into: memoryview, offset: int) -> memoryview:
            found = read(leaves, into, offset)
            if self.left:
                self.left -= 1
                act()
            return found

        monkeypatch.setattr(fp._Leaves, "_read", racing)


def test_a_file_that_changes_once_while_it_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(model)
    Racing(monkeypatch, lambda: flip(checkpoint, EMBED, 100), 1)
    found = taken(model)
    monkeypatch.undo()
    assert found.hexdigest == taken(model).hexdigest, "what lies there in the end"


def test_a_file_that_keeps_changing_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(model)
    Racing(monkeypatch, lambda: flip(checkpoint, EMBED, 100), 1 << 30)
    with pytest.raises(CheckpointError, match=r"changed while it was read, 3 times"):
        taken(model)
    assert not (model / RECORD).exists()


def test_a_file_that_is_replaced_or_cut_meanwhile(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_checkpoint(model).tensors[EMBED].file

    def replace() -> None:
        new = file.with_suffix(".new")
        shutil.copy(file, new)
        new.rename(file)

    Racing(monkeypatch, replace, 1)
    assert taken(model).hashed_bytes > total(model)
    monkeypatch.setattr(fp, "_read_records", lambda records: iter(()))
    Racing(monkeypatch, lambda: os.truncate(file, 100), 1)
    with pytest.raises(CheckpointError):
        taken(model)


def test_a_change_between_hashing_and_loading_is_seen(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    found = checkpoint.begin_fingerprint().result()
    found.check()
    flip(checkpoint, EMBED, 0)
    with pytest.raises(CheckpointError, match="has changed since its fingerprint was taken"):
        found.check()


# ── several processes ────────────────────────────────────────────────────────────────────────────

CHILD = """
import sys
from kvmesh.engine import fingerprint as fp
from kvmesh.engine.checkpoint import open_checkpoint
fp.RACY_S = -1.0
checkpoint = open_checkpoint(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
found = checkpoint.fingerprinted()
print(found.hexdigest, found.hashed_bytes)
"""


@pytest.fixture
def children(model: Path) -> Iterator[list[subprocess.Popen[str]]]:
    argv = [sys.executable, "-c", CHILD, str(model)]
    started = [
        subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(3)
    ]
    try:
        yield started
    finally:
        for child in started:
            child.kill()
            child.communicate()


def test_processes_at_once_hash_once(children: list[subprocess.Popen[str]], model: Path) -> None:
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "open\n"
    said = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        said.append(child.communicate(timeout=60)[0].split())
    assert len({digest for digest, _ in said}) == 1
    assert sum(int(hashed) for _, hashed in said) == total(model)


def test_whoever_hangs_is_not_waited_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp, "STALLED_S", 0.0)
    with (model / LOCK).open("w") as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        assert taken(model).hashed_bytes == total(model)


def test_whoever_makes_progress_is_waited_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is let go when the waiter has looked at it ten times, and found progress each time."""
    looked = []
    said = fp._Turn._said

    def looking(turn: Any) -> bytes:
        looked.append(os.pwrite(held.fileno(), f"{len(looked):>9}".encode(), 0))
        if len(looked) == 10:
            fcntl.flock(held, fcntl.LOCK_UN)
        return said(turn)

    monkeypatch.setattr(fp._Turn, "_said", looking)
    monkeypatch.setattr(fp, "STALLED_S", 5.0)
    monkeypatch.setattr(fp.time, "sleep", lambda _: None)
    with (model / LOCK).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert taken(model).hashed_bytes == total(model)
    assert len(looked) == 10


def test_progress_is_told(model: Path) -> None:
    told: list[tuple[int, int]] = []
    with open_checkpoint(model) as checkpoint:
        checkpoint.fingerprinted(lambda done, of: told.append((done, of)))
    assert told[-1] == (total(model), total(model)) and sorted(told) == told
    assert not [thread for thread in threading.enumerate() if thread.name == "fingerprint"]


def test_what_a_model_does_not_use_is_not_told() -> None:
    """Keys of the models of the first releases stay: a field that came later stands there where it says something."""
    raw = json.loads((Path(__file__).parents[2] / "examples/demo-model/config.json").read_text())
    plain = ModelConfig.from_hf(raw)
    told = plain.canonical()
    assert len(told) == 26 and not {"experts", "pre_norms", "residual_scale"} & told.keys()
    assert replace(plain, residual_scale=0.5).canonical() == told | {"residual_scale": 0.5}
