"""What pages tell a reader to type: every `kvmesh` line of README and docs is understood by the command line, every
`make` target exists, and the commands of README and quickstart run as they stand there against a live mesh."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from kvmesh.cli.app import app
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.config import load
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts)]
OWN = re.compile(r'^(\w+) = "[\w.]+:\w+"', re.MULTILINE)  # what a page has its reader install by an entry point
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
RUNS = re.compile(r"<!-- runs: (\w+) -->\n```(\w+)\n(.*?)```", re.DOTALL)
SHELL = {"", "bash", "sh"}
READY_S = 150.0


# ── understood ───────────────────────────────────────────────────────────────────────────────────────────────────────


def commands(page: Path) -> Iterator[str]:
    """Lines of the page's code blocks that begin with kvmesh, without comments."""
    for _, language, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if language not in SHELL:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"\s&&\s|\s\|\s|;\s", re.sub(r"\s#\s.*", "", line).strip()):
                bare = part.removeprefix(".venv/bin/")
                if bare.startswith("kvmesh ") and "..." not in bare:
                    yield bare.strip(" &")


@functools.cache
def tree() -> Any:
    """The command line, as its library builds it."""
    return typer.main.get_command(app)


def parsed(line: str) -> tuple[str, dict[str, Any]]:
    """The command that the line names, and its parameters. Raises what the command line would say of it."""
    words = [word for word in shlex.split(line) if not word.startswith("$")][1:]
    command, names = tree(), ["kvmesh"]
    while hasattr(command, "commands") and not words[0].startswith("-"):
        name = words.pop(0)
        assert name in command.commands, f"{line}: no command {name!r}"
        command = command.commands[name]
        names.append(name)
    context = command.make_context(" ".join(names), words)
    return " ".join(names), dict(context.params)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    wrong, own = [], set(OWN.findall(page.read_text(encoding="utf-8")))
    for line in set(commands(page)):
        if own & set(re.findall(r"\w+", line)):
            continue
        try:
            name, given = parsed(line)
            if name == "kvmesh up":
                known = {field: value for field, value in given.items() if field in MeshSettings.__dataclass_fields__}
                load(MeshSettings, {key: value for key, value in known.items() if value is not None}, toml=None, env={})
        except Exception as error:  # typer brings a click of its own: its classes have no name that stays
            wrong.append(f"{line}: {getattr(error, 'message', error)}")
    assert not wrong


def test_a_wrong_command_is_noticed() -> None:
    assert parsed("kvmesh chat -m Hello")[1]["message"] == "Hello"
    with pytest.raises(Exception, match=r"[Nn]o such option"):
        parsed("kvmesh status --no-such-option")
    assert sum(len(set(commands(page))) for page in PAGES) > 150


def test_every_make_target_that_a_page_names_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set()
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        code = "\n".join(block for _, _, block in FENCED.findall(text))
        named |= set(re.findall(r"`make ([a-z][\w-]*)", text)) | set(
            re.findall(r"^make ([a-z][\w-]*)", code, re.MULTILINE)
        )
    assert {"up", "test", "docs"} <= named <= targets


# ── run ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def blocks(page: str) -> dict[str, tuple[str, str]]:
    """Blocks that are marked as run, by name: language, text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return {name: (language, code) for name, language, code in RUNS.findall(text)}


@dataclass
class Live:
    """A mesh of `kvmesh up`, and a shell in which `kvmesh` and `python` are this checkout's."""

    url: str
    env: dict[str, str]
    folder: Path

    def bash(self, text: str) -> str:
        """Runs a block as it stands there, but for the address and the line that enters the environment."""
        text = text.replace("http://127.0.0.1:8000", self.url)
        text = "\n".join(line for line in text.splitlines() if not line.startswith("source "))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def shell(folder: Path) -> dict[str, str]:
    """An environment whose `kvmesh` is this checkout's, with a state folder of its own."""
    (folder / "bin").mkdir()
    script = folder / "bin" / "kvmesh"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvmesh.cli "$@"\n')
    script.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    told = {"PATH": path, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "COLUMNS": "160"}
    return {**os.environ, **told, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("pages")
    env, log = shell(folder), folder / "up.log"
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "conductor", "store")]
    with log.open("w") as out:
        up = subprocess.Popen(
            ["kvmesh", "up", "--memory-mb=32", *ports], env=env, cwd=folder, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + READY_S
        while "Ctrl-C stops everything" not in log.read_text():
            assert up.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.2)  # a poll of another process's output, bounded
        found = re.search(r"http://127\.0\.0\.1:\d+(?=/v1)", log.read_text())
        assert found is not None
        yield Live(found[0], env, folder)
    finally:
        up.send_signal(signal.SIGINT)
        try:
            up.wait(40)
        finally:
            up.kill()


@pytest.mark.mesh
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("page", "name", "shown"),
    [
        ("docs/quickstart.md", "laptop", "The code of Mira is 4821"),
        ("docs/quickstart.md", "curl", '"usage"'),
        ("docs/quickstart.md", "python", "CompletionUsage"),
        ("README.md", "look", "The code of Mira is 4821"),
    ],
)
def test_commands_of_a_page_run(live: Live, page: str, name: str, shown: str) -> None:
    language, code = blocks(page)[name]
    if language == "python":
        script = live.folder / "page.py"
        script.write_text(code.replace("http://127.0.0.1:8000", live.url))
        code = f"{sys.executable} {script}"
    assert shown in live.bash(code)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_commands_that_need_no_mesh_run(tmp_path: Path) -> None:
    shown = Live("", shell(tmp_path), tmp_path).bash(blocks("README.md")["sim"][1])
    assert "70,272" in shown and (tmp_path / "run" / "report.html").exists()


def test_every_marked_block_is_run() -> None:
    """A mark that no test knows would be a block that nobody runs."""
    named = {(page, name) for page in ("README.md", "docs/quickstart.md") for name in blocks(page)}
    assert named == {
        ("docs/quickstart.md", "laptop"),
        ("docs/quickstart.md", "curl"),
        ("docs/quickstart.md", "python"),
        ("README.md", "look"),
        ("README.md", "sim"),
    }
