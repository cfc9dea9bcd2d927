"""TLS and mTLS over real sockets, and configurations that make no sense."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvmesh.config import ServiceConfig
from kvmesh.errors import ConfigError, KvmeshError, TlsFailed, Unavailable
from kvmesh.rpc import security
from kvmesh.rpc.call_limits import MEMBERS
from kvmesh.rpc.certificates import Certificates, make_certificates
from kvmesh.rpc.channels import connect
from kvmesh.rpc.public_calls import HeldMemory, Metadata, PublicCalls
from kvmesh.rpc.security import PLAINTEXT, Security, TlsFiles
from kvmesh.rpc.server import Server
from kvmesh.rpc.status import Unreachable, from_rpc_error

Use = Callable[[Security], Security]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("mesh"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def use() -> Iterator[Use]:
    before = security.current()
    yield security.use
    security.use(before)


def mutual(made: Certificates) -> Security:
    return Security.load(made.files)


def client_only(made: Certificates) -> Security:
    """Checks the server, shows no certificate."""
    return Security.load(TlsFiles(tls_ca=str(made.ca)))


def server_only(made: Certificates) -> Security:
    """Encrypts, asks nobody who he is."""
    return Security.load(TlsFiles(tls_cert=str(made.cert), tls_key=str(made.key)))


class AnyCall:
    """A public server without keys."""

    keys_required = False

    def authorize(self, method: str, metadata: Metadata) -> str:
        return ""

    def hold(self, method: str, message: bytes) -> HeldMemory:
        raise NotImplementedError


@asynccontextmanager
async def serving(tls: Security | None, *, public: bool = False, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    calls = PublicCalls(MEMBERS, AnyCall()) if public else None
    server = Server(host, 0, public=calls, tls=tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def call(address: str, tls: Security | None = None) -> KvmeshError | None:
    """The error of a health check; None: it was answered. One that hangs is DeadlinePassed, which no test wants."""
    async with connect(address, tls=tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        except grpc.aio.AioRpcError as err:
            return from_rpc_error(err)
    return None


async def test_both_sides_know_each_other(made: Certificates, use: Use) -> None:
    use(mutual(made))
    for host in ("127.0.0.1", "localhost", "::1"):
        async with serving(None, host=host) as server:
            assert await call(server.address) is None


async def test_a_server_alone_encrypts(made: Certificates, use: Use) -> None:
    async with serving(server_only(made)) as server:
        use(client_only(made))
        assert await call(server.address) is None
        use(mutual(made))
        assert await call(server.address) is None, "a certificate that nobody asks for does no harm"


async def test_a_public_door_asks_for_no_certificate(made: Certificates, use: Use) -> None:
    async with serving(mutual(made), public=True) as open_door, serving(mutual(made)) as door:
        use(client_only(made))
        assert await call(open_door.address) is None
        refused = await call(door.address)
        assert isinstance(refused, Unavailable)
        assert "it may want a client certificate (tls_cert is not set)" in refused.message
        assert door.address in refused.message


async def test_an_authority_that_is_not_ours(made: Certificates, stranger: Certificates, use: Use) -> None:
    async with serving(mutual(made)) as server:
        use(client_only(stranger))
        refused = await call(server.address)
        assert isinstance(refused, TlsFailed)
        assert refused.message.startswith(f"{server.address} has a certificate that tls_ca does not vouch for: ")
        # It trusts us and shows a certificate that we do not know.
        use(Security(cert=stranger.cert.read_bytes(), key=stranger.key.read_bytes(), ca=made.ca.read_bytes()))
        refused = await call(server.address)
        assert isinstance(refused, Unavailable)
        assert "may distrust this side's tls_cert" in refused.message


async def test_plaintext_meets_tls_and_the_reverse(made: Certificates, use: Use) -> None:
    async with serving(mutual(made)) as secure, serving(PLAINTEXT) as plain:
        use(PLAINTEXT)
        refused = await call(secure.address)
        assert isinstance(refused, Unavailable)
        assert refused.message == (
            f"{secure.address} closed the connection at once: it may speak TLS, and this side does not "
            "(tls_ca is not set)"
        )
        use(mutual(made))
        refused = await call(plain.address)
        assert isinstance(refused, TlsFailed)
        assert f"{plain.address} speaks no TLS, and this side does" in refused.message
        assert await call(plain.address, PLAINTEXT) is None
        assert await call(secure.address) is None, "the server has borne it"


async def test_a_peer_that_is_not_there_is_no_matter_of_tls(made: Certificates, use: Use) -> None:
    for tls in (PLAINTEXT, mutual(made)):
        use(tls)
        refused = await call("127.0.0.1:1")
        assert type(refused) is Unreachable
        assert "refused" in refused.message
        assert "TLS" not in refused.message


async def test_the_name_that_certificates_must_hold(made: Certificates, tmp_path: Path, use: Use) -> None:
    named = make_certificates(tmp_path, ["mesh.example"])
    async with serving(mutual(named)) as server:
        for name, fine in (("mesh.example", True), ("other.example", False)):
            use(Security.load(TlsFiles(**{**vars(named.files), "tls_server_name": name})))
            refused = await call(server.address)
            assert (refused is None) is fine
        assert isinstance(refused, TlsFailed)
        assert "does not name tls_server_name='other.example'" in refused.message


async def test_many_calls_over_one_secure_channel(made: Certificates, use: Use) -> None:
    use(mutual(made))
    async with serving(None) as server, connect(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answers = await asyncio.gather(*(stub.Check(health_pb2.HealthCheckRequest(), timeout=20) for _ in range(50)))
    assert len(answers) == 50


# ── configuration ─────────────────────────────────────────────────────────────────────────────────


def test_a_service_is_configured_from_its_fields(made: Certificates, use: Use) -> None:
    use(PLAINTEXT)
    config = ServiceConfig(tls_cert=str(made.cert), tls_key=str(made.key), tls_ca=str(made.ca), tls_server_name="n")
    assert security.configure(config) is security.current()
    assert security.current().server_name == "n"
    assert security.current().ca == made.ca.read_bytes()
    with pytest.raises(ConfigError):
        security.configure(ServiceConfig(tls_ca="/no/such"))
    assert security.current().server_name == "n", "what was stays"
    assert security.configure(ServiceConfig()) == PLAINTEXT
    told = repr(Security.load(made.files))
    assert "PRIVATE" not in told and "CERTIFICATE" not in told


def test_from_the_environment(made: Certificates) -> None:
    env = {"KVMESH_TLS_CA": "a", "KVMESH_TLS_SERVER_NAME": "n", "KVMESH_PORT": "3"}
    assert TlsFiles.from_env(env) == TlsFiles(tls_ca="a", tls_server_name="n")


def broken_files(made: Certificates, stranger: Certificates, folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text("hello")
    (folder / "bad.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (folder / "bad-key.pem").write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    (folder / "binary").write_bytes(b"-----BEGIN CERTIFICATE-----\xff")
    (folder / "huge").write_bytes(b"x" * (5 << 20))
    names = ("text", "bad.pem", "bad-key.pem", "binary", "huge", "none")
    return {name: str(folder / name) for name in names} | {
        "cert": str(made.cert), "key": str(made.key), "ca": str(made.ca), "other": str(stranger.key),
        "folder": str(folder), "": "",
    }  # fmt: skip


# cert, key, ca, server name → field named, words
WRONG: list[tuple[str, str, str, str, str, str]] = [
    ("cert", "", "", "", "tls_key", "is needed with tls_cert"),
    ("", "key", "", "", "tls_cert", "is needed with tls_key"),
    ("none", "key", "", "", "tls_cert", "No such file"),
    ("cert", "none", "", "", "tls_key", "No such file"),
    ("folder", "key", "", "", "tls_cert", "Is a directory"),
    ("text", "key", "", "", "tls_cert", "holds no PEM certificate"),
    ("cert", "text", "", "", "tls_key", "holds no PEM private key"),
    ("bad.pem", "key", "", "", "tls_cert", "cannot be read"),
    ("binary", "key", "", "", "tls_cert", "cannot be read"),
    ("huge", "key", "", "", "tls_cert", "is longer than"),
    ("cert", "bad-key.pem", "", "", "tls_key", "cannot be used with tls_cert"),
    ("cert", "other", "", "", "tls_key", "is not the key of tls_cert="),
    ("", "", "none", "", "tls_ca", "No such file"),
    ("", "", "text", "", "tls_ca", "holds no PEM certificate"),
    ("", "", "bad.pem", "", "tls_ca", "cannot be read"),
    ("", "", "", "name", "tls_server_name", "without tls_ca"),
]


@pytest.mark.parametrize(("cert", "key", "ca", "name", "field", "words"), WRONG)
def test_files_that_do_not_fit(
    cert: str, key: str, ca: str, name: str, field: str, words: str,
    made: Certificates, stranger: Certificates, tmp_path: Path,
) -> None:  # fmt: skip
    files = broken_files(made, stranger, tmp_path / "broken")
    given = TlsFiles(tls_cert=files[cert], tls_key=files[key], tls_ca=files[ca], tls_server_name=name)
    with pytest.raises(ConfigError) as caught:
        Security.load(given)
    assert caught.value.field == field
    assert words in caught.value.message
    assert caught.value.message.startswith(f"{field}={getattr(given, field)!r}: ")
    assert "\n" not in caught.value.message


def test_an_encrypted_key_asks_no_terminal(made: Certificates, tmp_path: Path) -> None:
    locked = tmp_path / "locked.pem"
    command = ["openssl", "pkcs8", "-topk8", "-passout", "pass:secret", "-in", str(made.key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    with pytest.raises(ConfigError, match="is encrypted; kvmesh needs a key without a passphrase"):
        Security.load(TlsFiles(tls_cert=str(made.cert), tls_key=str(locked)))


def test_a_file_that_may_not_be_read(made: Certificates, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)  # this user may be root, whom no mode stops
    with pytest.raises(ConfigError, match=r"tls_ca='.*ca\.pem': Permission denied"):
        Security.load(TlsFiles(tls_ca=str(made.ca)))


@pytest.mark.parametrize(
    "details",
    ["Socket closed", "the service is down", "failed to connect to all addresses; last error: timeout", ""],
)
def test_other_failures_are_left_alone(details: str) -> None:
    assert security.explain(details) is None
