"""`kvmesh doctor --peer` and `--listen`: real processes on loopback and, where root, in network namespaces."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import pytest

from kvmesh.cli import doctor_matrix, doctor_peer
from kvmesh.cli.console import console
from kvmesh.cli.doctor_matrix import Cell, Figure, Outcome
from kvmesh.rpc.errors import ConfigError
from tests.transfer.networks import networks

QUICK = ("--size-mb", "2", "--seconds", "0.01", "--timeout-s", "10")
CORRUPT = '{"seed": 1, "rules": [{"kind": "corrupt", "op": "%s"}]}'


def doctor(*words: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*within, sys.executable, "-m", "kvmesh.cli", "doctor", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120", "TERM": "dumb"},
    )


class Listener:
    def __init__(self, host: str, within: Sequence[str] = (), *words: str) -> None:
        words = ("--listen", "0", "--host", host, "--token", "secret", "--timeout-s", "10", *words)
        self.process = doctor(*words, within=within)
        assert self.process.stdout is not None
        shown = self.until("Ctrl-C ends it.")
        found = re.search(r"--peer (\S+) --token secret", shown)
        assert found, shown
        self.peer = found[1]

    def until(self, words: str) -> str:
        assert self.process.stdout is not None
        shown = ""
        for line in self.process.stdout:
            shown += line
            if words in line:
                return shown
        raise AssertionError(f"never said {words!r}: {shown}")

    def call(self, *words: str, token: str = "secret", within: Sequence[str] = ()) -> tuple[int, str]:
        process = doctor("--peer", self.peer, "--token", token, *QUICK, *words, within=within)
        shown, _ = process.communicate(timeout=60)
        return process.returncode, shown

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        shown, _ = self.process.communicate(timeout=20)
        assert (self.process.returncode, shown.strip().splitlines()[-1]) == (0, "stopped"), shown


@contextmanager
def listening(host: str = "127.0.0.1", within: Sequence[str] = (), *words: str) -> Iterator[Listener]:
    made = Listener(host, within, *words)
    try:
        yield made
        made.end()
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.communicate()


# ── loopback ──────────────────────────────────────────────────────────────────────────────────────


def test_every_transport_of_one_host() -> None:
    with listening() as other:
        code, shown = other.call("--transports", "shm,tcp")
        assert code == 0, shown
        for transport in ("shm", "tcp"):
            assert re.search(rf"^{transport} +write \d+\.\d\d, read \d+\.\d\d GB/s$", shown, re.M), shown
        assert "✓ every byte was right on 2 pairs (shm, tcp)" in shown
        other.until("is done")

        code, shown = other.call("--json")
        told = json.loads(shown)
        assert (code, told["ok"], told["peer"]) == (0, True, other.peer)
        by_name = {one["transport"]: one for one in told["transports"]}
        assert by_name["tcp"]["cells"][0]["read"]["gb_per_s"] > 0
        assert set(by_name) == {"rdma", "shm", "tcp"}
        assert bool(by_name["rdma"]["cells"]) != bool(by_name["rdma"]["why_not"]), "one or the other"


def test_ipv6() -> None:
    with listening("::1") as other:
        port = other.peer.rpartition(":")[2]
        other.peer = f"[::1]:{port}"
        code, shown = other.call("--transports", "tcp")
        assert code == 0, shown


@pytest.mark.parametrize(
    ("op", "words"), [("write", "wrong bytes arrived there"), ("read", "wrong bytes arrived here")]
)
def test_wrong_bytes_are_seen(op: str, words: str) -> None:
    with listening() as other:
        code, shown = other.call("--transports", "tcp", "--fault", CORRUPT % op)
        assert code == 1
        assert words in shown
        assert "✗ 1 of 1 pairs failed (tcp)" in shown


def test_a_transport_that_only_one_has() -> None:
    with listening("127.0.0.1", (), "--transports", "tcp") as other:
        code, shown = other.call("--transports", "shm,tcp")
        assert code == 1, "shm had been asked for"
        assert "shm  failed: there: 'shm' is not among its transports: tcp" in shown
        assert re.search(r"^tcp +write \d", shown, re.M)
        code, shown = other.call("--nics", "nope0", "--transports", "tcp")
        assert code == 1
        assert "tcp  failed: here: nics='nope0'" in shown


def test_errors_in_plain_words() -> None:
    with listening() as other:
        code, shown = other.call(token="wrong")
        assert (code, "error: the token is wrong: use the one that" in shown) == (1, True)
        other.until("came with a wrong token")
        with socket.create_connection(("127.0.0.1", int(other.peer.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            other.until("what answers there is no kvmesh doctor")
    code, shown = other.call()
    assert (code, "error: nothing listens at 127.0.0.1:" in shown) == (1, True), shown
    with socket.create_server(("127.0.0.1", 0)) as mute:
        other.peer = f"127.0.0.1:{mute.getsockname()[1]}"
        code, shown = other.call("--timeout-s", "0.5")
        assert (code, "no answer within 0.5 s" in shown) == (1, True), shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--peer", "a:b:c:d", "--listen"), "give one of them"),
        (("7040",), "port=7040: only --listen takes one"),
        (("--peer", "host:0"), "peer='host:0': must be HOST or HOST:PORT"),
        (("--peer", "host", "--transports", "smoke"), "transports='smoke': not one of"),
        (("--listen", "--host", "256.1.1.1"), "port=7040: cannot listen on 256.1.1.1"),
    ],
)
def test_bad_options(words: tuple[str, ...], expected: str) -> None:
    process = doctor(*words)
    shown, _ = process.communicate(timeout=20)
    assert (process.returncode, expected in shown) == (2, True), shown


def test_addresses() -> None:
    for text, found in (
        ("h", ("h", 7040)), ("h:1", ("h", 1)), ("::1", ("::1", 7040)), ("[::1]", ("::1", 7040)),
        ("[fd00::2]:9", ("fd00::2", 9)),
    ):  # fmt: skip
        assert doctor_peer.parse_peer(text) == found
    for bad in ("", ":1", "h:", "h:x", "h:70000", "[::1]x"):
        with pytest.raises(ConfigError):
            doctor_peer.parse_peer(bad)


def test_a_caller_that_is_interrupted_leaves_the_listener_free() -> None:
    with listening() as other:
        words = ("--transports", "tcp", "--seconds", "30")
        first = doctor("--peer", other.peer, "--token", "secret", *QUICK, *words)
        other.until(": tcp")
        code, shown = other.call()
        assert (code, "busy with another caller" in shown) == (1, True), shown
        first.send_signal(signal.SIGINT)
        shown, _ = first.communicate(timeout=20)
        assert (first.returncode, "Traceback" in shown) == (130, False), shown
        other.until("hung up")
        assert other.call("--transports", "tcp")[0] == 0


def test_a_listener_that_freezes_is_given_up() -> None:
    with listening() as other:
        words = ("--transports", "tcp", "--seconds", "30", "--timeout-s", "1")
        caller = doctor("--peer", other.peer, "--token", "secret", *QUICK, *words)
        other.until(": tcp")
        other.process.send_signal(signal.SIGSTOP)
        shown, _ = caller.communicate(timeout=30)
        other.process.send_signal(signal.SIGCONT)
        assert caller.returncode == 1
        assert "no answer within 1 s" in shown
        assert "Traceback" not in shown


# ── several NICs ──────────────────────────────────────────────────────────────────────────────────


def test_every_pair_of_nics() -> None:
    with networks() as made:
        made.wire("eth1", {"a": ["10.7.1.1/24"], "b": ["10.7.1.2/24"]})
        made.wire("eth2", {"a": ["10.7.2.1/24"], "b": ["10.7.2.2/24"]})
        here, there = (("ip", "netns", "exec", made.name(host)) for host in ("a", "b"))
        with listening("10.7.1.2", there) as other:
            code, shown = other.call("--transports", "tcp", "--json", "--timeout-s", "2", within=here)
            (tcp,) = json.loads(shown)["transports"]
            works = {
                (cell["local"], cell["remote"])
                for cell in tcp["cells"]
                if cell["write"]["gb_per_s"] > 0 and cell["read"]["gb_per_s"] > 0
            }
            assert code == 0, shown
            assert {("eth1", "eth1"), ("eth2", "eth2")} <= works
            assert (tcp["locals"], tcp["remotes"]) == (["eth1", "eth2"], ["eth1", "eth2"])

            made.ip("b", "link", "set", "eth2", "down")
            code, shown = other.call("--transports", "tcp", "--timeout-s", "2", within=here)
            assert code in (0, 1)
            assert re.search(r"^eth1 +\d+\.\d\d", shown, re.M), shown
            assert not re.search(r"^eth2 +\S+ +\d+\.\d\d", shown, re.M), shown


# ── the screen ────────────────────────────────────────────────────────────────────────────────────


def outcome(names: Sequence[str], **errors: str) -> Outcome:
    cells = []
    for local, remote in product(names, names):
        bad = errors.get(local, "")
        figure = Figure(error=bad) if bad else Figure(48.123)
        cells.append(Cell(local, remote, False, figure, Figure(47.0)))
    return Outcome("rdma", tuple(cells), locals=tuple(names), remotes=tuple(names))


def shown(what: Outcome, width: int) -> str:
    out = console()
    out.width, out.soft_wrap, out.file = width, False, io.StringIO()
    out.print(doctor_matrix.screen(what, width))
    text = out.file.getvalue()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "…" not in text
    return text


def test_eight_by_eight_at_80_and_120_columns() -> None:
    eight = outcome([f"mlx5_{n}" for n in range(8)], mlx5_3="transport retry counter exceeded")
    wide, narrow = shown(eight, 120), shown(eight, 80)
    assert re.search(r"^ +mlx5_0 +mlx5_1 .* mlx5_7$", wide, re.M)
    assert len(re.findall(r"^mlx5_0( +48\.12){8}$", wide, re.M)) == 1
    assert len(re.findall(r"^mlx5_3( +✗ \(1\)){8}$", wide, re.M)) == 1
    assert "(1) mlx5_3 → mlx5_0, mlx5_3 → mlx5_1, mlx5_3 → mlx5_2, mlx5_3 → mlx5_3 and 4 more: transport retry" in wide
    assert len(re.findall(r"^mlx5_0( +48\.12){8}$", narrow, re.M)) == 1, narrow


def test_long_names_become_numbers() -> None:
    text = shown(outcome([f"enp{n}29s0f0np{n}" for n in range(8)]), 80)
    assert re.search(r"^ +1 +2 +3 +4 +5 +6 +7 +8$", text, re.M)
    assert "columns: 1 enp029s0f0np0, 2 enp129s0f0np1," in text
    assert len(re.findall(r"^enp029s0f0np0( +48\.12){8}$", text, re.M)) == 1


def test_what_counts_as_a_failure() -> None:
    bad = Figure(error="no")
    detour = Cell("a", "b", True, bad, bad)
    straight = Cell("a", "a", False, Figure(1.0), Figure(1.0))
    assert not Outcome("tcp", (detour, straight), wanted=True).failed
    assert Outcome("tcp", (detour,), wanted=True).failed
    assert not Outcome("rdma", why_not="no device").failed
    assert Outcome("rdma", why_not="no device", wanted=True).failed
    assert doctor_matrix.summary([Outcome("rdma", why_not="x")]).startswith("nothing could be tried")
    assert "– (1)" in re.sub(r"–\(", "– (", shown(Outcome("tcp", (detour, straight)), 80))
