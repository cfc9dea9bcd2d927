"""The coding agent codex, as npm has it, against a gateway. Set CODEX to its executable; else this is skipped."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.gateway.conftest import MeshMaker
from tests.gateway.rest.test_responses import THOUGHT, reading_mesh
from tests.support.gateway import scripted
from tests.support.gateway.scripted import MODEL, Run

CODEX = os.environ.get("CODEX", "")


@pytest.mark.skipif(not CODEX, reason="CODEX names no executable: npm install @openai/codex")
async def test_codex_runs_a_command(make_mesh: MeshMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted, "MAX_CONTEXT", 1 << 20)  # its instructions are long
    mesh = await reading_mesh(make_mesh, tmp_path, "")
    call = json.dumps({"name": "exec_command", "arguments": {"cmd": "echo told > found.txt"}})
    answers = [f"{THOUGHT}\n<tool_call>\n{call}\n</tool_call>", "I have written it."]

    async def script(run: Run) -> None:
        await run.answer([*mesh.ids(answers[min(len(mesh.decodes[0].runs), 2) - 1]), mesh.eos])

    mesh.decodes[0].script = script
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    provider = f'name = "mesh"\nbase_url = "{mesh.url}/v1"\nwire_api = "responses"\nstream_max_retries = 0\n'
    settings = f'model = "{MODEL}"\nmodel_provider = "mesh"\nsandbox_mode = "danger-full-access"\n'
    (home / "config.toml").write_text(f"{settings}[model_providers.mesh]\n{provider}")
    process = await asyncio.create_subprocess_exec(
        CODEX, "exec", "--skip-git-repo-check", "Write a file.", cwd=work, env={**os.environ, "CODEX_HOME": str(home)},
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(120):
            said, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, log.decode()
    assert said.decode().strip() == "I have written it."
    assert (work / "found.txt").read_text() == "told\n"
    first, second = (run.prompt for run in mesh.decodes[0].runs)
    generated = mesh.tokenizer.decode(second[len(first) :])
    assert "The sea?" in generated and "echo told" in generated
