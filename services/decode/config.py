"""This module has the settings of a decode instance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from kvmesh.errors import ConfigError
from kvmesh.instance.config import InstanceConfig
from kvmesh.ranks.speculation import NO_DRAFTS, SPECULATE, check_draft_folder, check_speculation
from kvmesh.services.decode.limits import Limits

_MS = {"min": 1}
_COUNT = {"min": 0}
_PERCENT = {"min": 0, "max": 90}


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(InstanceConfig):
    """Has the settings of a decode instance. docs/internals/handoff.md says what its timers bound."""

    max_running: int = field(
        default=0,
        metadata={"help": "Requests in the batch at most; 0: by device, 64 on a CPU, 256 on a GPU.", **_COUNT},
    )
    max_waiting: int = field(
        default=256, metadata={"help": "Requests admitted but not in the batch at most.", **_COUNT}
    )
    queue_ms: int = field(
        default=60_000, metadata={"help": "Longest wait for prefill to begin, and for a landing.", **_MS}
    )
    fill_begin_ms: int = field(
        default=10_000, metadata={"help": "A landing that nobody begins to fill is taken back.", **_MS}
    )
    lease_ms: int = field(default=5_000, metadata={"help": "A fill without progress for so long is given up.", **_MS})
    lease_margin_ms: int = field(
        default=500, metadata={"help": "The writer is told a lease shorter by this than decode's own timer.", **_COUNT}
    )
    drain_ms: int = field(
        default=2_000, metadata={"help": "A cancelled writer has so long to drain, then it is fenced.", **_MS}
    )
    batch_wait_ms: int = field(
        default=60_000, metadata={"help": "Longest wait of a filled request for the batch.", **_MS}
    )
    token_ms: int = field(
        default=30_000, metadata={"help": "A running request without a token for so long is failed.", **_MS}
    )
    watermark_percent: int = field(
        default=2,
        metadata={"help": "Share of the pages that landings leave free for running requests to grow.", **_PERCENT},
    )
    swap_percent: int = field(
        default=25,
        metadata={"help": "Share of the extents that landings leave free for preempted requests.", **_PERCENT},
    )
    lookahead_tokens: int = field(
        default=16, metadata={"help": "A page is granted so many tokens before it is needed.", **_COUNT}
    )
    landing: str = field(
        default="auto",
        metadata={
            "help": "auto: into device pages where the device takes it; host: always into host extents first.",
            "choices": ("auto", "host"),
        },
    )
    stop_grace_ms: int = field(
        default=2_000, metadata={"help": "On stop, running requests have so long to finish.", **_COUNT}
    )
    local_prefill_tokens: int = field(
        default=0,
        metadata={
            "help": "Prompts with at most so many tokens that are not cached may be computed by this instance itself; "
            "0: none.",
            **_COUNT,
        },
    )
    speculate: str = field(
        default=NO_DRAFTS,
        metadata={
            "help": "Guess tokens and verify several in one step (docs/howto/speculate.md): ngram copies from a "
            "request's own text, suffix from answers to the same prompt, too; mtp asks the model's MTP head, draft a "
            "small model (draft_model); mtp+ngram, mtp+suffix, draft+ngram and draft+suffix ask it where copying finds "
            "nothing as good; off: one token a step.",
            "choices": SPECULATE,
        },
    )
    max_draft_tokens: int = field(
        default=7,
        metadata={"help": "Tokens that are guessed for one request in one step at most.", "min": 1, "max": 7},
    )
    draft_model: str = field(
        default="",
        metadata={
            "help": "Folder of the model that drafts where speculate says draft: of any family that is served and "
            "keeps no states, with the same tokenizer.",
            "metavar": "FOLDER",
        },
    )
    connect_ms: int = field(
        default=5_000, metadata={"help": "Longest wait for a prefill instance to answer hello.", **_MS}
    )

    def limits(self) -> Limits:
        """Returns the settings that the brain decides by; `max_running` 0 is none yet (`Front.settled`). Raises
        ConfigError naming key and value if a value is out of its range (a config need not have come from a loader that
        checks it)."""
        for f in dataclasses.fields(self):
            value, meta = getattr(self, f.name), f.metadata
            if "min" in meta and not value >= meta["min"]:
                raise _bad(f.name, value, f"at least {meta['min']}")
            if "max" in meta and not value <= meta["max"]:
                raise _bad(f.name, value, f"at most {meta['max']}")
            if "choices" in meta and value not in meta["choices"]:
                raise _bad(f.name, value, f"one of {', '.join(map(str, meta['choices']))}")
        if self.speculate != NO_DRAFTS:
            check_speculation(self.speculate, self.axes)
        check_draft_folder(self.speculate, self.draft_model)
        if self.lease_margin_ms >= self.lease_ms:
            raise _bad("lease_margin_ms", self.lease_margin_ms, f"below lease_ms={self.lease_ms}")
        return Limits(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Limits)})


def _bad(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{key}={value!r}: must be {why}", field=key)
