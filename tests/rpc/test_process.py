"""A service process: it stops on signals and dies with its supervisor. Real processes, told over pipes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CHILD = """
import asyncio, os, sys
from kvmesh.rpc import process
process.follow_supervisor()
async def main(stop):
    print("up", os.getpid(), flush=True)
    await stop.wait()
    print("stopping", flush=True)
    {after}
    print("end", flush=True)
process.run(main, stop_s={stop_s})
"""


@contextmanager
def child(after: str = "pass", stop_s: float = 30) -> Iterator[subprocess.Popen[str]]:
    code = CHILD.format(after=after, stop_s=stop_s)
    one = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield one
    finally:
        one.kill()
        one.communicate()


def line(one: subprocess.Popen[str]) -> str:
    assert one.stdout
    return one.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_service_end(number: signal.Signals) -> None:
    with child() as one:
        assert line(one).startswith("up")
        one.send_signal(number)
        assert (line(one), line(one), one.wait(10)) == ("stopping", "end", 0)


def test_a_second_signal_exits_at_once() -> None:
    with child(after="await asyncio.sleep(60)") as one:
        assert line(one).startswith("up")
        one.terminate()
        assert line(one) == "stopping"
        one.send_signal(signal.SIGINT)
        assert one.wait(10) == 128 + signal.SIGINT


def test_a_service_that_hangs_in_its_end_is_given_up() -> None:
    with child(after="import time; time.sleep(60)", stop_s=0.2) as one:
        assert line(one).startswith("up")
        one.terminate()
        assert line(one) == "stopping"
        assert one.wait(10) == 1
        assert one.stderr
        assert "Current thread" in one.stderr.read()  # where it hung


PARENT = """
import os, subprocess, sys
one = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "KVMESH_PARENT_PID": str(os.getpid())})
one.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's")
def test_kill_nine_of_the_supervisor_leaves_nothing_behind() -> None:
    code = CHILD.format(after="pass", stop_s=30)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, code], stdout=subprocess.PIPE, text=True)
    try:
        pid = int(line(parent).split()[1])
        gone = os.pidfd_open(pid)
        parent.kill()
        readable, _, _ = select.select([gone], [], [], 10)
        os.close(gone)
        if not readable:
            os.kill(pid, signal.SIGKILL)
        assert readable, "the service outlived its supervisor"
    finally:
        parent.kill()
        parent.communicate()


def test_a_supervisor_that_is_gone_already_is_noticed() -> None:
    code = CHILD.format(after="pass", stop_s=30)
    env = {**os.environ, "KVMESH_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_service_may_open_as_many_files_as_its_user() -> None:
    code = """
import resource
from kvmesh.rpc import process
hard = min(2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
process.widen_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    soft, hard, least = map(int, done.stdout.split())
    assert soft == hard == least > 256
