"""The settings of a transfer engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

from kvmesh.errors import TransferError
from kvmesh.transfer import checks
from kvmesh.transfer.transports import registry
from kvmesh.transfer.transports.registry import AUTO

TLS_FIELDS = ("tls_cert", "tls_key", "tls_ca", "tls_server_name")


class TlsPaths(Protocol):
    """The TLS settings of a process."""

    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_ca(self) -> str: ...
    @property
    def tls_server_name(self) -> str: ...


def tls_fields(files: TlsPaths, *, network: str) -> dict[str, str]:
    """Returns the fields of EngineConfig that have tcp speak TLS; empty means plain. A process that calls over TLS and
    has no certificate of its own cannot take part in mutual TLS; its engine gets `leave_host=False`."""
    if network == "trusted" or not (files.tls_cert and files.tls_key and files.tls_ca):
        return {}
    return {name: getattr(files, name) for name in TLS_FIELDS}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The settings of a transfer engine. Sizes are in bytes, times in seconds.

    `transports` are in order of preference; the next one is used when one cannot reach a peer or fails. The single word
    "auto" chooses rdma where pyverbs and a usable device are found, then shm, then tcp. `TransferEngine.choices` says
    what was chosen and why.

    With `tls_cert`, `tls_key` and `tls_ca` (PEM files) tcp speaks mutual TLS, and nothing else. Without `leave_host` no
    byte leaves this host unencrypted: rdma is refused, and so is tcp without TLS beyond loopback.

    A request becomes TIMEOUT after `request_timeout_s`. A path that acknowledged nothing for `ack_timeout_s` is given
    up, and its slices are sent over another.

    `wrapper` is for tests: where `fault` is not empty, the engine imports this `module:factory` and calls
    `factory(fault)`. The result is `TransferEngine.fault`, and the engine uses what its `wrap(transport, host)` returns
    instead of each transport.
    """

    transports: tuple[str, ...] = (AUTO,)
    leave_host: bool = True
    host: str = "127.0.0.1"  # tcp listens here: an address or name, IPv4 or IPv6
    port: int = 0  # 0 picks a free one
    advertise_host: str = ""  # what peers connect to; "" = host
    tls_cert: str = ""  # of tcp: this process's certificate, which peers are shown, and ...
    tls_key: str = ""
    tls_ca: str = ""  # ... the authorities that must have signed theirs
    tls_server_name: str = ""  # what peers' certificates must name; "" = the host that their endpoint says
    shm_dir: str = ""  # folder of the unix-domain socket; "" = Linux's abstract namespace
    shm_slice_bytes: int = 1 << 20
    shm_copy_threads: int = 0  # that share a large copy; 0 = by the number of cores
    huge_pages: str = "auto"  # of `allocate`: auto (transparent ones), hugetlb (reserved ones), never
    prefault: bool = False  # `allocate` touches every page at once: slow now (0.3 to 3 s a GiB), faster first transfers
    tcp_slice_bytes: int = 1 << 20
    tcp_streams: int = 2  # per peer, rail and direction
    # tcp listens on each of these and pairs them with the peer's: interfaces ("eth1") or addresses ("fe80::1%eth1");
    # () = those of `nics` that are interfaces here, else `host` alone
    tcp_nics: tuple[str, ...] = ()
    tcp_user_timeout_s: float = 1.0  # with tcp_nics: a connection that hears nothing of its packets so long is broken
    tcp_socket_bytes: int = 0  # SO_SNDBUF and SO_RCVBUF; 0: few on the own host, else as the kernel tunes them
    tcp_zerocopy: bool = False  # MSG_ZEROCOPY for writes; where the kernel copies all the same it is given up
    tcp_idle_s: float = 60.0  # a stream that carried nothing so long is closed, its threads end
    max_endpoints: int = 1024  # connections made by this engine; idle ones are closed beyond it (SIEVE)
    connect_timeout_s: float = 5.0
    ack_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    max_attempts: int = 4  # connection attempts in a row
    max_sendings: int = 16  # of one slice; each time its earlier path was confirmed dead
    backoff_s: float = 0.05  # first pause between attempts, doubles
    rest_s: float = 0.25  # a failed rail rests so long, then is probed; doubles up to rest_cap_s
    rest_cap_s: float = 300.0
    trip_errors: int = 3  # so many losses within trip_window_s put a rail to rest
    trip_window_s: float = 10.0
    probe_bytes: int = 64 << 10  # the largest frame that a rail gets after its rest, until one has arrived
    nic_inflight_bytes: int = 64 << 20  # posted over one local NIC, to all peers, before it answers
    prefetch_share: float = 0.10  # what PREFETCH gets beside more urgent bytes that keep a NIC busy, of those
    background_share: float = 0.05  # the same for BACKGROUND
    verify_attempts: int = 3  # sendings of a slice whose checksum differs, before it is FAILED
    fence_grace_s: float = 0.02  # a fence lets a slice end by itself so long, then cuts its connection
    close_timeout_s: float = 5.0
    fault: str = ""  # JSON of the wrapper; "" = none
    wrapper: str = "kvmesh.testing.fault.transport:FaultControl"
    # Use only these NICs: an RDMA device ("mlx5_0") concerns rdma, a network interface ("eth1") tcp; each transport
    # takes the names that are its own. () = rdma: every active port; tcp: no choice, `host` alone.
    nics: tuple[str, ...] = ()
    # Which NICs each memory location prefers (`kvmesh.transfer.topology`): JSON, or the path of a file of it;
    # "" = as found in /sys.
    topology: str = ""
    rdma_port: int = 0  # of rdma's control connections, on `host`; 0 picks a free one
    rdma_slice_bytes: int = 1 << 20  # one work request
    rdma_queue_depth: int = 256  # work requests outstanding on a queue pair
    rdma_qps_per_rail: int = 1  # queue pairs between two NICs, for each pair of engines; more where paths are hashed
    rdma_gid_index: int = -1  # -1: found by looking
    rdma_mtu: int = 0  # 256, 512, ... 4096; 0: the smaller one of the two ports'
    rdma_pairs: tuple[str, ...] = ()  # "mlx5_0=mlx5_1": local and remote NIC that reach each other; (): by addresses
    rdma_traffic_class: int = 0  # of RoCE v2's IP header: DSCP × 4
    rdma_service_level: int = 0  # InfiniBand's, or RoCE's priority
    rdma_pkey_index: int = 0
    rdma_ack_exponent: int = 14  # a packet is sent again after 4.096 us * 2**this ...
    rdma_retry_cnt: int = 6  # ... so often; 7 is "for ever" on some NICs
    # While work is under way and completions follow each other so closely, they are polled for; else an event is waited
    # for. 0: always. Never polled on one CPU.
    rdma_spin_s: float = 50e-6

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, checks.setting(each.name, str(each.type), getattr(self, each.name)))
        if not self.transports:
            raise TransferError("transports=(): name at least one", field="transports")
        for name in self.transports:
            if name == AUTO and len(self.transports) > 1:
                raise TransferError(f"transports={','.join(self.transports)!r}: auto stands alone", field="transports")
            if name != AUTO:
                registry.find(name)
            if self.transports.count(name) > 1:
                raise TransferError(f"transports={','.join(self.transports)!r}: names must differ", field="transports")
        for key in ("port", "rdma_port"):
            checks.whole(key, getattr(self, key), 0, 65535)
        checks.whole("tcp_socket_bytes", self.tcp_socket_bytes, 0, 1 << 30)
        if not self.fence_grace_s >= 0:
            raise TransferError(f"fence_grace_s={self.fence_grace_s!r}: must not be negative", field="fence_grace_s")
        for name in self.nics:
            if not name or self.nics.count(name) > 1:
                raise TransferError(f"nics={','.join(self.nics)!r}: names must differ and not be empty", field="nics")
        for name in self.tcp_nics:
            if not name or self.tcp_nics.count(name) > 1:
                raise TransferError(
                    f"tcp_nics={','.join(self.tcp_nics)!r}: names must differ and not be empty", field="tcp_nics"
                )
        files = {key: getattr(self, key) for key in ("tls_cert", "tls_key", "tls_ca")}
        if any(files.values()) or self.tls_server_name:
            for key, path in files.items():
                if not path:
                    raise TransferError(f"{key}='': TLS of tcp needs tls_cert, tls_key and tls_ca", field=key)
        self._check_rdma()
        if self.huge_pages not in ("auto", "hugetlb", "never"):
            raise TransferError(f"huge_pages={self.huge_pages!r}: not auto, hugetlb or never", field="huge_pages")
        if not 0 <= self.shm_copy_threads <= 64:
            raise TransferError(f"shm_copy_threads={self.shm_copy_threads}: not in 0..64", field="shm_copy_threads")
        for key in ("shm_slice_bytes", "tcp_slice_bytes"):
            if not 4096 <= getattr(self, key) <= 16 << 20:
                raise TransferError(f"{key}={getattr(self, key)!r}: not in 4096..16777216", field=key)
        for key in (
            "tcp_streams",
            "max_endpoints",
            "max_attempts",
            "max_sendings",
            "trip_errors",
            "probe_bytes",
            "nic_inflight_bytes",
            "verify_attempts",
        ):
            if getattr(self, key) < 1:
                raise TransferError(f"{key}={getattr(self, key)!r}: must be at least 1", field=key)
        for key in (
            "connect_timeout_s",
            "tcp_user_timeout_s",
            "tcp_idle_s",
            "ack_timeout_s",
            "request_timeout_s",
            "backoff_s",
            "rest_s",
            "rest_cap_s",
            "trip_window_s",
            "close_timeout_s",
        ):
            if not getattr(self, key) > 0:
                raise TransferError(f"{key}={getattr(self, key)!r}: must be positive", field=key)
        for key in ("prefetch_share", "background_share"):
            if not 0 < getattr(self, key) <= 1:
                raise TransferError(f"{key}={getattr(self, key)!r}: not in (0, 1]", field=key)
        listens = not {"rdma", "tcp", AUTO}.isdisjoint(self.transports)
        if self.host in ("0.0.0.0", "::", "") and listens and not self.advertise_host:
            raise TransferError(f"advertise_host='': needed when host is {self.host!r}", field="advertise_host")

    def _check_rdma(self) -> None:
        for key, least, most in (
            ("rdma_slice_bytes", 4096, 4 << 20),  # below the smallest "largest message" of known NICs, tail included
            ("rdma_queue_depth", 16, 8192),
            ("rdma_qps_per_rail", 1, 16),
            ("rdma_gid_index", -1, 65535),
            ("rdma_traffic_class", 0, 255),
            ("rdma_service_level", 0, 15),
            ("rdma_pkey_index", 0, 65535),
            ("rdma_ack_exponent", 1, 31),
            ("rdma_retry_cnt", 0, 6),
            ("rdma_spin_s", 0.0, 0.01),
        ):
            if not least <= getattr(self, key) <= most:
                raise TransferError(f"{key}={getattr(self, key)!r}: not in {least}..{most}", field=key)
        if self.rdma_mtu not in (0, 256, 512, 1024, 2048, 4096):
            raise TransferError(f"rdma_mtu={self.rdma_mtu!r}: not 0, 256, 512, 1024, 2048 or 4096", field="rdma_mtu")
        for pair in self.rdma_pairs:
            if len([name for name in pair.split("=") if name]) != 2 or pair.count("=") != 1:
                raise TransferError(f"rdma_pairs={pair!r}: must be LOCAL=REMOTE", field="rdma_pairs")
