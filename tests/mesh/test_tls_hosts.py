"""A mesh of two machines under TLS whose network nobody called trusted: its KV stays where it is, and its clients hear
why. The other machine is a user namespace of this one, which shares no memory with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvmesh.cli.up.plan import Ports
from kvmesh.rpc.certificates import make_certificates
from tests.support.mesh.client import until
from tests.support.paths import ROOT

ELSEWHERE = ("unshare", "--user", "--map-root-user")


def why_not() -> str:
    """Why this machine has no user namespaces; "" when it has."""
    if shutil.which(ELSEWHERE[0]) is None:
        return "unshare (util-linux) is not installed"
    made = subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True, check=False)
    return f"user namespaces: {made.stderr.strip()}" if made.returncode else ""


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.mesh,
    pytest.mark.timeout(240),
]

KVMESH = (sys.executable, "-m", "kvmesh.cli")
READY_S = 120.0
WHY = "is on another host, and nothing may leave this one unencrypted"
WHAT_TO_DO = "--transfer-network trusted"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The gateway's, of a mesh whose prefill instance is on the other machine."""
    made, ports = make_certificates(tmp_path / "tls"), Ports()
    store, conductor, prefill, decode, http, grpc = (str(ports.take()) for _ in range(6))
    known = ("--conductor", f"127.0.0.1:{conductor}", "--store", f"127.0.0.1:{store}")
    model = ("--model", "examples/demo-model")
    services = {
        "store": ("--port", store),
        "conductor": ("--port", conductor, "--store", f"127.0.0.1:{store}"),
        "decode": (*model, "--port", decode, *known),
        "prefill": (*model, "--port", prefill, *known),
        "gateway": (*model, "--conductor", known[1], "--http-port", http, "--port", grpc),
    }
    tls = {"CERT": made.cert, "KEY": made.key, "CA": made.ca}
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "KVMESH_MEMORY_MB": "16"}
    env |= {f"KVMESH_TLS_{name}": str(file) for name, file in tls.items()}
    with ExitStack() as stack:
        for name, args in services.items():
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            where = ELSEWHERE if name == "prefill" else ()
            argv = [*where, *KVMESH, "serve", name, *args]
            stack.callback(end, subprocess.Popen(argv, env=env, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        yield f"http://127.0.0.1:{http}"


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    finally:
        process.kill()
        process.wait()


async def test_the_client_hears_why_the_kv_stays(url: str, tmp_path: Path) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:

        async def ready() -> bool:
            try:
                return (await http.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, "the gateway", READY_S)
        body = {"model": "demo-model", "prompt": list(range(10, 310)), "max_tokens": 4, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 503, answer.text
    said = answer.json()["error"]["message"]
    assert WHY in said and WHAT_TO_DO in said
    assert WHY in (tmp_path / "prefill.log").read_text()
