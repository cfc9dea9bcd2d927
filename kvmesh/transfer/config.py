"""What a transfer engine can be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvmesh.rpc.errors import TransferError

KNOWN_TRANSPORTS = ("shm", "tcp")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes in bytes, times in seconds.

    `transports` in order of preference; the next is taken when one cannot reach a peer or fails. `fault` is the JSON
    of `kvmesh.transfer.fault` ("" = no faults; tests only). A request is TIMEOUT after `request_timeout_s`; a path on
    which nothing was acknowledged for `ack_timeout_s` is given up and its slices go over another.
    """

    transports: tuple[str, ...] = ("shm", "tcp")
    host: str = "127.0.0.1"  # tcp listens here: an address or name, IPv4 or IPv6
    port: int = 0  # 0 picks a free one
    advertise_host: str = ""  # what peers connect to; "" = host
    shm_dir: str = ""  # folder of the unix-domain socket; "" = Linux's abstract namespace
    shm_slice_bytes: int = 1 << 20
    tcp_slice_bytes: int = 256 << 10
    tcp_streams: int = 2  # per peer and direction
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
    nic_inflight_bytes: int = 32 << 20  # posted over one local NIC, to all peers, before it answers
    prefetch_share: float = 0.10  # what PREFETCH gets beside more urgent bytes that keep a NIC busy, of those
    background_share: float = 0.05  # the same for BACKGROUND
    verify_attempts: int = 3  # sendings of a slice whose checksum differs, before it is FAILED
    fence_grace_s: float = 0.02  # a fence lets a slice end by itself so long, then cuts its connection
    close_timeout_s: float = 5.0
    fault: str = ""
    # Use only these NICs: an RDMA device ("mlx5_0") concerns rdma, a network interface ("eth1") tcp; each transport
    # takes the names that are its own. () = rdma: every active port; tcp: no choice, `host` alone.
    nics: tuple[str, ...] = ()
    # Which NICs each memory location prefers (`kvmesh.transfer.topology`): JSON, or the path of a file of it;
    # "" = as found in /sys.
    topology: str = ""

    def __post_init__(self) -> None:
        if not self.transports:
            raise TransferError("transports=(): name at least one", field="transports")
        for name in self.transports:
            if name not in KNOWN_TRANSPORTS:
                raise TransferError(
                    f"transports={name!r}: not one of {', '.join(KNOWN_TRANSPORTS)}", field="transports"
                )
        for name in self.nics:
            if not name or self.nics.count(name) > 1:
                raise TransferError(f"nics={','.join(self.nics)!r}: names must differ and not be empty", field="nics")
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
        if self.host in ("0.0.0.0", "::", "") and "tcp" in self.transports and not self.advertise_host:
            raise TransferError(f"advertise_host='': needed when host is {self.host!r}", field="advertise_host")
