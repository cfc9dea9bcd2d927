"""What a decode instance can be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.node.config import InstanceConfig
from kvmesh.rpc.errors import ConfigError
from services.decode.limits import Limits


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(InstanceConfig):
    """Fields of a decode instance. Timers of a handoff: see docs/handoff.md."""

    max_running: int = field(default=64, metadata={"help": "Requests in the batch at most."})
    max_waiting: int = field(default=256, metadata={"help": "Requests admitted but not in the batch at most."})
    queue_ms: int = field(default=60_000, metadata={"help": "Longest wait for prefill to begin, and for a landing."})
    fill_begin_ms: int = field(default=10_000, metadata={"help": "A landing that nobody begins to fill is taken back."})
    lease_ms: int = field(default=5_000, metadata={"help": "A fill without progress for so long is given up."})
    lease_margin_ms: int = field(
        default=500, metadata={"help": "The writer is told a lease shorter by this than decode's own timer."}
    )
    drain_ms: int = field(
        default=2_000, metadata={"help": "A cancelled writer has so long to drain, then it is fenced."}
    )
    batch_wait_ms: int = field(default=60_000, metadata={"help": "Longest wait of a filled request for the batch."})
    token_ms: int = field(default=30_000, metadata={"help": "A running request without a token for so long is failed."})
    watermark_percent: int = field(
        default=2, metadata={"help": "Share of the pages that landings leave free for running requests to grow."}
    )
    swap_percent: int = field(
        default=25, metadata={"help": "Share of the extents that landings leave free for preempted requests."}
    )
    lookahead_tokens: int = field(
        default=16, metadata={"help": "A page is granted so many tokens before it is needed."}
    )
    landing: str = field(
        default="auto",
        metadata={"help": "auto: into device pages where the device takes it; host: always into host extents first."},
    )
    stop_grace_ms: int = field(default=2_000, metadata={"help": "On stop, running requests have so long to finish."})
    connect_ms: int = field(default=5_000, metadata={"help": "Longest wait for a prefill instance to answer hello."})

    def limits(self) -> Limits:
        """The brain's part. Raises ConfigError naming key and value."""
        timers = ("queue_ms", "fill_begin_ms", "lease_ms", "drain_ms", "batch_wait_ms", "token_ms", "connect_ms")
        for key in ("max_running", *timers):
            if getattr(self, key) < 1:
                raise _bad(key, getattr(self, key), "at least 1")
        for key in ("max_waiting", "lease_margin_ms", "lookahead_tokens", "stop_grace_ms"):
            if getattr(self, key) < 0:
                raise _bad(key, getattr(self, key), "not negative")
        if self.landing not in ("auto", "host"):
            raise _bad("landing", self.landing, "auto or host")
        if self.lease_margin_ms >= self.lease_ms:
            raise _bad("lease_margin_ms", self.lease_margin_ms, f"below lease_ms={self.lease_ms}")
        for key in ("watermark_percent", "swap_percent"):
            if not 0 <= getattr(self, key) <= 90:
                raise _bad(key, getattr(self, key), "between 0 and 90")
        return Limits(
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            queue_ms=self.queue_ms,
            fill_begin_ms=self.fill_begin_ms,
            lease_ms=self.lease_ms,
            lease_margin_ms=self.lease_margin_ms,
            drain_ms=self.drain_ms,
            batch_wait_ms=self.batch_wait_ms,
            token_ms=self.token_ms,
            watermark_percent=self.watermark_percent,
            swap_percent=self.swap_percent,
            lookahead_tokens=self.lookahead_tokens,
        )


def _bad(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{key}={value!r}: {why}", field=key)
