"""Plays transcripts against the prefill brain: commands in, what it answers out.

A transcript is a text file of blocks: command lines, a line `----`, the expected output, an empty line. Lines that
begin with `#` are comments. Times are milliseconds. A prompt is written as its blocks: `abc+2` stands for three
full blocks with the contents a, b, c, and two more tokens; two prompts share a prefix where their letters agree.
Hints are written `pulls=0-2@A,2-5@B:ssd`: blocks [0, 2) lie at A, [2, 5) on the SSD of B. `below a ab`: what lies on
the own SSD from now on. `pull_after=50`: hints are to be followed so many milliseconds later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from kvmesh.clock import Tick
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.page_pool import PagePool
from kvmesh.kvcache.sources import Pulled, PullJob, PullRange
from kvmesh.kvcache.tiers import Tier
from kvmesh.ranks import protocol as m
from kvmesh.services.prefill import events as ev
from kvmesh.services.prefill.checks import BrainConfig
from kvmesh.services.prefill.planner import PlanConfig
from kvmesh.services.prefill.state import PrefillState
from kvmesh.transfer import TrafficClass
from tests.support.lower import Below

MS = 1_000_000
BOOT_NS = 5_000 * MS  # a monotonic clock does not begin at 0
DEFAULTS = {"pages": 8, "block": 4, "chunk": 12, "batch": 24, "long": 12, "depth": 2, "context": 64, "queued": 8}
DEFAULTS |= {"extents": 0, "patience": 200, "ranks": 1}  # without extents nothing is sealed


def prompt(text: str, block: int) -> tuple[tuple[int, ...], tuple[bytes, ...]]:
    """Token ids and block keys of a prompt written as `abc+2`."""
    blocks, _, more = text.partition("+")
    tokens = [ord(letter) for letter in blocks for _ in range(block)] + [1] * int(more or 0)
    return tuple(tokens), tuple(blocks[: i + 1].encode() for i in range(len(blocks)))


def make_state(**limits: int) -> PrefillState:
    """A brain with the limits of DEFAULTS unless told otherwise; `patience`: milliseconds that a pull may take."""
    c = DEFAULTS | limits
    plan = PlanConfig(
        block_tokens=c["block"],
        prefill_chunk_tokens=c["chunk"],
        max_batch_tokens=c["batch"],
        long_prompt_tokens=c["long"],
        pipeline_depth=c["depth"],
        priority_step_ns=1000 * MS,
    )
    config = BrainConfig(
        plan=plan,
        max_context_tokens=c["context"],
        vocab_size=256,
        max_queued=c["queued"],
        world=c["ranks"],
        pull_timeout_ms=c["patience"],
    )
    return PrefillState(config, PagePool(c["pages"]), NodeStore(c["extents"], high_percent=100, low_percent=100))


def ranges(text: str) -> tuple[PullRange, ...]:
    """Hints written as `0-2@A,2-5@B`."""
    found = []
    for part in filter(None, text.split(",")):
        blocks, _, holder = part.partition("@")
        holder, _, tier = holder.partition(":")
        first, end = map(int, blocks.split("-"))
        found.append(PullRange(holder, f"{holder}:1", 1, first, end - first, Tier[tier.upper() or "DRAM"]))
    return tuple(found)


@dataclass
class Player:
    """One brain, one clock, the steps that are at the rank."""

    state: PrefillState = field(default_factory=make_state)
    now_ms: int = 0
    steps: dict[int, m.PrefillStep] = field(default_factory=dict)
    jobs: dict[int, PullJob] = field(default_factory=dict)
    block: int = DEFAULTS["block"]
    given: list[int] = field(default_factory=list)  # pages that decode has adopted

    @property
    def now(self) -> int:
        """Monotonic nanoseconds."""
        return BOOT_NS + self.now_ms * MS

    def play(self, line: str) -> Iterator[str]:
        """Output lines of one command line."""
        name, *words = line.split()
        plain = [w for w in words if "=" not in w]
        given = dict(w.split("=", 1) for w in words if "=" in w)
        if name == "config":
            self.block = int(given.get("block", DEFAULTS["block"]))
            self.state = make_state(**{k: int(v) for k, v in given.items()})
        elif name == "at":
            assert int(plain[0]) >= self.now_ms, "time goes forward"
            self.now_ms = int(plain[0])
        elif name == "below":
            below = self.state.lower = Below()
            below.keys.update(word.encode() for word in words)
        elif name == "show":
            yield from self.show()
        elif name == "released":  # by decode, which had adopted them
            self.state.pool.release(self.given)
            self.given.clear()
        else:
            event = EVENTS[name](self, plain, given)
            yield from (self.describe(a) for a in self.state.step(event, self.now))
        self.state.check_integrity(self.given)

    def show(self) -> Iterator[str]:
        """Every handoff and the pool."""
        for h in self.state.handoffs.values():
            parts = [f"handoff {h.handle} {h.phase.value}", f"computed={h.computed_tokens}/{h.prompt_tokens}"]
            parts += [f"pages={','.join(map(str, h.pages)) or '-'}", f"push={h.pushes[0].value}"]
            parts += [f"steps={','.join(map(str, sorted(h.steps)))}"] if h.steps else []
            parts += [f"lease..{ms(h.lease.until_ns)}"] if h.lease else []
            parts += [f"pull..{ms(h.pull_at_ns)}"] if h.pull_at_ns else []
            parts += [f"pulls={','.join(map(str, sorted(h.pulls)))}"] if h.pulls else []
            parts += [f"pinned={','.join(map(str, sorted(h.pinned)))}"] if h.pinned else []
            parts += [f"loading={h.loading}"] if h.loading else []
            yield " ".join(parts)
        pool, cache, load = self.state.pool, self.state.cache, self.state.load()
        yield f"pages free={pool.free} idle={cache.evictable} of {pool.total}; waiting={load.queued_requests}"
        store = self.state.store
        if store.stats.sealed or store.stats.writing:
            keys = store.keys()
            blocks = " ".join(sorted(key.decode() for key in keys)) or "none"
            yield f"extents free={store.free} writing={store.stats.writing} of {store.total}; sealed: {blocks}"

    def describe(self, action: ev.Action) -> str:
        """One readable line."""
        match action:
            case m.TellRank(_, m.PrefillStep() as step):
                self.steps[step.step_id] = step
                return f"rank: step {step.step_id}: " + "; ".join(self.item(i) for i in step.items)
            case m.TellRank(_, m.PushOpen() as o):
                return (
                    f"rank: push {o.handle} epoch={o.handoff_epoch} pages={','.join(map(str, o.pages))} "
                    f"first_block={o.first_block} ready={o.ready_tokens}/{o.prompt_tokens} until={ms(o.lease_until_ns)}"
                )
            case m.TellRank(_, m.PushLease(handle, until)):
                return f"rank: lease of {handle} until={ms(until)}"
            case m.TellRank(_, m.PushCancel(handle)):
                return f"rank: cancel push {handle}"
            case m.TellRank(_, m.SealCopy(ticket, pages, extents)):
                return f"rank: seal {ticket} pages={commas(pages)} extents={commas(extents)}"
            case m.TellRank(_, m.LoadCopy(ticket, extents, pages)):
                return f"rank: load {ticket} extents={commas(extents)} pages={commas(pages)}"
            case ev.FetchBlocks(job):
                self.jobs[job.ticket] = job
                keys = ",".join(key.decode() for key in job.keys)
                where = ",".join(f"{r.first_block}-{r.first_block + r.blocks}@{r.instance_id}" for r in job.ranges)
                return (
                    f"pull {job.ticket}: {keys} blocks={commas(job.blocks)} extents={commas(job.extents)} "
                    f"from {where} timeout={job.timeout_ms}"
                ) + ("" if job.traffic_class == TrafficClass.HANDOFF else " prefetch")
            case ev.CancelPull(ticket):
                return f"cancel pull {ticket}"
            case ev.SendBeginFill(handle, blocks, _):
                return f"decode: {handle} BeginFill blocks={blocks}"
            case ev.SendRenew(handle, epoch, done):
                return f"decode: {handle} RenewLease epoch={epoch} bytes={done}"
            case ev.SendFirstToken(handle, sampled, found, queue, prefill):
                times = f"queue={queue // MS} prefill={prefill // MS}"
                times += f" pull={found.pull_ns // MS} pull_bytes={found.pull_bytes}" if found.pull_from_ns else ""
                parts = (found.device_tokens, found.host_tokens, found.pulled_tokens)
                below = f" of which {found.lower_tokens} from below" if found.lower_tokens else ""
                where = f" (device {parts[0]}, host {parts[1]}{below}, pulled {parts[2]})" if any(parts[1:]) else ""
                return f"decode: {handle} FirstToken {sampled.token_id} cached={found.cached_tokens}{where} {times}"
            case ev.SendAdopted(handle, first, pages):
                self.given += pages
                token, cached = first.sampled.token_id, first.found.cached_tokens
                return f"decode: {handle} Adopted {token} cached={cached} pages={commas(pages)}"
            case ev.SendFillDone(handle, epoch, took, size, exposed):
                return f"decode: {handle} FillDone epoch={epoch} bytes={size} took={took // MS} exposed={exposed // MS}"
            case ev.SendDrained(handle, epoch):
                return f"decode: {handle} Drained epoch={epoch}"
            case ev.SendFailed(handle, error, drained):
                again = " retryable" if error.retryable else ""
                return (
                    f"decode: {handle} Failed drained={'yes' if drained else 'NO'}{again} {error.code}: {error.message}"
                )
            case ev.HandoffEnded():
                cause = f" ({action.cause})" if action.cause else ""
                return f"end of {action.handle}: {action.outcome.value}{cause}"
            case _:
                raise AssertionError(f"no description of {action}")

    @staticmethod
    def item(item: m.PrefillItem) -> str:
        sample = " sample" if item.sample else ""
        end = item.start + len(item.token_ids)
        return f"{item.handle} [{item.start}..{end}) pages={','.join(map(str, item.pages))}{sample}"


def commas(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def ms(monotonic_ns: int) -> int:
    """Milliseconds on the transcript's clock."""
    return (monotonic_ns - BOOT_NS) // MS


Make = Callable[[Player, list[str], dict[str, str]], ev.Event]


def _start(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    tokens, keys = prompt(g["prompt"], p.block)
    deadline = p.now + int(g["deadline"]) * MS if "deadline" in g else 0
    sampling = m.Sampling(0.0, 1.0, 0, 0)
    stream, priority = int(g.get("stream", 1)), int(g.get("priority", 0))
    hints = ranges(g.get("pulls", ""))
    adopt, later = g.get("adopt") == "yes", int(g.get("pull_after", 0))
    at = p.now + later * MS if later else 0
    name = f"r{a[0]}"
    return ev.Start(
        int(a[0]), stream, name, tokens, keys, sampling, deadline, priority, hints, adopt=adopt, pull_at_ns=at
    )


def _landing(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    handle = int(a[0])
    known = p.state.handoffs.get(handle)
    blocks = int(g.get("blocks", len(known.pages) if known else 1))
    offsets, first = tuple(range(0, blocks * 100, 100)), int(g.get("first_block", 0))
    ranks = tuple(ev.RankLanding(rank, "decode", offsets, first) for rank in range(int(g.get("ranks", 1))))
    return ev.Landing(handle, int(g.get("epoch", 7)), int(g.get("lease", 1000)), ranks)


def _done(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    step = p.steps[int(a[0])]
    without = {int(h) for h in g.get("without", "0").split(",")}
    sampled = tuple(m.Sampled(i.handle, 100 + i.handle) for i in step.items if i.sample and i.handle not in without)
    start, end = p.now - int(g.get("took", 0)) * MS, p.now
    return m.FromRank(int(g.get("rank", 0)), m.PrefillStepDone(step.step_id, start, end, sampled))


def _error(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    step = p.steps[int(a[0])]
    only = [int(h) for h in g["only"].split(",")] if "only" in g else [i.handle for i in step.items]
    return m.FromRank(0, m.RankError(tuple(only), "out of memory"))


def _pushed(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    post = p.now - int(g.get("took", 0)) * MS
    rank = int(g.get("rank", 0))
    return m.FromRank(rank, m.PushDone(int(a[0]), int(g.get("epoch", 7)), post, p.now, int(g.get("bytes", 999))))


def _push_failed(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    cause = g.get("cause", "path-broken")
    return m.FromRank(0, m.PushFailed(int(a[0]), int(g.get("epoch", 7)), cause, g.get("drained", "yes") == "yes"))


def _pulled(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
    job = p.jobs.pop(int(a[0]))
    arrived = tuple(n for n, block in enumerate(job.blocks) if str(block) in g.get("blocks", "").split(","))
    if g.get("blocks") == "all":
        arrived = tuple(range(len(job.blocks)))
    cause = "" if len(arrived) == len(job.blocks) else "gone"
    own = tuple(n for n in arrived if str(job.blocks[n]) in g.get("own", "").split(","))
    return Pulled(job.ticket, arrived, 100 * (len(arrived) - len(own)), 0, cause, own)


def _copied(kind: type[m.SealCopied] | type[m.LoadCopied]) -> Make:
    def make(p: Player, a: list[str], g: dict[str, str]) -> ev.Event:
        said = kind(int(a[0]), p.now - int(g.get("took", 0)) * MS, p.now)
        if isinstance(said, m.SealCopied) and "bad" in g:  # positions whose KV is not finite
            said = msgspec.structs.replace(said, bad=tuple(map(int, g["bad"].split(","))))
        return m.FromRank(int(g.get("rank", 0)), said)

    return make


EVENTS: dict[str, Make] = {
    "start": _start,
    "landing": _landing,
    "renewed": lambda p, a, g: ev.Renewed(int(a[0]), int(g.get("epoch", 7)), int(g.get("lease", 1000))),
    "cancel": lambda p, a, g: ev.HandoffCancelled(int(a[0]), " ".join(a[1:]) or "client-left"),
    "broken": lambda p, a, g: ev.StreamBroken(int(a[0])),
    "done": _done,
    "error": _error,
    "progress": lambda p, a, g: m.FromRank(int(g.get("rank", 0)), m.PushProgress(int(a[0]), int(a[1]))),
    "pushed": _pushed,
    "push-failed": _push_failed,
    "drained": lambda p, a, g: m.FromRank(0, m.PushDrained(int(a[0]), g.get("certain", "yes") == "yes")),
    "pulled": _pulled,
    "sealed": _copied(m.SealCopied),
    "loaded": _copied(m.LoadCopied),
    "lost": lambda p, a, g: ev.RankLost(0, "rank 0 ended, exit status -9"),
    "silent": lambda p, a, g: ev.RanksSilent("rank 0 has been silent for 5.1 s"),
    "back": lambda p, a, g: ev.RanksBack(),
    "stop": lambda p, a, g: ev.Stop(),
    "doors": lambda p, a, g: ev.Doors(remote=g.get("remote", ""), own=g.get("own", "")),
    "tick": lambda p, a, g: Tick(),
}


def replay(text: str) -> str:
    """The transcript with the outputs that the brain gives now."""
    player = Player()
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.split("----")[0].rstrip("\n").splitlines()
        commands = [line for line in lines if not line.startswith("#")]
        said = [answer for command in commands for answer in player.play(command)]
        blocks.append("\n".join([*lines, "----", *(said or ["nothing"])] if commands else lines))
    return "\n\n".join(blocks) + "\n"


# ── prompts whose own tokens are scored ───────────────────────────────────────────────────────────


def sampling_of(handle: int) -> m.Sampling:
    """Greedy; every fourth request wants its prompt scored."""
    return m.Sampling(0, 1, 0, 0, prompt_logprobs=0 if handle % 4 == 0 else -1)


def scores_of(step: m.PrefillStep, bad: Collection[int] = ()) -> tuple[tuple[int, m.PromptScores], ...]:
    """What a rank says of the tokens after those of a step: their own ids stand for ranks."""
    found = []
    for item in step.items:
        if item.scores >= 0 and item.handle not in bad:
            after = [item.next_token] if item.next_token >= 0 else []
            found.append((item.handle, m.PromptScores(ranks=pack_tokens([*item.token_ids[1:], *after]))))
    return tuple(found)


def check_scores(start: ev.Start, first: ev.SendFirstToken) -> None:
    """Every token of the prompt but the first is scored once, in order, if that was asked for."""
    if start.sampling.prompt_logprobs < 0:
        assert first.prompt_scores is None
        return
    assert first.prompt_scores == m.PromptScores(ranks=pack_tokens(start.token_ids[1:]))
    assert not first.found.cached_tokens
