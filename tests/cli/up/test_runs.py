"""Run folders and the model argument."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvmesh.cli import models, runs
from kvmesh.errors import ConfigError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "state" / "kvmesh"


def test_runs_of_one_second_have_folders_of_their_own_and_old_ones_go(state: Path) -> None:
    alive = runs.new_run_dir()
    (alive / "mesh.json").write_text(json.dumps({"pid": os.getpid()}))
    os.utime(alive, (0, 0))
    made = [runs.new_run_dir() for _ in range(runs.KEPT_RUNS + 3)]
    assert made[0] != made[1]
    left = list((state / "runs").iterdir())
    assert len(left) == runs.KEPT_RUNS + 1, "the last ones, and the one that still runs"
    assert alive in left
    assert made[-1] in left


def test_latest_names_the_run_that_started_last() -> None:
    with pytest.raises(ConfigError, match="no mesh was started here yet"):
        runs.find(None)
    for pid in (os.getpid(), 0):
        folder = runs.new_run_dir()
        (folder / "mesh.json").write_text(json.dumps({"pid": pid, "url": f"http://{pid}"}))
        runs.point_latest(folder)
        assert runs.find(None).run_dir == folder.resolve()
        assert runs.find(folder).running is bool(pid)
    running, stopped = sorted((runs.state_dir() / "runs").iterdir())
    with pytest.raises(ConfigError, match=f"{stopped} has stopped: that of {running} runs at http://.*--run-dir"):
        runs.find_running(None)
    for asked in (stopped, None):
        (running / "mesh.json").write_text(json.dumps({"pid": 0 if asked is None else os.getpid()}))
        with pytest.raises(ConfigError, match=f"{stopped} has stopped: start one with `kvmesh up`"):
            runs.find_running(asked)


def test_a_folder_without_a_mesh_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no mesh\.json"):
        runs.find(tmp_path)


def test_a_model_is_a_folder_with_a_config(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "good").mkdir()
    (tmp_path / "good" / "config.json").write_text("{}")
    assert models.resolve(str(tmp_path / "good")) == (tmp_path / "good").resolve()
    for name, why in (("empty", "holds no config.json"), ("file", "is a file"), ("none", "no such folder")):
        with pytest.raises(ConfigError, match=why):
            models.resolve(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"model='\./none': no such folder"):
        models.resolve("./none")
    with pytest.raises(ConfigError, match="no such folder"):
        models.resolve("not a/hub id/at all")


def test_no_model_is_the_demo_model() -> None:
    assert (models.resolve("") / "config.json").is_file()


def test_a_hub_id_without_a_network_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match="model='some-org/some-model': no such folder, not in the hub's cache"
    ) as caught:
        models.resolve("some-org/some-model")
    assert "\n" not in caught.value.message
