"""Walks of keys in native code find what plain Python finds; how that code is built, found and done without."""

import ctypes
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmesh.kvcache.announce import Announcement
from kvmesh.kvcache.block_map import BlockMap
from kvmesh.kvcache.keys import Keys
from kvmesh.native import build, library
from kvmesh.services.conductor.prefixes import pending, walks
from kvmesh.services.conductor.prefixes.index import Index
from kvmesh.services.conductor.prefixes.pending import Pending, marks, positions
from tests.support.compilers import needs_compiler

KEYS = tuple(bytes([n, *[7] * 15]) for n in range(60))
needs_native = pytest.mark.skipif(bool(library.why_not()), reason=f"no native code: {library.why_not()}")
held = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 59), st.integers(1, 60)), max_size=12)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "functions", lambda: None)


def truth_of(some: list[tuple[int, int, int]], dropped: int) -> walks.WalkedMap:
    """Stores that have said that they hold KEYS[first : first + count]; one of them is dropped and not swept yet."""
    found = walks.WalkedMap()
    for seq, (store, first, count) in enumerate(some):
        found.apply(Announcement(f"s{store}", 1 + seq, 1, KEYS[first : first + count]))
    found.drop(f"s{dropped}")
    return found


def merged(runs: walks.Runs) -> walks.Runs:
    """What nobody holds may be told in two pieces."""
    return [run for run, after in zip(runs, [*runs[1:], (0, -1)], strict=False) if run[1] != after[1]]


@needs_native
@given(held, st.integers(0, 4), st.integers(0, 70))
def test_a_chain_is_walked_alike(some: list[tuple[int, int, int]], dropped: int, at_least: int) -> None:
    truth = truth_of(some, dropped)
    assert merged(truth.prefix(KEYS, at_least)) == merged(BlockMap.prefix(truth, KEYS, at_least))
    assert truth.prefix(Keys.of(KEYS), at_least) == truth.prefix(KEYS, at_least)
    assert truth.prefix((), at_least) == BlockMap.prefix(truth, (), at_least)
    for name in truth.stores():
        slot = truth.slot(name)
        assert slot is not None
        assert list(truth.lacking(KEYS, slot)) == [not mask >> slot & 1 for mask in truth.masks(KEYS)]


@needs_native
@given(st.integers(0, 1 << 32), st.integers(0, 400))
def test_marks_are_walked_alike(seed: int, blocks: int) -> None:
    rng, pending = random.Random(seed), Pending()
    chain = tuple(rng.randbytes(16) for _ in range(blocks))
    for slot in [pending.open(1000) for _ in range(3)]:
        pending.place(slot, marks(chain[: rng.randint(0, blocks)]), "r")
    masks = pending._masks
    want: walks.Runs = []
    last = -1
    for at in positions(blocks):
        mask = masks.get(chain[at], 0)
        want[-1 if mask == last else len(want) :] = [(at + 1, mask)]
        last = mask
    while want and not want[-1][1]:
        want.pop()
    assert pending.prefix(chain) == pending.prefix(Keys.of(chain)) == want


@needs_native
def test_errors_of_keys_come_through() -> None:
    truth = truth_of([(0, 0, 3)], 4)
    for ask in (truth.prefix, lambda keys: truth.lacking(keys, 0), lambda keys: truth.mask(keys[0])):
        with pytest.raises(TypeError, match="bytes"):
            ask(([],))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"have 21 bytes|2 keys have 21 bytes"):
        truth.prefix((KEYS[0], b"short"))


def test_without_native_code_the_index_answers_the_same(plain: None) -> None:
    index = Index()
    index.truth.apply(Announcement("a", 1, 1, KEYS[:3]))
    slot = index.pending.open(100)
    index.place(("a", 1), slot, KEYS[:5], "r")
    assert index.pending.blocks(slot) == 2
    assert [(run.end, run.sealed, run.coming) for run in index.survey(KEYS[:9]).runs] == [(3, 1, 0), (5, 0, 1)]


# ── how it is built ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sources that compile in no time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text('#include "two.h"\nextern "C" int answer() { return ANSWER; }\n')
    (folder / "two.h").write_text("#define ANSWER 42\n")
    monkeypatch.setattr(library, "SOURCES", folder)
    monkeypatch.setattr(library, "FLAGS", ("-O1", "-fPIC", "-shared"))
    monkeypatch.setattr(library, "folders", lambda: [tmp_path / "built"])
    monkeypatch.delenv(library.SWITCH, raising=False)
    monkeypatch.delenv("CXX", raising=False)
    return folder


@needs_compiler
def test_a_build_is_made_once_for_its_sources(sources: Path, tmp_path: Path) -> None:
    assert "no build" in library.find()[1]
    assert build.main() == 0
    found, why = library.find()
    assert found is not None
    assert not why
    assert found.answer() == 42
    [first] = (tmp_path / "built").iterdir()
    before = first.stat().st_mtime_ns
    assert build.compile_into(tmp_path / "built") == first
    assert first.stat().st_mtime_ns == before
    (sources / "two.h").write_text("#define ANSWER 43\n")
    newer = build.compile_into(tmp_path / "built")
    assert ctypes.PyDLL(str(newer)).answer() == 43
    assert set((tmp_path / "built").iterdir()) == {first, newer}, "checkouts may share it; nothing half made stays"


@needs_compiler
def test_what_does_not_compile_says_why_and_leaves_nothing(
    sources: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sources / "one.cpp").write_text("int broken(")
    assert build.main() == 0, "the install goes on"
    said = capsys.readouterr().err
    assert "one.cpp" in said
    assert "plain Python are used" in said
    assert not list((tmp_path / "built").iterdir())


def test_without_a_compiler_the_install_goes_on(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main() == 0
    assert "no-such-compiler" in capsys.readouterr().err


def test_what_cannot_be_used_is_said_in_one_line(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "built").mkdir()
    (tmp_path / "built" / library.file_name()).write_bytes(b"not a library")
    assert "does not load" in library.find()[1]
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.find() == (None, "KVMESH_NATIVE=0")
    monkeypatch.setattr(library, "_found", library.find)
    with caplog.at_level(logging.INFO):
        library.tell()
    [record] = caplog.records
    assert "KVMESH_NATIVE=0" in record.getMessage()


@settings(deadline=None)
@given(st.data())
def test_promises_are_the_same_with_and_without_native_code(data: st.DataObject) -> None:
    """Whatever is placed, confirmed, withdrawn and announced; keys may come twice in a prompt."""
    both = Pending(), Pending()
    capacities = [data.draw(st.integers(1, 60)), 400]
    for one in both:
        for capacity in capacities:
            one.open(capacity)
    pool = [bytes([i]) * 16 for i in range(60)]
    for step in range(data.draw(st.integers(1, 12))):
        slot = data.draw(st.integers(0, 1))
        some = tuple(data.draw(st.lists(st.sampled_from(pool), max_size=45)))
        lacks = data.draw(st.none() | st.binary(min_size=len(some), max_size=len(some)).map(_ones))
        does = data.draw(st.sampled_from(["place", "place", "confirm", "withdraw", "arrived"]))
        for one, native in zip(both, (walks.functions(), None), strict=True):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pending, "functions", lambda native=native: native)
                if does == "place":
                    one.put(slot, some, f"r{step % 3}", 0.0, lacks)
                elif does == "confirm":
                    one.put(slot, some, None, float(step), lacks)
                elif does == "withdraw":
                    one.withdraw(slot, some, f"r{step % 3}")
                else:
                    one.arrived(slot, some)
        assert both[0]._masks == both[1]._masks
        for mine, other in zip(both[0]._slots.values(), both[1]._slots.values(), strict=True):
            assert list(mine.held.items()) == list(other.held.items())
            assert (mine.blocks, list(mine.confirmed.items())) == (other.blocks, list(other.confirmed.items()))


def _ones(raw: bytes) -> bytes:
    return bytes([one & 1 for one in raw])
