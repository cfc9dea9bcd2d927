"""A mesh over two machines, which are network namespaces: `kvmesh up --host` here, `kvmesh up --join` there; KV between
them, a pulled cable, a machine that leaves under load."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh.namespaces import Failed, complete, two_machines, until, why_not
from tests.support.mesh.up import Up

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.mesh,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

LANES = 6
PROMPTS = [[(i * 131 + j * j * 7 + j) % 230 + 20 for j in range(150)] for i in range(LANES)]
HA = ["--conductors=2", "--masters=2", "--redis=auto"] if shutil.which("redis-server") else []


@dataclass
class Mesh:
    """Both machines, and the answers of A alone."""

    a: Up
    b: Up
    url: str
    right: list[str]
    salts: Iterator[int] = field(default_factory=itertools.count)

    def ask(self, index: int) -> Future[str]:
        """From A, with no block of it cached anywhere."""
        return self.a.machine.submit(complete, self.url, PROMPTS[index], f"salt {next(self.salts)}")

    def ask_all(self) -> None:
        asked = [self.ask(i) for i in range(LANES)]
        assert [one.result(60) for one in asked] == self.right


class Load:
    """Requests one after another in each lane until `stop`. `ended`: (began at, index, text or error)."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._stop = mesh, threading.Event()
        self.ended: list[tuple[float, int, str | Exception]] = []
        self._lanes = [threading.Thread(target=self._lane, args=(i,)) for i in range(LANES)]
        for lane in self._lanes:
            lane.start()

    def _lane(self, index: int) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                end: str | Exception = self._mesh.ask(index).result(90)
            except Exception as error:
                end = error
            self.ended.append((began, index, end))

    def began_after(self, moment: float) -> bool:
        """Has every lane ended a request that it began since then?"""
        return {index for began, index, _ in self.ended if began > moment} == set(range(LANES))

    def stop(self) -> None:
        self._stop.set()
        for lane in self._lanes:
            lane.join(100)
            assert not lane.is_alive(), "a request has no end"

    def errors(self, right: list[str]) -> list[Exception]:
        """Asserts that every answer is right."""
        for _, index, end in self.ended:
            assert isinstance(end, Exception) or end == right[index]
        return [end for *_, end in self.ended if isinstance(end, Exception)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("two")
    with two_machines() as (one, other):
        a = Up(one, folder / "a", "--host", one.address, "--node-id=alpha", *HA).ready()
        url = a.told()["url"]
        right = [one.call(complete, url, prompt, "alone") for prompt in PROMPTS]
        b = Up(other, folder / "b", "--join", one.address, "--node-id=beta").ready()
        yield Mesh(a, b, url, right)
        b.stop()
        assert "nothing is left running" in a.stop()


def test_both_say_what_they_are_part_of(mesh: Mesh) -> None:
    a, b = mesh.a.machine, mesh.b.machine
    assert f"kvmesh up --join {a.address}:7001" in mesh.a.printed
    assert f"Joins the mesh of {a.address}:70" in mesh.b.printed
    assert f"beta, others dial it at {b.address}" in mesh.b.printed
    assert set(mesh.b.told()["services"]) == {"prefill-0", "decode-0"}
    for up in (mesh.a, mesh.b):
        code, text = up.call("status")
        assert code == 0, text
        assert "decode-0@alpha" in text and "decode-0@beta" in text


def nothing_wrong(up: Up) -> dict[str, Any] | None:
    """What doctor tells; None: something is wrong just now, as a heartbeat that a busy machine sends too late."""
    code, text = up.call("doctor", "--mesh", "--json")
    told: dict[str, Any] = json.loads(text)
    assert (code == 0) == told["serves"], text
    return told if {one["level"] for one in told["findings"]} <= {"ok", "missing"} else None


def test_doctor_finds_nothing_wrong_from_either(mesh: Mesh) -> None:
    for up, other in ((mesh.a, "beta"), (mesh.b, "alpha")):
        told = until(lambda up=up: nothing_wrong(up), f"nothing wrong at {up.machine.name}")  # type: ignore[misc]
        (machine,) = [one for one in told["findings"] if one["group"] == "machines" and one["what"] == other]
        assert "MTU 1500" in machine["found"] and "tcp" in machine["found"]
        leaders = [one for one in told["findings"] if one["group"] == "conductors" and "leads" in one["found"]]
        assert len(leaders) == bool(HA)


def test_answers_are_those_of_one_machine_and_kv_crosses(mesh: Mesh) -> None:
    def crossed() -> bool:
        mesh.ask_all()
        return mesh.b.tokens() > 0 and mesh.a.over_tcp() + mesh.b.over_tcp() > 0

    until(crossed, "work at B, and KV between the machines")


def test_who_cannot_join_hears_why(mesh: Mesh, tmp_path: Path) -> None:
    where = mesh.a.machine.address
    for args, says in (
        (("--join", where, "--node-id=beta"), "@beta serves in that mesh already"),
        (("--join", where, "--node-id=alpha"), "the machine of 10.78.0.1"),
        (("--join", where, "--dtype=bfloat16"), "has float32"),
        (("--join", f"{where}:1"), "no conductor answers"),
        (("--join", f"{where}:7002"), "is no conductor of kvmesh"),
    ):
        code, text = mesh.b.call("up", *args, f"--run-dir={tmp_path}")
        assert code in (1, 2)
        assert says in text, text
        assert [line[:6] for line in text.splitlines()[1:]] == ["error:"], "one clear line"


def test_a_pulled_cable_loses_no_request_and_b_serves_again(mesh: Mesh) -> None:
    load, before = Load(mesh), mesh.b.tokens()
    until(lambda: mesh.b.tokens() > before, "load at B")
    pulled = time.monotonic()
    mesh.b.machine.link("down")
    try:
        until(lambda: load.began_after(pulled), "answers without B", 60)
    finally:
        mesh.b.machine.link("up")
        load.stop()
    for error in load.errors(mesh.right):
        assert isinstance(error, Failed), repr(error)
        assert str(error)
    again = mesh.b.tokens()

    def serves() -> bool:
        mesh.ask_all()
        return mesh.b.tokens() > again

    until(serves, "B to serve again")


def test_b_leaves_under_load_and_nobody_notices(mesh: Mesh) -> None:
    load, before = Load(mesh), mesh.b.tokens()
    until(lambda: mesh.b.tokens() > before, "load at B")
    printed = mesh.b.stop()
    left = time.monotonic()
    until(lambda: load.began_after(left), "answers without B", 60)
    load.stop()
    assert load.errors(mesh.right) == []
    assert "nothing is left running" in printed
    assert mesh.b.process.returncode == 0
    assert mesh.b.machine.pids() == []
