"""A mesh on a Redis with a password: nobody but the processes that need it can read it (findings 9 and 19)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.up.test_secrets import mode
from tests.support.redis_server import needs_redis, redis_server

SECRET = "hunter2-s3cret"


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += [int(child) for child in task.read_text().split()]
    return found


@pytest.mark.slow
@pytest.mark.mesh
@needs_redis
def test_a_password_is_nowhere(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with redis_server(tmp_path / "redis", SECRET) as redis:
        url = redis.url
        assert SECRET in url
        run_dir = tmp_path / "run"
        env = {**os.environ, "KVMESH_REDIS": url, "XDG_STATE_HOME": str(tmp_path / "state")}
        argv = [
            sys.executable,
            "-m",
            "kvmesh.cli",
            "up",
            "--masters",
            "2",
            "--conductors",
            "2",
            "--run-dir",
            str(run_dir),
        ]
        argv += [f"--{name}-port=0" for name in ("http", "grpc", "conductor", "store")]
        with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
            assert up.stdout is not None
            shown = []
            try:
                for text in up.stdout:
                    shown.append(text)
                    if "Ctrl-C stops everything" in text:
                        break
                children = descendants(up.pid)
                assert len(children) > 6, "".join(shown)
                for pid in children:
                    assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
                for command in (["status"], ["status", "--json"]):
                    told = subprocess.run(
                        [sys.executable, "-m", "kvmesh.cli", *command, "--run-dir", str(run_dir)],
                        env={key: value for key, value in env.items() if key != "KVMESH_REDIS"},
                        capture_output=True, text=True, timeout=120,
                    )  # fmt: skip
                    assert SECRET not in told.stdout + told.stderr
            finally:
                up.terminate()
                shown.append(up.communicate(timeout=60)[0])
        assert SECRET not in "".join(shown)
        files = [path for path in run_dir.rglob("*") if path.is_file()]
        assert any(path.suffix == ".log" for path in files) and any(path.suffix == ".jsonl" for path in files)
        for path in files:
            assert SECRET.encode() not in path.read_bytes(), path
        for path in [run_dir, *(path for path in run_dir.rglob("*") if path.is_dir())]:
            assert mode(path) & 0o077 == 0, path
