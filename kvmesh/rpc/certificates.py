"""Certificates for a mesh that has no authority of its own: `kvmesh certs`, `kvmesh up --tls`, tests.

Each says by URI names whose it is (`authorisation.Identity`): a process of its own, or all roles at once. The
authority's key is thrown away unless it is wanted, so that nobody can make more.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmesh import extras
from kvmesh.errors import ConfigError
from kvmesh.rpc.authorisation import ALL_IDENTITIES, Identity, dns_names
from kvmesh.rpc.security import TlsFiles

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
VALID_DAYS = 365
_EARLY = datetime.timedelta(minutes=5)  # clocks of two machines
_TIMEOUT_S = 30.0
_NAMES = {"authority": "kvmesh certificate authority", "service": "kvmesh"}


AUTHORITY_KEY = "ca-key.pem"


@dataclass(frozen=True)
class Certificates:
    """Paths of PEM files: the authority, and the service's certificate and key (readable by its owner only)."""

    ca: Path
    cert: Path
    key: Path

    @property
    def files(self) -> TlsFiles:
        """Returns the files as a configuration for mTLS names them."""
        return TlsFiles(tls_cert=str(self.cert), tls_key=str(self.key), tls_ca=str(self.ca))


@dataclass(frozen=True)
class Authority:
    """A certificate authority's certificate and key, as PEM."""

    cert: bytes
    key: bytes


def make_certificates(folder: Path, hosts: Sequence[str] = (), *, days: int = VALID_DAYS) -> Certificates:
    """Writes ca.pem, cert.pem and key.pem for servers and clients at `hosts` (names or addresses; localhost is always
    included), one certificate with every role. Existing files are replaced, the authority's key is not kept.

    The `cryptography` package (extra `tls`) makes them, else the openssl program. Raises ConfigError when neither is
    there, the folder cannot be written, or a host is no name.
    """
    return make_role_certificates(folder, {"": ALL_IDENTITIES}, hosts, days=days)[""]


def make_role_certificates(
    folder: Path,
    wanted: Mapping[str, Sequence[Identity]],
    hosts: Sequence[str] = (),
    *,
    days: int = VALID_DAYS,
    keep_authority: bool = False,
) -> dict[str, Certificates]:
    """Does what `make_certificates` does for one certificate a subfolder: `wanted` has the identities of each.

    With `keep_authority` the authority's key stays as ca-key.pem in `folder`, and an authority that is there signs
    again: certificates are added to a mesh, or renewed.
    """
    names = list(dict.fromkeys([*LOCAL_HOSTS, *hosts]))
    for host in names:
        _is_address(host)
    makes = CertificateMaker if importlib.util.find_spec("cryptography") else OpensslMaker
    made = {name: _paths(folder / name) for name in wanted}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        maker = makes(names, days)
        authority = _kept(folder) if keep_authority else None
        if authority is None:
            authority = maker.authority()
            if keep_authority:
                _write(folder / AUTHORITY_KEY, authority.key, 0o600)
                _write(folder / "ca.pem", authority.cert, 0o644)
        for name, identities in wanted.items():
            cert, key = maker.certificate(authority, identities)
            paths = made[name]
            paths.ca.parent.mkdir(exist_ok=True, mode=0o700)
            _write(paths.ca, authority.cert, 0o644)
            _write(paths.key, key, 0o600)
            _write(paths.cert, cert, 0o644)
    except OSError as err:
        raise ConfigError(f"certificates in {str(folder)!r}: {err.strerror or err}", field="tls_cert") from None
    return made


def _paths(folder: Path) -> Certificates:
    return Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")


def _kept(folder: Path) -> Authority | None:
    """Returns the authority whose key was kept in a folder. Raises OSError."""
    try:
        return Authority((folder / "ca.pem").read_bytes(), (folder / AUTHORITY_KEY).read_bytes())
    except FileNotFoundError:
        return None


def _write(path: Path, pem: bytes, mode: int) -> None:
    """Writes a file atomically, and never readable by others."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(pem)
    part.replace(path)


def _is_address(host: str) -> bool:
    """Says whether `host` is an IP address and not a name. Raises ConfigError when it is neither."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        pass
    labels = host.removeprefix("*.").removesuffix(".").split(".")
    fine = all(label and len(label) <= 63 and label.replace("-", "a").replace("_", "a").isalnum() for label in labels)
    if not (fine and host.isascii() and len(host) <= 253):
        raise ConfigError(f"hosts={host[:80]!r}: neither a host name nor an address", field="hosts")
    return False


class CertificateMaker:
    """Makes certificates with the `cryptography` package."""

    def __init__(self, hosts: Sequence[str], days: int) -> None:
        self._hosts = hosts
        self._days = days

    def authority(self) -> Authority:
        """Makes a new authority."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("authority")
        ca = self._builder(name, name, key.public_key())
        ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        signed = ca.add_extension(_usage(authority=True), critical=True).sign(key, hashes.SHA256())
        return Authority(signed.public_bytes(serialization.Encoding.PEM), _pem(key))

    def certificate(self, authority: Authority, identities: Sequence[Identity]) -> tuple[bytes, bytes]:
        """Returns a certificate that says these, and its key. Raises ConfigError when the authority's files are
        none."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        try:
            ca = x509.load_pem_x509_certificate(authority.cert)
            ca_key: Any = serialization.load_pem_private_key(authority.key, None)
        except (ValueError, TypeError) as err:
            raise ConfigError(f"{AUTHORITY_KEY}, ca.pem: no authority ({err})", field="tls_ca") from None
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives: list[x509.GeneralName] = [
            x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host)
            for host in self._hosts
        ]
        alternatives += [x509.DNSName(name) for name in dns_names(identities)]
        alternatives += [x509.UniformResourceIdentifier(one.uri) for one in identities]
        one = self._builder(ca.subject, _name("service"), key.public_key())
        one = one.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        one = one.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        one = one.add_extension(_usage(authority=False), critical=True)
        one = one.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        one = one.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        signed = one.sign(ca_key, hashes.SHA256())
        return signed.public_bytes(serialization.Encoding.PEM), _pem(key)

    def _builder(self, issuer: Any, subject: Any, public: Any) -> Any:
        from cryptography import x509

        now = datetime.datetime.now(datetime.UTC)
        begun = x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
        begun = begun.not_valid_before(now - _EARLY).not_valid_after(now + datetime.timedelta(days=self._days))
        return begun.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _name(kind: str) -> Any:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAMES[kind])])


def _usage(*, authority: bool) -> Any:
    from cryptography import x509

    no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
    return x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority,
        encipher_only=False, decipher_only=False, **no,
    )  # fmt: skip


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    pem = serialization.Encoding.PEM
    private: bytes = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private


_OPENSSL_CONFIG = """
[req]
distinguished_name = name
prompt = no
[name]
CN = {common}
[authority]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[service]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {alternatives}
"""


class OpensslMaker:
    """Makes certificates with the openssl program, as `CertificateMaker` does. Raises ConfigError when there is none,
    or it fails."""

    def __init__(self, hosts: Sequence[str], days: int) -> None:
        program = shutil.which("openssl")
        if program is None:
            why = f"needs the openssl program, or the cryptography package ({extras.install('tls')})"
            raise ConfigError(f"tls: making certificates {why}", field="tls")
        self._program = program
        self._hosts = hosts
        self._valid = f"-sha256 -days {days}"

    def authority(self) -> Authority:
        """Makes a new authority."""
        with tempfile.TemporaryDirectory(prefix="kvmesh-tls-") as name:
            work = Path(name)
            self._prepare(work, "authority", ())
            extensions = f"-config authority.conf -extensions authority {self._valid}"
            self._run(work, f"req -x509 -new -key authority.key {extensions} -out ca.pem")
            return Authority((work / "ca.pem").read_bytes(), (work / "authority.key").read_bytes())

    def certificate(self, authority: Authority, identities: Sequence[Identity]) -> tuple[bytes, bytes]:
        """Returns a certificate that says these, and its key."""
        with tempfile.TemporaryDirectory(prefix="kvmesh-tls-") as name:
            work = Path(name)
            (work / "ca.pem").write_bytes(authority.cert)
            _write(work / "authority.key", authority.key, 0o600)
            self._prepare(work, "service", identities)
            self._run(work, "req -new -key service.key -config service.conf -out service.csr")
            signing = "-CA ca.pem -CAkey authority.key -CAcreateserial -extfile service.conf -extensions service"
            self._run(work, f"x509 -req -in service.csr {signing} {self._valid} -out cert.pem")
            return (work / "cert.pem").read_bytes(), (work / "service.key").read_bytes()

    def _prepare(self, work: Path, kind: str, identities: Sequence[Identity]) -> None:
        names = [f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in self._hosts]
        names += [f"DNS:{name}" for name in dns_names(identities)] + [f"URI:{one.uri}" for one in identities]
        text = _OPENSSL_CONFIG.format(common=_NAMES[kind], alternatives=",".join(names))
        (work / f"{kind}.conf").write_text(text, encoding="ascii")
        self._run(work, f"ecparam -name prime256v1 -genkey -noout -out {kind}.ec")
        self._run(work, f"pkcs8 -topk8 -nocrypt -in {kind}.ec -out {kind}.key")

    def _run(self, work: Path, command: str) -> None:
        done = subprocess.run(
            [self._program, *command.split()], cwd=work, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()
            raise ConfigError(f"tls: openssl {command.split()[0]} failed: {(said or ['?'])[0][:200]}", field="tls")
