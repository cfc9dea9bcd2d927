"""What an instance whose operator named no sizes gets: dtype, sizes of steps, pages. Pure: numbers in, settings out.

Whatever is named wins. What is not goes by the device: `kind` is "cpu" or "cuda".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.engine.config import ModelConfig
from kvmesh.engine.config_latent import PARTIAL_BYTES, written_out_bytes
from kvmesh.errors import ConfigError

AUTO = "auto"
# Configuration keys of a step's sizes; 0: by device. A role has those of its own.
STEP_KEYS = ("prefill_chunk_tokens", "max_batch_tokens", "mixed_chunk_tokens", "max_running")
MIB, GIB = 1 << 20, 1 << 30

CPU_SHARE = 0.7  # of the memory that is available, for all ranks of a machine; the rest is the user's and the services'
UNKNOWN_SHARE = 0.25  # ... for one instance, where nobody says how many there are
CUDA_SHARE = 0.9  # of a GPU's memory: the rest is for libraries' workspaces, fragments and what nobody counted
DRAFT_SHARE = 4  # KV of a draft model takes no more than this part of the bytes of the model's
RANK_BYTES = 384 * MIB  # of a rank without its model: torch, buffers of the transfer engine
LIBRARY_BYTES = GIB  # of a process on a GPU beside torch's own, where others come and go while it measures
GRAPH_BYTES = 24 * MIB  # what the driver keeps of one captured step
MOST_CPU_BYTES = 8 * GIB  # of a rank's pages on a CPU: every byte is written once at the start, a second for 2 to 4 GiB
PREFILL_ROWS = 64  # prompts whose KV an instance without rows is given room for, at the longest context
LEAST_TOKENS = 1024  # an instance with room for less serves nobody


def device_kind(device: str) -> str:
    """Returns "cuda" or "cpu" for the name of a device."""
    return "cuda" if device.startswith("cuda") else "cpu"


def choose_dtype(asked: str, stored: str, kind: str, operators: bool) -> tuple[str, str]:
    """Returns the dtype to compute in and why. `stored` is the checkpoint's; `operators`: the CPU operators for
    bfloat16 are loaded."""
    if asked != AUTO:
        return asked, "as told"
    if kind == "cuda":
        return stored, "the checkpoint's"
    if stored == "bfloat16" and operators:
        return stored, "the checkpoint's, and this CPU multiplies it"
    if stored == "bfloat16":
        return "float32", "the checkpoint has bfloat16, for which the operators of this CPU are missing"
    return "float32", f"the checkpoint has {stored}; on a CPU float32 is the fastest that loses nothing"


def choose_order(asked: str, kind: str, ranks: int) -> tuple[bool, str]:
    """Returns whether a step is launched before the tokens of the one before it are read, and why. Raises ConfigError
    where several ranks are told to."""
    if asked == "on" and ranks > 1:
        raise ConfigError(f"async_steps='on': {ranks} ranks wait for each step; auto or off", field="async_steps")
    if asked != AUTO:
        return asked == "on", "as told"
    if kind == "cuda":
        return (True, "the GPU runs behind the host") if ranks == 1 else (False, "several ranks")
    return False, "a CPU runs nothing behind the host"


def choose_steps(asked: Mapping[str, int], kind: str, device_bytes: int) -> dict[str, int]:
    """Returns `asked`, sizes of steps by configuration key, with those that are 0 chosen. `device_bytes`: the GPU's
    memory."""
    if kind == "cuda":
        chunk = 8192 if device_bytes >= 60 * GIB else 4096 if device_bytes >= 30 * GIB else 2048
        usual = {"mixed_chunk_tokens": 1024 if device_bytes >= 60 * GIB else 512, "max_running": 256}
    else:
        chunk, usual = 512, {"mixed_chunk_tokens": 256, "max_running": 64}
    usual |= {"prefill_chunk_tokens": chunk, "max_batch_tokens": asked.get("prefill_chunk_tokens") or chunk}
    return {key: value or usual[key] for key, value in asked.items()}


def step_tokens(steps: Mapping[str, int], block_tokens: int) -> int:
    """Returns the prompt tokens of the largest step; 0 where an instance computes no prompts."""
    found = max((steps.get(key, 0) for key in ("prefill_chunk_tokens", "max_batch_tokens")), default=0)
    return max(found, block_tokens) if found else 0


def step_bytes(config: ModelConfig, tokens: int, rows: int, itemsize: int) -> int:
    """Returns an upper bound of what a step takes beside weights and KV: one layer's tensors of all tokens, and five
    copies of the rows' logits in float32 (sampling sorts them)."""
    heads = config.heads + 2 * config.kv_heads
    hidden, inner, experts = 4 * config.hidden_size, config.intermediate_size, config.experts
    if experts is not None:  # each token has rows of its own at its experts, whose answers are float32: twice as wide
        hidden = 2 * hidden + 2 * experts.chosen * config.hidden_size
        inner = max(inner, experts.shared_inner) + experts.chosen * experts.inner
    width = hidden + 3 * inner + 3 * heads * config.head_dim
    return (tokens + rows) * width * itemsize + 5 * 4 * max(rows, 1) * config.vocab_size


def latent_bytes(config: ModelConfig, tokens: int, rows: int, itemsize: int) -> int:
    """Returns what attention over latents takes on a GPU beside a step: K and V that are written out of a long context,
    and what shares of rows have found; 0 for other models. No step is known to take all of it: the trial step that is
    measured has no long context."""
    if config.latent is None:
        return 0
    return PARTIAL_BYTES + (written_out_bytes(config.latent, tokens + rows, itemsize) if tokens else 0)


def cuda_room(total: int, free: int, ranks: int) -> tuple[int, str]:
    """Returns what one of the `ranks` that share a GPU may take of it, and what that is. `free`: of its `total` memory,
    before this rank took any."""
    part = int(total * CUDA_SHARE) // ranks
    if part > free:
        return int(free * CUDA_SHARE), f"{CUDA_SHARE:.0%} of what others leave of the GPU"
    whose = f"{CUDA_SHARE:.0%} of the GPU's {total // MIB:,} MiB"
    return part, whose + (f", for one of {ranks} ranks that share it" if ranks > 1 else "")


def host_room(available: int, ranks: int, world: int, named: int) -> tuple[int, str]:
    """Returns what a rank may take of the `available` host memory, and what that is: `ranks` instances of `world` ranks
    each share it; 0: nobody said how many there are, and they may start at once. `named`: its operator, or who divided
    the memory, names it."""
    if named:
        return named, "room_mb: this rank's part of the machine's available memory"
    share = CPU_SHARE if ranks else UNKNOWN_SHARE
    whose = f"{share:.0%} of the available {available // MIB:,} MiB"
    whose += "" if ranks else ", as device_instances is not set"
    count = max(1, ranks) * world
    return int(available * share) // count, whose + (f", for one of {count} ranks" if count > 1 else "")


@dataclass(frozen=True, slots=True)
class PageNeed:
    """What decides how many pages there are: `page_bytes` of one, times `copies` where host blocks of the same number
    lie in the same memory; the model's `max_context_tokens`, and whether the operator named that number."""

    page_bytes: int
    block_tokens: int
    copies: int
    max_context_tokens: int
    context_named: bool
    rows: int

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def memory_mb(self, tokens: int) -> int:
        """Returns the `memory_mb` that holds one request of so many tokens."""
        return -(-self.pages_for(tokens) * self.page_bytes // MIB)


@dataclass(frozen=True, slots=True)
class ChosenPages:
    """How many pages a rank has, and why. Of a model that is kept by cache groups `groups` has a number for each, and
    `count` is that of group 0."""

    count: int
    why: str
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """What decides how many blocks there are of a cache group: the bytes of one, and the most that one request has of
    it at once; `peak` is None where blocks are kept for all tokens."""

    block_bytes: int
    peak: int | None


def split(nbytes: int, needs: Sequence[GroupNeed], rows: int) -> tuple[int, ...]:
    """Returns how many blocks of each group `nbytes` are cut into: for groups that give back what lies behind, and for
    states, what `rows` requests have at once, at most half of the memory and no less than one request has; for the
    others, and always for group 0, as many of each as the rest has room for. Those may be none."""
    bounded = {at: need.peak for at, need in enumerate(needs) if at and need.peak is not None}
    while True:
        whole = sum(rows * peak * needs[at].block_bytes for at, peak in bounded.items())
        share = min(1.0, nbytes / (2 * whole)) if whole else 1.0
        counts = {at: max(peak, int(rows * peak * share)) for at, peak in bounded.items()}
        rest = nbytes - sum(count * needs[at].block_bytes for at, count in counts.items())
        by_tokens = max(0, rest) // sum(need.block_bytes for at, need in enumerate(needs) if at not in bounded)
        # Whoever never has as many tokens as that has no use for more blocks of a window than of all.
        if not (wide := [at for at, count in counts.items() if count > max(by_tokens, bounded[at])]):
            return tuple(counts.get(at, by_tokens) for at in range(len(needs)))
        for at in wide:
            del bounded[at]


def named_counts(count: int, needs: Sequence[GroupNeed], rows: int) -> tuple[int, ...]:
    """Returns how many blocks of each group there are where the operator names the `count` of group 0."""
    return tuple(
        count if not at or need.peak is None else max(2, min(count, rows * need.peak)) for at, need in enumerate(needs)
    )


def longest_context(counts: Sequence[int], needs: Sequence[GroupNeed], block_tokens: int) -> int | None:
    """Returns the tokens of the longest request that so many blocks hold; None where no group keeps all."""
    full = (count for count, need in zip(counts, needs, strict=True) if need.peak is None or count < need.peak)
    return min((count * block_tokens for count in full), default=None)


def draft_pages(pages: int, page_bytes: int, draft_page_bytes: int) -> int:
    """Returns how many pages a draft model has for its KV beside so many of the model's: as many, unless they would
    take more than a DRAFT_SHARE-th of the model's bytes."""
    return max(1, min(pages, pages * page_bytes // (DRAFT_SHARE * draft_page_bytes)))


def choose_pages(room: int, taken: Mapping[str, int], need: PageNeed, source: str, most_bytes: int = 0) -> ChosenPages:
    """Returns as many pages as fit `room` bytes beside what is `taken` (bytes by what takes them), no more than every
    row at the longest context fills, and at most `most_bytes` of them, or one request of the longest context (0: no
    such bound). `source` says what the room is. Raises ConfigError, which names memory_mb and what would be needed,
    where one request does not fit."""
    left = room - sum(taken.values())
    fit = max(0, left) // (need.page_bytes * need.copies)
    full = max(1, need.rows) * need.pages_for(need.max_context_tokens) + 1
    count, bound = min((fit, "what is left"), (full, "all that the rows can fill"))
    longest = need.max_context_tokens
    most = max(most_bytes // need.page_bytes, need.pages_for(longest))
    if most_bytes and count > most:
        count, bound = most, f"at most {most * need.page_bytes // MIB:,} MiB where nobody names memory_mb"
    least = longest if need.context_named else min(longest, LEAST_TOKENS)
    beside = ", ".join(f"{what} {nbytes // MIB:,}" for what, nbytes in taken.items() if nbytes)
    if count < need.pages_for(least):
        whose = f"max_context_tokens={longest}" if need.context_named else f"a request of {least} tokens"
        missing = need.pages_for(least) * need.page_bytes * need.copies - left
        raise ConfigError(
            f"memory_mb=0: {source} gives this rank {room // MIB:,} MiB; {beside} leave room for "
            f"{count * need.block_tokens} tokens of KV, and {whose} needs {-(-missing // MIB):,} MiB more "
            f"(memory_mb={need.memory_mb(least)} for that one alone): free memory, start fewer instances, or name "
            "memory_mb or a shorter max_context_tokens",
            field="memory_mb",
        )
    why = f"{bound} of {room // MIB:,} MiB ({source}) beside {beside} MiB"
    if need.copies > 1:
        why += ", half of it for host blocks"
    if count < need.pages_for(longest):
        why += f"; the model's {longest:,} tokens of context would need memory_mb={need.memory_mb(longest):,}"
    return ChosenPages(count, why)
