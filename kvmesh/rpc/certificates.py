"""Certificates for a mesh that has no authority of its own: `kvmesh up --tls`, tests, a first try on a few machines.

One authority, one certificate for all its services. The authority's key is thrown away, so that nobody can make more.
"""

from __future__ import annotations

import datetime
import importlib.util
import ipaddress
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmesh import extras
from kvmesh.errors import ConfigError
from kvmesh.rpc.security import TlsFiles

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
VALID_DAYS = 365
_EARLY = datetime.timedelta(minutes=5)  # clocks of two machines
_TIMEOUT_S = 30.0
_NAMES = {"authority": "kvmesh certificate authority", "service": "kvmesh"}


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


def make_certificates(folder: Path, hosts: Sequence[str] = (), *, days: int = VALID_DAYS) -> Certificates:
    """Writes ca.pem, cert.pem and key.pem for servers and clients at `hosts` (names or addresses; localhost is always
    included). Existing files are replaced.

    The `cryptography` package (extra `tls`) makes them, else the openssl program. Raises ConfigError when neither is
    there, the folder cannot be written, or a host is no name.
    """
    names = list(dict.fromkeys([*LOCAL_HOSTS, *hosts]))
    for host in names:
        _is_address(host)
    made = Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
    maker = _with_cryptography if importlib.util.find_spec("cryptography") else _with_openssl
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca, cert, key = maker(names, days)
        for path, pem, mode in ((made.ca, ca, 0o644), (made.cert, cert, 0o644), (made.key, key, 0o600)):
            _write(path, pem, mode)
    except OSError as err:
        raise ConfigError(f"certificates in {str(folder)!r}: {err.strerror or err}", field="tls_cert") from None
    return made


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


def _with_cryptography(hosts: Sequence[str], days: int) -> tuple[bytes, bytes, bytes]:
    """Returns (authority, certificate, key) as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def name(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def usage(*, authority: bool) -> x509.KeyUsage:
        no = dict.fromkeys(("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False)
        return x509.KeyUsage(
            digital_signature=not authority, key_cert_sign=authority, crl_sign=authority,
            encipher_only=False, decipher_only=False, **no,
        )  # fmt: skip

    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = name(_NAMES["authority"])

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        begun = x509.CertificateBuilder(ca_name, subject, public, x509.random_serial_number())
        begun = begun.not_valid_before(now - _EARLY).not_valid_after(now + datetime.timedelta(days=days))
        return begun.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)

    ca = builder(ca_name, ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    signed_ca = ca.add_extension(usage(authority=True), critical=True).sign(ca_key, hashes.SHA256())

    alternatives: list[x509.GeneralName] = [
        x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host) for host in hosts
    ]
    one = builder(name(_NAMES["service"]), key.public_key())
    one = one.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    one = one.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    one = one.add_extension(usage(authority=False), critical=True)
    one = one.add_extension(
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
    )
    one = one.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    signed = one.sign(ca_key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return signed_ca.public_bytes(pem), signed.public_bytes(pem), private


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


def _with_openssl(hosts: Sequence[str], days: int) -> tuple[bytes, bytes, bytes]:
    """Returns (authority, certificate, key) as PEM. Raises ConfigError when there is no openssl program, or it
    fails."""
    program = shutil.which("openssl")
    if program is None:
        why = f"needs the openssl program, or the cryptography package ({extras.install('tls')})"
        raise ConfigError(f"tls: making certificates {why}", field="tls")
    alternatives = ",".join(f"{'IP' if _is_address(host) else 'DNS'}:{host}" for host in hosts)
    with tempfile.TemporaryDirectory(prefix="kvmesh-tls-") as name:
        work = Path(name)
        for kind, common in _NAMES.items():
            text = _OPENSSL_CONFIG.format(common=common, alternatives=alternatives)
            (work / f"{kind}.conf").write_text(text, encoding="ascii")

        def openssl(command: str) -> None:
            done = subprocess.run(
                [program, *command.split()], cwd=work, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
            if done.returncode:
                said = done.stderr.decode("utf-8", "replace").strip().splitlines()
                raise ConfigError(f"tls: openssl {command.split()[0]} failed: {(said or ['?'])[0][:200]}", field="tls")

        for kind in _NAMES:
            openssl(f"ecparam -name prime256v1 -genkey -noout -out {kind}.ec")
            openssl(f"pkcs8 -topk8 -nocrypt -in {kind}.ec -out {kind}.key")
        valid = f"-sha256 -days {days}"
        openssl(f"req -x509 -new -key authority.key -config authority.conf -extensions authority {valid} -out ca.pem")
        openssl("req -new -key service.key -config service.conf -out service.csr")
        signing = "-CA ca.pem -CAkey authority.key -CAcreateserial -extfile service.conf -extensions service"
        openssl(f"x509 -req -in service.csr {signing} {valid} -out cert.pem")
        found = [(work / file).read_bytes() for file in ("ca.pem", "cert.pem", "service.key")]
    return found[0], found[1], found[2]
