"""The harness on the host: a job ends, its words come back, nothing stays; the tests are reported one by one."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.rdma.guest import REPOSITORY, GuestUnavailable, prepare, run_in_guest

SUITE = """
    import ctypes
    import pytest

    @pytest.mark.parametrize("n", [1, 2])
    def test_good(n):
        print("seen")

    def test_wrong():
        assert 1 + 1 == 3, "arithmetic"

    @pytest.mark.skip(reason="not today")
    def test_skipped():
        pass

    def test_left_out():
        raise AssertionError("it was not selected")

    def test_ends_the_process():
        ctypes.string_at(0)

    def test_after_the_end():
        pass
"""


@pytest.fixture(autouse=True)
def _guest() -> None:
    try:
        prepare()
    except GuestUnavailable as unavailable:
        pytest.skip(f"no RDMA guest: {unavailable}")


def processes_of(marker: str) -> list[str]:
    """Command lines on this host that hold the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if marker in line:
                found.append(line)
    return found


def test_a_jobs_output_and_status_come_back_and_its_files_do_not(tmp_path: Path) -> None:
    lost, kept, out = tmp_path / "lost", tmp_path / "out" / "kept", tmp_path / "out"
    out.mkdir()
    script = f"seq 100000; echo a >{lost}; echo \"$MARK\" >{kept}; printf '\\tend' >&2; exit 7"
    done = run_in_guest(["bash", "-c", script], timeout_s=30, out_dir=out, env={"MARK": "it's $here"})
    assert done.rc == 7
    assert done.output == "".join(f"{n}\n" for n in range(1, 100001)) + "\tend"
    assert kept.read_text() == "it's $here\n"
    assert not lost.exists()


def test_a_job_over_its_limit_is_ended_with_its_output_so_far(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = run_in_guest(["bash", "-c", "echo begun; sleep 1000"], timeout_s=1, out_dir=tmp_path)
    assert done.rc == 124
    assert done.output.startswith("begun\n")
    assert time.monotonic() - begun < 30
    assert processes_of(f"kvmesh.out={tmp_path}") == []


def test_a_guest_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "tests.support.rdma.guest",
        "--out",
        str(tmp_path),
        "bash",
        "-c",
        "echo up; sleep 1000",
    ]
    env = os.environ | {"TMPDIR": str(tmp_path)}  # for what a killed process cannot remove
    with subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, env=env) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        assert len(processes_of(f"kvmesh.out={tmp_path}")) > 0
        starter.kill()
    deadline = time.monotonic() + 20
    while left := processes_of(f"kvmesh.out={tmp_path}"):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.slow
def test_devices_can_have_ipv6_addresses_only() -> None:
    script = "cat /sys/class/infiniband/rx*/ports/1/gids/* | sort -u; ip -4 -br addr show dev nica2"
    done = run_in_guest(["bash", "-c", script], timeout_s=30, rails=3, ipv6_only=True)
    assert done.rc == 0, done.output
    gids = done.output.split()
    assert "fd90:0002:0000:0000:0000:0000:0000:0002" in gids
    assert not any(gid.startswith("0000:0000:0000:0000:0000:ffff") for gid in gids)
    assert "10.90" not in done.output


def test_perftest_measures_between_the_sides() -> None:
    script = (
        "ib_write_bw -d rxb0 -x 1 -s 65536 -n 200 >/dev/null 2>&1 & "
        "until ss -Hltn sport = :18515 | grep -q LISTEN; do sleep 0.05; done; "
        "ib_write_bw -d rxa0 -x 1 -s 65536 -n 200 10.90.0.2"
    )
    done = run_in_guest(["bash", "-c", script], timeout_s=60)
    if "Correlation coefficient" in done.output:
        pytest.skip("perftest could not measure its own clock, which takes a CPU that nothing else uses meanwhile")
    assert done.rc == 0, done.output
    row = next(line.split() for line in done.output.splitlines() if line.split()[:2] == ["65536", "200"])
    assert float(row[3]) > 0, done.output  # MB/s


@pytest.mark.slow
def test_tests_in_the_guest_are_reported_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "conftest.py").write_text("from tests.rdma.conftest import *\n")
    (tmp_path / "inside" / "test_it.py").write_text(textwrap.dedent(SUITE))
    (tmp_path / "inside" / "test_more.py").write_text("def test_reported_after_some_were_not(): pass\n")
    (tmp_path / "test_outside.py").write_text("def test_outside(): pass\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path}/results.xml"]
    argv += [f"--rootdir={tmp_path}", "-c", str(REPOSITORY / "pyproject.toml"), "-k", "not left_out", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # it has its own options
    env["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run(argv, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=90)
    assert done.returncode == 1, done.stdout + done.stderr
    results = {}
    for case in ElementTree.parse(tmp_path / "results.xml").iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "skipped", "error")), "passed")
        results[case.get("name")] = outcome
    assert results == {
        "test_good[1]": "passed",
        "test_good[2]": "passed",
        "test_wrong": "failure",
        "test_skipped": "skipped",
        "test_ends_the_process": "failure",
        "test_after_the_end": "failure",
        "test_reported_after_some_were_not": "passed",
        "test_outside": "passed",
    }
    assert "arithmetic" in done.stdout
    assert "did not report it" in done.stdout and "Fatal Python error: Segmentation fault" in done.stdout
    assert "1 skipped" in done.stdout and "4 passed" in done.stdout and "3 failed" in done.stdout
