"""This module has the settings of a prefill instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmesh.chunk_pipeline import ChunkCost
from kvmesh.errors import ConfigError
from kvmesh.instance.config import InstanceConfig
from kvmesh.kvcache.cache_groups import CacheGroup, snapshot_grid
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.planner import PlanConfig

MAX_SIZE_WEIGHT = 1000.0  # beyond, sizes alone decide


@dataclass(frozen=True, kw_only=True)
class PrefillConfig(InstanceConfig):
    """Has the settings of a prefill instance. Tokens are prompt tokens that are not in the prefix cache."""

    prefill_chunk_tokens: int = field(
        default=0,
        metadata={
            "help": "Tokens of one request in one step at most (one block at least); 0: by device, 512 on a CPU, 2,048 "
            "to 8,192 on a GPU by its memory.",
            "min": 0,
        },
    )
    max_batch_tokens: int = field(
        default=0,
        metadata={"help": "Tokens of all short requests in one step at most; 0: as prefill_chunk_tokens.", "min": 0},
    )
    long_prompt_tokens: int = field(
        default=512, metadata={"help": "A request with more tokens to compute runs alone in its steps.", "min": 0}
    )
    pipeline_depth: int = field(
        default=2,
        metadata={
            "help": "Steps at the ranks, and one more for each further stage: with 2 they never wait for the front.",
            "min": 1,
        },
    )
    max_queued: int = field(
        default=1024, metadata={"help": "Waiting requests; more are refused as overloaded.", "min": 0}
    )
    priority_step_ms: int = field(
        default=30_000, metadata={"help": "Waiting this long outweighs one step of priority.", "min": 1}
    )
    tenant_fairness: bool = field(
        default=True,
        metadata={
            "help": "Where prompts of several tenants (API keys) wait, whoever had the fewest uncached tokens over its "
            "weight goes first; off: by arrival, priority and size alone."
        },
    )
    size_weight: float = field(
        default=16.0,
        metadata={
            "help": "Short requests go first: who comes later than so many times a request's predicted computing time "
            "after it does not go before it. 0: by arrival, long and short ones taking turns.",
            "min": 0,
        },
    )
    stop_grace_ms: int = field(
        default=2_000, metadata={"help": "On stop, running handoffs have so long to finish.", "min": 0}
    )
    push: str = field(
        default="layers",
        metadata={
            "help": "layers: each layer's KV goes to decode while the next one is computed; end: all of it after the "
            "prompt, for comparison.",
            "choices": ("layers", "end"),
        },
    )

    def check(self) -> None:
        """Checks the values' ranges. Raises ConfigError naming key and value."""
        for key in ("pipeline_depth", "priority_step_ms", "pull_timeout_ms"):
            if getattr(self, key) < 1:
                raise _bad(key, getattr(self, key), "at least 1")
        for key in ("prefill_chunk_tokens", "max_batch_tokens", "long_prompt_tokens", "max_queued", "stop_grace_ms"):
            if getattr(self, key) < 0:
                raise _bad(key, getattr(self, key), "not negative")
        if not 0 <= self.size_weight <= MAX_SIZE_WEIGHT:
            raise _bad("size_weight", self.size_weight, f"between 0 and {MAX_SIZE_WEIGHT:g}")
        if self.push not in ("layers", "end"):
            raise _bad("push", self.push, "layers or end")

    def brain(
        self,
        *,
        max_context_tokens: int,
        vocab_size: int,
        world: int,
        layouts: tuple[ShardLayout, ...] = (),
        groups: tuple[CacheGroup, ...] = (),
        chunk_cost: ChunkCost | None = None,
    ) -> BrainConfig:
        """Returns the settings that the brain decides by, of a configuration whose sizes of steps are chosen
        (`Front.settled`). `groups` are the model's cache groups, where its ranks keep them apart; `chunk_cost` is what
        chunks cost by the model's sizes, which a pipeline cuts prompts by."""
        chunk, axes = max(self.prefill_chunk_tokens, self.block_tokens), self.axes
        plan = PlanConfig(
            block_tokens=self.block_tokens,
            prefill_chunk_tokens=chunk,
            max_batch_tokens=max(self.max_batch_tokens, chunk),
            long_prompt_tokens=self.long_prompt_tokens,
            pipeline_depth=self.pipeline_depth + axes.pp - 1,
            priority_step_ns=self.priority_step_ms * 1_000_000,
            size_weight=self.size_weight,
            fair=self.tenant_fairness,
            grid=snapshot_grid(groups, self.block_tokens),
            chunk_cost=chunk_cost if axes.pp > 1 else None,
            stages=axes.pp,
        )
        speakers = range(0, axes.replica, axes.cp * axes.tp) if axes.pp > 1 else range(0)
        return BrainConfig(
            plan=plan,
            max_context_tokens=max_context_tokens,
            vocab_size=vocab_size,
            max_queued=self.max_queued,
            world=world,
            layouts=layouts,
            pull_timeout_ms=self.pull_timeout_ms,
            push_at_end=self.push == "end",
            groups=groups,
            stages={rank: axes.place(rank).pp for rank in speakers},
        )


def _bad(key: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{key}={value!r}: {why}", field=key)
