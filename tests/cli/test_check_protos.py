"""The lock on released fields notices what it must."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import check_protos


@pytest.fixture
def locked() -> dict[str, str]:
    return check_protos.describe(check_protos.load_files())


def test_the_lock_file_is_true_and_complete() -> None:
    assert check_protos.main([]) == 0


@pytest.mark.parametrize(
    ("key", "meaning", "told"),
    [
        ("kvmesh.v1.Landing.2", "handoff_epoch uint64", "take a new number"),
        ("kvmesh.v1.Landing.2", "epoch fixed64", "take a new number"),
        ("kvmesh.v1.Landing.77", "old_field bytes", "reserve its number"),
        ("kvmesh.v1.Role=1", "ROLE_DECODE", "take a new number"),
        ("kvmesh.v1.Decode/Session", "kvmesh.v1.A -> kvmesh.v1.B", "take a new number"),
    ],
)
def test_a_changed_or_removed_meaning_is_told(locked: dict[str, str], key: str, meaning: str, told: str) -> None:
    found = dict(locked)
    (line,) = check_protos.compare({**locked, key: meaning}, found, set())
    assert line.startswith(key)
    assert told in line


def test_a_reserved_number_may_go(locked: dict[str, str]) -> None:
    assert check_protos.compare({"kvmesh.v1.Landing.77": "old bytes"}, locked, {"kvmesh.v1.Landing.77"}) == []


def test_update_locks_additions_and_refuses_changes(
    tmp_path: Path, locked: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "fields.lock"
    assert check_protos.main(["--lock", str(lock)]) == 1
    assert "not locked yet" in capsys.readouterr().err
    assert check_protos.main(["--lock", str(lock), "--update"]) == 0
    assert check_protos.read_lock(lock.read_text()) == locked
    lock.write_text(lock.read_text().replace("handoff_epoch fixed64", "handoff_epoch uint64"))
    before = lock.read_text()
    assert check_protos.main(["--lock", str(lock), "--update"]) == 1
    assert lock.read_text() == before
