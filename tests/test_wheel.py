"""What the wheel puts into site-packages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.support.paths import ROOT

PARTS = ("pyproject.toml", "README.md", "LICENSE", "kvmesh", "services", "examples")


def test_the_wheel_takes_one_name_and_answers_alone(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    copied = ["cp", "-r", "--no-dereference", *(str(ROOT / part) for part in PARTS), str(source)]
    subprocess.run(copied, check=True, timeout=60)  # setuptools writes beside its sources
    for folder in list(source.rglob("__pycache__")):
        shutil.rmtree(folder)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"  # as pip does
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=source, check=True, timeout=110, stdout=subprocess.DEVNULL
    )
    (wheel,) = tmp_path.glob("kvmesh-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"kvmesh"}
    where = "import kvmesh.services.gateway.main as m, kvmesh.cli.app; print(m.__file__)"
    environment = os.environ | {"PYTHONPATH": str(site)}
    ran = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(site / "kvmesh/services/gateway/main.py")
