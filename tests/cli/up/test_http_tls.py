"""`kvmesh up --http-tls`: the REST port speaks HTTPS, `up` tells how to use it, and the other commands do."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmesh.cli.up import plan
from kvmesh.cli.up.command import _kept_here, _plaintext
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.errors import ConfigError
from kvmesh.rpc.certificates import make_certificates

KVMESH = [sys.executable, "-m", "kvmesh.cli"]


def settings(tmp_path: Path, **more: Any) -> MeshSettings:
    return MeshSettings(model="/none", run_dir=str(tmp_path / "run"), http_port=0, grpc_port=0, **more)


def gateway(mesh: Mesh) -> plan.ProcessSpec:
    return mesh.processes["gateway"].spec


def test_the_gateway_gets_a_certificate_of_its_own(tmp_path: Path) -> None:
    mesh = Mesh(settings(tmp_path, http_tls=True, tls=True))
    folder = tmp_path / "run" / "http-tls"
    assert mesh.url.startswith("https://")
    assert mesh.http_ca == str(folder / "ca.pem")
    assert mesh.http_ca != mesh.settings.tls_ca, "clients do not become members"
    assert str(folder / "cert.pem") in " ".join(map(str, gateway(mesh).argv))
    assert (folder / "key.pem").stat().st_mode & 0o077 == 0


def test_a_given_certificate_is_used(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    mesh = Mesh(settings(tmp_path, http_tls_cert=str(made.cert), http_tls_key=str(made.key)))
    assert (mesh.url[:8], mesh.http_ca) == ("https://", "")
    pair = (f"gateway.http_tls_cert={made.cert}", f"gateway.http_tls_key={made.key}")
    by_set = Mesh(settings(tmp_path, set=pair))
    assert (by_set.url[:8], gateway(by_set).https, gateway(Mesh(settings(tmp_path))).https) == ("https://", True, False)
    with pytest.raises(ConfigError, match="http_tls_cert"):
        Mesh(settings(tmp_path, http_tls_cert=str(tmp_path / "no.pem"), http_tls_key=str(made.key)))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"http_tls": True, "http_tls_cert": "a.pem", "http_tls_key": "b.pem"}, "makes a certificate of its own"),
        ({"http_tls_cert": "a.pem"}, "http_tls_key='': is needed with http_tls_cert"),
        ({"http_tls": True, "join": "127.0.0.1:7000"}, "http_tls=True"),
    ],
)
def test_what_cannot_be(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(tmp_path, **wrong)


def test_plain_rest_beside_keys_or_tls_is_warned_of(tmp_path: Path) -> None:
    def words(**more: Any) -> str:
        return "\n".join(_plaintext(settings(tmp_path, **more)))

    assert words() == ""
    assert "API keys and prompts travel unencrypted" in words(api_keys="keys.toml")
    assert "--http-tls" in words(tls_cert="a", tls_key="b", tls_ca="c")
    assert words(api_keys="keys.toml", http_tls_cert="a", http_tls_key="b") == ""


def test_machines_that_join_and_would_exchange_no_kv_are_warned_of(tmp_path: Path) -> None:
    def words(**more: Any) -> str:
        return "\n".join(_kept_here(settings(tmp_path, **more)))

    tls = {"tls_cert": "a", "tls_key": "b", "tls_ca": "c"}
    assert words(host="10.0.0.1", **tls) == "", "it is encrypted"
    assert words(host="10.0.0.1") == ""
    assert "--tls-cert" in words(host="10.0.0.1", tls_ca="c")
    assert words(tls_ca="c") == "", "nobody joins"
    assert words(host="10.0.0.1", transfer_network="trusted", tls_ca="c") == ""


@pytest.mark.slow
@pytest.mark.mesh
def test_a_mesh_with_https(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    env.pop("KVMESH_API_KEY", None)
    run_dir = tmp_path / "run"
    command = [*KVMESH, "up", "--http-tls", "--http-port=0", "--grpc-port=0", f"--run-dir={run_dir}", "--memory-mb=64"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            printed = []
            assert process.stdout
            for line in process.stdout:
                printed.append(line.rstrip("\n"))
                if "Ctrl-C stops everything." in line:
                    break
            text = "\n".join(printed)
            told = json.loads((run_dir / "mesh.json").read_text())
            url, ca = told["url"], told["http_ca"]
            assert f"The mesh is up  {url}/v1" in text
            assert "unencrypted" not in text
            assert "assistant" in text, "the first request went over HTTPS"
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")  # nobody vouches for it
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http{url.removeprefix('https')}/health")
            if shutil.which("curl"):
                curl = next(line for line in printed if line.strip().startswith("curl "))
                done = subprocess.run(shlex.split(curl), capture_output=True, text=True, timeout=60, check=False)
                assert '"chat.completion"' in done.stdout, done.stderr
            for args in (["chat", "-m", "hi", "--max-tokens", "3"], ["status"], ["bench", "--requests", "2"]):
                done = subprocess.run(
                    [*KVMESH, *args], env=env, capture_output=True, text=True, timeout=90, check=False
                )
                assert done.returncode == 0, done.stdout + done.stderr
            assert Path(ca).is_file()
        finally:
            process.terminate()
            process.communicate(timeout=60)
