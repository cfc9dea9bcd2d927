"""The package that a page of docs/howto has its reader write: its files, and what `pip install .` makes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT


def files_of(page: str) -> dict[str, str]:
    """The files of that page, word for word, by name."""
    return dict(re.findall(r"`([a-z_.]+)`\n\n```[a-z]+\n(.*?)```", (ROOT / "docs/howto" / page).read_text(), re.DOTALL))


def install(files: dict[str, str], folder: Path, more: tuple[str, ...] = ()) -> None:
    """Writes modules and a dist-info folder that has the page's entry point, and `more` of its group."""
    for name, code in files.items():
        (folder / name).write_text(code)
    points = re.search(r'entry-points."(.*)"\]\n(.*) = "(.*)"', files["pyproject.toml"])
    assert points is not None
    group, name, value = points.groups()
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", f"{name} = {value}", *more, ""]))


def its_test_passes(files: dict[str, str], folder: Path) -> None:
    """AssertionError unless the page's own test passes, in a process that finds the package beside kvmesh."""
    (test,) = [name for name in files if name.startswith("test_")]
    module = test.removeprefix("test_")
    assert set(files) == {module, "pyproject.toml", test}
    assert f'py-modules = ["{module.removesuffix(".py")}"]' in files["pyproject.toml"], "setuptools takes one module"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=folder, env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": ""}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
