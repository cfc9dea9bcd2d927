"""Secrets reach a process by its environment, not by its arguments, and only one that needs them (finding 9); what a
run keeps is its owner's alone (finding 19)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmesh.cli import runs
from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.config import load
from kvmesh.errors import ConfigError
from kvmesh.leader.redis_lease import check_url
from kvmesh.private_files import private_folder, private_opener
from kvmesh.services.conductor.config import ConductorConfig

SECRET = "hunter2-s3cret"
REDIS = f"redis://mesh:{SECRET}@127.0.0.1:6399/0"
COLLECTOR = f"https://me:{SECRET}-otlp@127.0.0.1:4317"


def planned(tmp_path: Path, **more: object) -> list[plan.ProcessSpec]:
    settings = MeshSettings(
        model="examples/demo-model", masters=2, conductors=2, pool=1, coupled=1, http_port=0, grpc_port=0,
        conductor_port=0, store_port=0, run_dir=str(tmp_path), **more,
    )  # fmt: skip
    return list(plan.plan(settings, tmp_path, plan.Ports()))


def test_no_argument_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_REDIS", REDIS)  # as the user gives it: every child would inherit it
    specs = planned(tmp_path, redis=REDIS, otlp_endpoint=COLLECTOR)
    assert {spec.service for spec in specs} >= {"store", "conductor", "gateway", "prefill", "decode", "coupled", "pool"}
    for spec in specs:
        assert SECRET not in " ".join(spec.argv), spec.name
        assert spec.env.get("KVMESH_REDIS") == (REDIS if spec.service in ("store", "conductor") else None)
        assert spec.env["KVMESH_OTLP_ENDPOINT"] == COLLECTOR


def test_a_refused_url_is_told_without_its_password() -> None:
    for env in ({"KVMESH_REDIS": f"http://u:{SECRET}@h"}, {"KVMESH_SLO_TTFT_MS": REDIS}):
        with pytest.raises(ConfigError) as caught:
            check_url(load(ConductorConfig, {}, toml=None, env=env).redis)
        assert SECRET not in caught.value.message
    with pytest.raises(ConfigError) as caught:
        MeshSettings(join="10.0.0.1", redis=REDIS)
    assert SECRET not in caught.value.message and "redis://mesh:***@127.0.0.1:6399/0" in caught.value.message


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_run_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        (tmp_path / "kvmesh" / "runs").mkdir(parents=True, mode=0o755)
        made = runs.new_run_dir()
        assert mode(made) == mode(made.parent) == 0o700
        private_folder(made / "logs" / "deep")
        assert mode(made / "logs" / "deep") == 0o700
        with open(made / "one.log", "ab", opener=private_opener):
            assert mode(made / "one.log") == 0o600
        (made / "old.log").touch(mode=0o644)
        with open(made / "old.log", "ab", opener=private_opener):
            assert mode(made / "old.log") == 0o600
    finally:
        os.umask(before)


def test_a_folder_that_existed_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    settings = MeshSettings(model="examples/demo-model", run_dir=str(folder))
    script = plan.ProcessSpec(
        "one", "prefill", "", "", "", ("/bin/true",), {}, folder / "logs" / "one.log", folder / "ready" / "x"
    )
    mesh = Mesh(settings, [script])
    mesh.start()
    mesh.stop()
    for path in (folder, folder / "logs", folder / "traces", folder / "ready"):
        assert mode(path) == 0o700
    for path in (folder / "mesh.json", folder / "logs" / "one.log"):
        assert mode(path) == 0o600
