"""Certificates made on the spot, by both makers."""

from __future__ import annotations

import importlib.util
import shutil
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvmesh.errors import ConfigError
from kvmesh.rpc.certificates import make_certificates
from kvmesh.rpc.security import Security

MAKERS = ("cryptography", "openssl")


@pytest.fixture(params=MAKERS)
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The openssl program is used where the package is not installed."""
    if request.param == "openssl":
        found = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cryptography" else found(name))
    return str(request.param)


def test_what_a_certificate_says(maker: str, tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "new" / "tls", ["node-1.example", "10.1.2.3", "localhost", "fd00::7"], days=3)
    one = x509.load_pem_x509_certificate(made.cert.read_bytes())
    authority = x509.load_pem_x509_certificate(made.ca.read_bytes())
    one.verify_directly_issued_by(authority)
    names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    roles = [f"{one}.kvmesh.internal" for one in ("instance", "store", "conductor", "node", "member")]
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "node-1.example", *roles]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    assert addresses == ["127.0.0.1", "::1", "10.1.2.3", "fd00::7"]
    uses = set(one.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert uses == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not one.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert 2 <= (one.not_valid_after_utc - one.not_valid_before_utc).days <= 3


def test_files_are_usable_private_and_replaced(maker: str, tmp_path: Path) -> None:
    first = make_certificates(tmp_path)
    assert stat.S_IMODE(first.key.stat().st_mode) == 0o600
    loaded = Security.load(first.files)
    assert loaded.cert and loaded.key and loaded.ca
    old = first.cert.read_bytes()
    second = make_certificates(tmp_path)
    assert second == first
    assert second.cert.read_bytes() != old
    Security.load(second.files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca.pem", "cert.pem", "key.pem"], "no authority's key"


def test_a_tls_handshake(maker: str, tmp_path: Path) -> None:
    """In memory, as strict as Python is: the chain, the name, the key usages."""
    made = make_certificates(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.cert, made.key)
    client = ssl.create_default_context(cafile=str(made.ca))
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(down, up, server_hostname="127.0.0.1"), server.wrap_bio(up, down, server_side=True)]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert ends[0].version() == "TLSv1.3"


@pytest.mark.parametrize("host", ["", "a b", "x" * 64 + ".de", "a..b", "ä.de", "1.2.3.4/24", "host,DNS:evil", "a\nb"])
def test_hosts_that_are_none(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hosts="):
        make_certificates(tmp_path / "x", [host])
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_written_and_no_maker(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file"):
        make_certificates(tmp_path / "file")
    if maker == "openssl":
        monkeypatch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(ConfigError, match=r"openssl.*pip install .*tls"):
            make_certificates(tmp_path / "x")
