"""What /openapi.json says of the REST API, held against the running gateway by schemathesis: all its phases."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.fuzz.conftest import Noise
from tests.support.mesh.harness import Running, running_mesh
from tests.support.paths import ROOT

pytestmark = [pytest.mark.mesh, pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.asyncio(loop_scope="module")]

LIMIT_S = 1400
DEMO = ROOT / "examples" / "demo-model"
# The schema cannot say that some fields go only with others (top_logprobs with logprobs), nor count tokens: such
# requests are refused though they fit it. Everything else that schemathesis can check is checked.
NOT_CHECKED = "positive_data_acceptance"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:

    async with running_mesh(DEMO, tmp_path_factory.mktemp("openapi")) as running:
        yield running


@pytest.mark.parametrize(
    ("phases", "cases"),
    [
        (("Examples", "Fuzzing"), 30),
        pytest.param(("Coverage", "Stateful"), 300, marks=pytest.mark.long),  # minutes of a core
    ],
)
async def test_the_api_is_what_its_schema_says(
    mesh: Running, noise: Noise, tmp_path: Path, phases: tuple[str, ...], cases: int
) -> None:
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{mesh.http}/openapi.json", "--no-color",
        "--phases", ",".join(phases).lower(), "--exclude-checks", NOT_CHECKED, "--max-examples", "5",
        "--request-timeout", "60", "--seed", str(noise.seed), "--continue-on-failure",
    ]  # fmt: skip
    ran = await asyncio.to_thread(
        subprocess.run, command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    told = ran.stdout[-20_000:] + ran.stderr[-2_000:]
    assert ran.returncode == 0, told
    found = re.search(r"Test cases:\s+(\d+) generated", ran.stdout)
    assert found is not None and int(found[1]) >= cases, told
    assert all(f"✅ {phase}" in ran.stdout for phase in phases), told
    print(found[0])
    async with httpx.AsyncClient(timeout=30) as client:
        assert (await client.get(f"{mesh.http}/ready")).status_code == 200
    await mesh.settled()
