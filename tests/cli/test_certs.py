"""`kvmesh certs`: a certificate for each role, added to and renewed under one authority."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.rpc.security import Security, TlsFiles


def certs(folder: Path, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["certs", str(folder), *words])
    return done.exit_code, done.output


def test_certificates_are_added_and_renewed_under_one_authority(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    code, told = certs(folder, "--role", "instance/prefill-0", "--role", "operator,client", "--host", "10.0.0.5")
    assert code == 0 and "kvmesh://instance/prefill-0" in told
    ca, first = (folder / "ca.pem").read_bytes(), folder / "instance-prefill-0" / "cert.pem"
    before = first.read_bytes()
    assert certs(folder, "--role", "instance/prefill-0", "--role", "store")[0] == 0
    assert (folder / "ca.pem").read_bytes() == ca and first.read_bytes() != before
    for name in ("instance-prefill-0", "operator+client", "store"):
        made = folder / name
        assert (made / "key.pem").stat().st_mode & 0o077 == 0
        files = TlsFiles(**{f"tls_{one}": str(made / f"{one}.pem") for one in ("cert", "key", "ca")})
        assert Security.load(files).ca == ca


@pytest.mark.parametrize("role", ["wizard", "", "instance/" + "x" * 1000])
def test_what_is_no_role_is_named(tmp_path: Path, role: str) -> None:
    code, told = certs(tmp_path / "tls", "--role", role)
    assert code == 2 and "role=" in told and not (tmp_path / "tls").exists()


def test_a_name_is_no_path(tmp_path: Path) -> None:
    assert certs(tmp_path / "a" / "tls", "--role", "instance/../../../x")[0] == 0
    assert not list(tmp_path.glob("x*")) and not list((tmp_path / "a").glob("x*"))
