"""`kvmesh doctor --peer` and `--listen`: on loopback and, where root, in network namespaces. Who listens is a real
process, and so is a caller that is stopped or is elsewhere; others call from this process."""

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
from pathlib import Path

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.cli.console import console
from kvmesh.cli.doctor import matrix as doctor_matrix
from kvmesh.cli.doctor import peer as doctor_peer
from kvmesh.cli.doctor.matrix import Cell, Figure, TransportOutcome
from kvmesh.cli.doctor.measure import check_nics, left_out
from kvmesh.cli.doctor.peer import PairProgress
from kvmesh.errors import ConfigError
from tests.support.transfer.networks import networks
from tests.support.transfer.sysfs import two_sockets
from tests.transfer.conftest import until

QUICK = ("--size-mb", "2", "--seconds", "0.01", "--timeout-s", "40")
CORRUPT = '{"seed": 1, "rules": [{"kind": "corrupt", "op": "%s"}]}'


def doctor(*words: str, within: Sequence[str] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*within, sys.executable, "-m", "kvmesh.cli", "doctor", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "120", "TERM": "dumb"},
    )


def asked(*words: str) -> tuple[int, str]:
    """The status of a doctor in this process, and what it shows."""
    done = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "120", "TERM": "dumb"})
    return done.exit_code, done.output


class Listener:
    def __init__(self, host: str, within: Sequence[str] = (), *words: str) -> None:
        words = ("--listen", "0", "--host", host, "--token", "secret", "--timeout-s", "40", *words)
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
        words = ("--peer", self.peer, "--token", token, *QUICK, *words)
        if not within:
            return asked(*words)
        process = doctor(*words, within=within)
        shown, _ = process.communicate(timeout=110)
        return process.returncode, shown

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        shown, _ = self.process.communicate(timeout=60)
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


@pytest.mark.slow
def test_every_transport_of_one_host() -> None:
    with listening() as other:
        code, shown = other.call("--transports", "shm,tcp")
        assert code == 0, shown
        for transport in ("shm", "tcp"):
            assert re.search(rf"^{transport} +write \d+\.\d\d, read \d+\.\d\d GB/s$", shown, re.M), shown
        assert "✓ every byte was right on 2 pairs (shm, tcp)" in shown
        other.until("is done")


@pytest.mark.slow
def test_programs_read_json_over_ipv6_too() -> None:
    with listening("::1") as other:
        other.peer = f"[::1]:{other.peer.rpartition(':')[2]}"
        code, shown = other.call("--json")
        told = json.loads(shown)
        assert (code, told["ok"], told["peer"]) == (0, True, other.peer)
        by_name = {one["transport"]: one for one in told["transports"]}
        assert by_name["tcp"]["cells"][0]["read"]["gb_per_s"] > 0
        assert set(by_name) == {"rdma", "shm", "tcp"}
        assert bool(by_name["rdma"]["cells"]) != bool(by_name["rdma"]["why_not"]), "one or the other"


@pytest.mark.slow
def test_wrong_bytes_are_seen() -> None:
    with listening() as other:
        for op, words in (("write", "wrong bytes arrived there"), ("read", "wrong bytes arrived here")):
            code, shown = other.call("--transports", "tcp", "--fault", CORRUPT % op)
            assert code == 1
            assert words in shown
            assert "✗ 1 of 1 pairs failed (tcp)" in shown


@pytest.mark.slow
def test_a_transport_that_only_one_has() -> None:
    with listening("127.0.0.1", (), "--transports", "tcp") as other:
        code, shown = other.call("--transports", "shm,tcp")
        assert code == 1, "shm had been asked for"
        assert "shm  failed: there: 'shm' is not among its transports: tcp" in shown
        assert re.search(r"^tcp +write \d", shown, re.M)


@pytest.mark.slow
def test_errors_in_plain_words() -> None:
    with listening() as other:
        code, shown = other.call(token="wrong")
        assert (code, "error: the token is wrong: use the one that" in shown) == (1, True)
        other.until("came with a wrong token")
        with socket.create_connection(("127.0.0.1", int(other.peer.rpartition(":")[2]))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert other.call("--transports", "tcp")[0] == 0, "strangers keep nobody out"
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
        (("--peer", "host", "--transports", "smoke"), "transports='smoke': choose one of"),
        (("--listen", "--host", "256.1.1.1"), "port=7040: cannot listen on 256.1.1.1"),
        (("--peer", ""), "peer='': must be HOST or HOST:PORT"),
        (("--nics", "lo"), "nics='lo': only --listen and --peer take any"),
        (("--transports", "tcp"), "transports='tcp': only --listen and --peer take any"),
        (("--peer", "h", "--host", "::1"), "host='::1': only --listen takes one"),
        (("--listen", "--nics", "nope0"), "nics='nope0': not on this host"),
        (("--peer", "h", "--nics", "lo,lo"), "nics='lo,lo': 'lo' is there twice"),
        (
            ("--peer", "h", "--nics", "nope0", "--transports", "tcp"),
            "nics='nope0': not on this host, it has RDMA devices",
        ),
    ],
)
def test_bad_options(words: tuple[str, ...], expected: str) -> None:
    code, shown = asked(*words)
    assert (code, expected in shown) == (2, True), shown


def test_addresses() -> None:
    for text, found in (
        ("h", ("h", 7040)), ("h:1", ("h", 1)), ("::1", ("::1", 7040)), ("[::1]", ("::1", 7040)),
        ("[fd00::2]:9", ("fd00::2", 9)),
    ):  # fmt: skip
        assert doctor_peer.parse_peer(text) == found
    for bad in ("", ":1", "h:", "h:x", "h:70000", "[::1]x"):
        with pytest.raises(ConfigError):
            doctor_peer.parse_peer(bad)


@pytest.mark.slow
def test_a_caller_that_is_interrupted_leaves_the_listener_free() -> None:
    with listening() as other:
        words = ("--transports", "tcp", "--seconds", "30")
        first = doctor("--peer", other.peer, "--token", "secret", *QUICK, *words)
        other.until(": tcp")
        code, shown = other.call()
        assert (code, "busy with another caller" in shown) == (1, True), shown
        first.send_signal(signal.SIGINT)
        shown, _ = first.communicate(timeout=110)
        assert (first.returncode, "Traceback" in shown) == (130, False), shown
        other.until("hung up")
        assert other.call("--transports", "tcp")[0] == 0


@pytest.mark.slow
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


@pytest.mark.slow
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
            # The kernel tells of a lost carrier once a second, and until then the NIC is tried, and fails.
            until(lambda: "state DOWN" in made.ip("a", "link", "show", "eth2"), "carrier of eth2 lost")
            code, shown = other.call("--transports", "tcp", "--timeout-s", "2", within=here)
            assert code in (0, 1)
            assert re.search(r"^eth1 +\d+\.\d\d", shown, re.M), shown
            assert not re.search(r"^eth2 +\S+ +\d+\.\d\d", shown, re.M), shown
            assert code == 0, shown
            assert "not tried: eth2 (no link) here, eth2 (no link) there" in shown
            assert "✓ every byte was right on 1 pair (tcp); 2 NICs not tried" in shown
            other.until("is done")

            code, shown = other.call("--transports", "shm", within=here)
            assert (code, "the two are on one host, in different network namespaces" in shown) == (1, True), shown


def test_a_port_that_is_taken_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        shown, _ = doctor("--listen", str(port), "--host", "127.0.0.1").communicate(timeout=60)
    assert shown.strip() == (
        f"error: port={port}: cannot listen on 127.0.0.1: Address already in use; "
        "kvmesh doctor --listen PORT takes another"
    )


@pytest.mark.slow
def test_a_listener_that_is_stopped_amid_a_call_says_nothing_odd() -> None:
    with listening() as other:
        caller = doctor("--peer", other.peer, "--token", "secret", *QUICK, "--transports", "tcp", "--seconds", "30")
        other.until(": tcp")
        other.process.send_signal(signal.SIGINT)
        told, _ = other.process.communicate(timeout=60)
        shown, _ = caller.communicate(timeout=60)
        assert (other.process.returncode, told.split()) == (0, ["stopped"])
        assert (caller.returncode, "hung up" in shown, "Traceback" in shown) == (1, True, False), shown


# ── what is left out, and progress ────────────────────────────────────────────────────────────────


def test_nics_that_are_left_out(tmp_path: Path) -> None:
    tree = two_sockets(tmp_path)
    tree.rdma("mlx5_1", None, state="1: DOWN")
    tree.net("eth9", tree.root / "sys/devices/pci0000:00", state="down")
    assert left_out("rdma", (), tree.root) == ["mlx5_1 (no link)"]
    missed = left_out("tcp", (), tree.root)
    assert "eth9 (no link)" in missed
    assert "eth8 (no address)" in missed  # not of this process's network
    assert left_out("tcp", ("eth9",), tree.root) == left_out("shm", (), tree.root) == []
    check_nics(("mlx5_0", "eth9"), tree.root)
    with pytest.raises(ConfigError, match="nics='eth77': not on this host, it has RDMA devices mlx5_0, "):
        check_nics(("eth77",), tree.root)


def test_progress_where_there_is_no_terminal() -> None:
    out, err, now = Console(file=io.StringIO()), Console(file=io.StringIO()), [100.0]
    with PairProgress(out, err, quiet=False, clock=lambda: now[0]) as progress:
        progress.begin("shm", 1, 1.0)
        progress.begin("tcp", 9, 9.0)
        for i in range(9):
            now[0] += 2.0
            progress.step("tcp", i, 9, "eth1", "eth2", "write")
    assert isinstance(err.file, io.StringIO)
    assert err.file.getvalue().splitlines() == [
        "tcp: 9 pairs of NICs, 9 s and more",
        "tcp eth1 → eth2: write, pair 3 of 9",
        "tcp eth1 → eth2: write, pair 6 of 9",
        "tcp eth1 → eth2: write, pair 9 of 9",
    ]
    assert isinstance(out.file, io.StringIO)
    assert out.file.getvalue() == ""


def test_progress_on_a_terminal_is_one_line_and_none_in_json() -> None:
    out, err = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    with PairProgress(out, err, quiet=False) as progress:
        progress.step("tcp", 3, 9, "eth1", "eth2", "read")
        assert progress._status is not None
        assert "tcp eth1 → eth2: read, pair 4 of 9" in str(progress._status.status)
    quiet = Console(file=io.StringIO(), force_terminal=True)
    with PairProgress(quiet, err, quiet=True) as progress:
        progress.begin("tcp", 9, 9.0)
    assert isinstance(err.file, io.StringIO)
    assert isinstance(quiet.file, io.StringIO)
    assert err.file.getvalue() == quiet.file.getvalue() == ""


# ── the screen ────────────────────────────────────────────────────────────────────────────────────


def outcome(names: Sequence[str], **errors: str) -> TransportOutcome:
    cells = []
    for local, remote in product(names, names):
        bad = errors.get(local, "")
        figure = Figure(error=bad) if bad else Figure(48.123)
        cells.append(Cell(local, remote, False, figure, Figure(47.0)))
    return TransportOutcome("rdma", tuple(cells), locals=tuple(names), remotes=tuple(names))


def shown(what: TransportOutcome, width: int) -> str:
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
    assert not TransportOutcome("tcp", (detour, straight), wanted=True).failed
    assert TransportOutcome("tcp", (detour,), wanted=True).failed
    assert not TransportOutcome("rdma", why_not="no device").failed
    assert TransportOutcome("rdma", why_not="no device", wanted=True).failed
    assert doctor_matrix.summary([TransportOutcome("rdma", why_not="x")]).startswith("nothing could be tried")
    detours = (Cell("a", "b", True, Figure(2.0), Figure(2.0)), straight)
    assert (
        doctor_matrix.summary([TransportOutcome("tcp", detours)]) == "every byte was right on 1 pair and 1 detour (tcp)"
    )
    screen = shown(TransportOutcome("tcp", detours, locals=("a",), remotes=("a", "b")), 80)
    assert re.search(r"^a +1\.00 +2\.00\*$", screen, re.M)
    assert "*: a detour" in screen
    assert "– (1)" in re.sub(r"–\(", "– (", shown(TransportOutcome("tcp", (detour, straight)), 80))


def test_a_stranger_cannot_send_much() -> None:
    with listening() as other, grpc.insecure_channel(other.peer) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/kvmesh.v1.Doctor/Greet")(bytes(2 << 20), timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
