"""Reads and plays the stories under tests/transcripts/handoff: commands in, what the brain did out.

A file is blocks of `command(s)`, a line `----`, the expected output, an empty line; `#` begins a comment. The commands:

    new pages=8 extents=8 block=16 direct=yes running=2 waiting=8      a fresh instance (first, once)
    start a prompt=20 max=4 [priority=0] [credit=99] [stop=7] [deadline=60000] [peer=1]
            [keys=AB: the prompt's full blocks] [chain=yes: the answer's blocks are sealed, too]
            [pull=0-1@h1,2-2@h2: decode is to fetch these blocks of the prompt] [peer=0: computed in this instance]
    have A B                    the node store holds these blocks already
    below A B                   the own SSD holds these
    remove A B | remove-from A  these are removed; all whose keys begin so
    heard 5 A B                 removal 5 of these blocks was carried out before
    begin-fill a [removed=5: the last that prefill has carried out]
    renew a bytes=10 | first-token a 42 | fill-done a | drained a | failed a drained=yes
    adopted a 42                the prompt was computed in this instance: its pages are decode's
    late begin-fill a ...       the same for a request that may be gone
    peer-lost 1 | gateway-gone | cancel a | credit a 3
    loaded a | sealed | pulled all | pulled 0,2 | pulled none | rank-lost
    opened a | ended a | fenced a | copied-in a | copied-out a | left a | stalled a | step-error a
    step a=11 b=12:stop         one decode step: tokens, and how they finish
    wait 5000                   so many ms pass, timers fire when they are due

`python -m tests.support.decode.story` rewrites every transcript from what the code does now: read the diff.
"""

from __future__ import annotations

import sys

from kvmesh.blockservice.removals import NotHere
from kvmesh.clock import Tick
from kvmesh.errors import HandoffLost, InvalidRequest, RequestCancelled, Unavailable
from kvmesh.kvcache.node_store import NodeStore
from kvmesh.kvcache.sources import Pulled, PullJob
from kvmesh.ranks import protocol as m
from kvmesh.services.decode import events as e
from kvmesh.services.decode import inputs as i
from kvmesh.services.decode.handoff import Handoff
from kvmesh.services.decode.limits import NS_PER_MS, Limits, RankShape, Shape
from kvmesh.services.decode.state import DecodeState
from tests.support.decode.words import RANK_SAYS, describe, key, pull_range
from tests.support.lower import Below
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "transcripts" / "handoff"
SESSION = 1
START_NS = 1_000_000_000_000


class Story:
    """One brain, requests known by name, the clock."""

    def __init__(self, state_class: type[DecodeState] = DecodeState) -> None:
        self.now = START_NS
        self.names: dict[str, Handoff] = {}
        self.by_handle: dict[int, str] = {}
        self.slots: dict[int, str] = {}
        self.seals: list[m.SealCopy] = []
        self.jobs: list[PullJob] = []
        self._state_class = state_class
        self._shown: dict[str, str] = {}

    # ── commands ─────────────────────────────────────────────────────────────────────────────────

    def play(self, line: str) -> list[str]:
        """One command; returns what the brain did."""
        words = line.split()
        if words[0] == "late":
            words = words[1:]
        name, positional = words[0], [w for w in words[1:] if "=" not in w]
        options = dict(w.split("=", 1) for w in words[1:] if "=" in w)
        if name == "new":
            return self._new(options)
        if name == "have":
            self._have([key(letter) for letter in positional])
            return []
        if name == "below":
            below = self.state.pulls.lower = Below()
            below.keys.update(key(letter) for letter in positional)
            return []
        if name.startswith("remove"):
            return self._remove([key(letter) for letter in positional], name == "remove-from")
        if name == "heard":
            gone = {key(letter) for letter in positional[1:]}
            self.state.refuses = lambda one, seq: one in gone and seq < int(positional[0])
            return []
        if name == "wait":
            return self._wait(int(positional[0]))
        if name == "start":
            return self._start(positional[0], options)
        return self._feed(self._input(name, positional, options))

    def _new(self, options: dict[str, str]) -> list[str]:
        def number(key: str, default: int) -> int:
            return int(options.get(key, default))

        limits = Limits(
            max_running=number("running", 4),
            max_waiting=number("waiting", 8),
            watermark_percent=number("watermark", 0),
            swap_percent=number("swap", 0),
            lookahead_tokens=number("lookahead", 0),
        )
        ranks = (RankShape(segment="d0", shard_bytes=100, page_base_offset=0, extent_base_offset=10_000),)
        shape = Shape(
            block_tokens=number("block", 16),
            num_pages=number("pages", 8),
            num_extents=number("extents", 8),
            direct_landing=options.get("direct", "yes") == "yes",
            max_context_tokens=number("context", 1_000),
            ranks=ranks,
        )
        self.store = NodeStore(shape.num_extents, high_percent=100, low_percent=100)
        self.state = self._state_class(limits, shape, self.store)
        self.state.step(i.SessionOpened(SESSION), self.now)
        for peer in (1, 2):
            self.state.step(i.PeerReady(peer, ((0, f"p{peer}"),)), self.now)
        return []

    def _have(self, keys: list[bytes]) -> None:
        assert None not in self.store.begin(keys)
        for found in keys:
            self.store.seal(found)

    def _remove(self, keys: list[bytes], prefix: bool) -> list[str]:
        found = [*self.store.keys(), *self.store.written()]
        self.store.remove([one for one in found if one.startswith(keys[0])] if prefix else keys)
        return self._feed(NotHere(frozenset(() if prefix else keys), keys[0] if prefix else None))

    def _start(self, name: str, options: dict[str, str]) -> list[str]:
        slot = len(self.slots) + 1
        self.slots[slot] = name
        prompt, block = int(options.get("prompt", "20")), self.state.shape.block_tokens
        chain = options.get("chain") == "yes"
        spec = e.Spec(
            request_id=name,
            prompt_tokens=prompt,
            max_tokens=int(options.get("max", "4")),
            deadline_ns=self.now + int(options.get("deadline", "600000")) * NS_PER_MS,
            stop_token_ids=tuple(int(t) for t in options.get("stop", "").split(",") if t),
            priority=int(options.get("priority", "0")),
            credit_tokens=int(options.get("credit", "99")),
            block_keys=tuple(key(letter) for letter in options.get("keys", "")),
            chain_digest=name.encode().ljust(32) if chain else b"",
            tail=bytes(4 * (prompt % block)) if chain else b"",
            pulls=tuple(pull_range(text) for text in options.get("pull", "").split(",") if text),
            load_until=int(options["until"]) if "until" in options else None,
        )
        before = set(self.state.requests)
        outputs = self.state.step(i.Admit(SESSION, slot, int(options.get("peer", "1")), spec, self.now), self.now)
        for handle in set(self.state.requests) - before:
            self.names[name] = self.state.requests[handle]
            self.by_handle[handle] = name
        return self._tell(outputs)

    def _input(self, name: str, positional: list[str], options: dict[str, str]) -> i.Input:
        match name:
            case "peer-lost":
                return i.PeerGone(int(positional[0]), "connection reset")
            case "gateway-gone":
                return i.SessionClosed(SESSION, "connection reset")
            case "cancel":
                return i.CancelSlot(SESSION, self._slot(positional[0]), RequestCancelled("the client went away"))
            case "credit":
                return i.AddCredit(SESSION, self._slot(positional[0]), int(positional[1]))
            case "rank-lost":
                return i.EndAll(Unavailable("a rank died"), lost=True)
            case "sealed":
                bad = tuple(int(n) for n in options.get("bad", "").split(",") if n)
                return m.FromRank(0, m.SealCopied(self.seals.pop(0).ticket, 1, 2, bad))
            case "pulled":
                return self._pulled(positional[0])
            case "step":
                return m.FromRank(0, self._decode_step(options))
        h = self.names[positional[0]]
        if name == "adopted":
            pages = tuple(self.state.scheduler.pages.allocate(h.prompt_blocks))  # that prefill took
            first = e.FirstToken(int(positional[1]), None, 0)
            return i.FromPrefill(i.OWN_PEER, h.handle, e.Adopted(first, pages))
        if name in RANK_SAYS:
            return m.FromRank(0, RANK_SAYS[name](h))
        return i.FromPrefill(h.peer, h.handle, self._from_prefill(name, h, positional, options))

    def _pulled(self, what: str) -> Pulled:
        job = self.jobs.pop(0)
        if what == "all":
            own = tuple(
                at for at, k in enumerate(job.keys) if self.state.pulls.lower and self.state.pulls.lower.holds(k)
            )
            return Pulled(job.ticket, tuple(range(len(job.keys))), 100, 2, lower=own)
        arrived = () if what == "none" else tuple(int(at) for at in what.split(","))
        return Pulled(job.ticket, arrived, 100 * len(arrived), 2, "a holder went away")

    def _slot(self, name: str) -> int:
        return next(slot for slot, known in self.slots.items() if known == name)

    def _from_prefill(self, name: str, h: Handoff, positional: list[str], options: dict[str, str]) -> e.Event:
        epoch = int(options.get("epoch", h.epoch))
        match name:
            case "begin-fill":
                return e.BeginFill(int(options.get("blocks", h.prompt_blocks)), int(options.get("removed", 0)))
            case "renew":
                return e.RenewLease(epoch, int(options.get("bytes", "1")))
            case "first-token":
                return e.FirstToken(int(positional[1]), None, 0)
            case "fill-done":
                return e.FillDone(epoch, 10, 200)
            case "drained":
                return e.Drained(epoch)
            case "failed":
                return e.HandoffFailed(HandoffLost("a path broke"), options["drained"] == "yes")
        raise ValueError(f"unknown command {name!r}")

    def _decode_step(self, options: dict[str, str]) -> m.DecodeStepDone:
        tokens = []
        for name, value in options.items():
            token, _, finish = value.partition(":")
            h = self.names[name]
            tokens.append(m.Token(h.handle, int(token), h.made, {"": 0, "stop": 1, "length": 2}[finish]))
        return m.DecodeStepDone(self.now, self.now, len(tokens), 0, tuple(tokens))

    def _wait(self, ms: int) -> list[str]:
        end = self.now + ms * NS_PER_MS
        told: list[str] = []
        while (due := self.state.next_due()) <= end:
            self.now = max(self.now, due)
            passed = (self.now - (end - ms * NS_PER_MS)) // NS_PER_MS
            lines = self._feed(Tick())
            if lines:
                told += [f"after {passed} ms:", *lines]
        self.now = end
        return told

    # ── what came out ────────────────────────────────────────────────────────────────────────────

    def _feed(self, event: i.Input) -> list[str]:
        return self._tell(self.state.step(event, self.now))

    def _tell(self, outputs: list[i.Output]) -> list[str]:
        lines = [line for output in outputs for line in self._line(output)]
        for name, h in self.names.items():
            now = describe(h)
            if self._shown.get(name) != now:
                self._shown[name] = now
                lines.append(f"  {name} {now}")
        return lines

    def _line(self, output: i.Output) -> list[str]:
        match output:
            case m.TellRank(_, message):
                return [f"rank    <- {self._rank_line(message)}"]
            case e.AskPrefill(peer, handle, spec):
                self.by_handle[handle] = spec.request_id
                where = {i.OWN_PEER: " here", 1: ""}.get(peer, f" at p{peer}")
                return [f"prefill <- start {spec.request_id}{where}"]
            case e.TellLanding(_, handle, epoch, lease_ms, ranks, first):
                where = f"at {ranks[0].offsets}" + (f" from block {first} on" if first else "")
                return [f"prefill <- landing {self.by_handle[handle]} epoch={epoch} lease={lease_ms} {where}"]
            case i.Pull(job, h):
                self.jobs.append(job)
                holders = ", ".join(r.instance_id for r in job.ranges)
                return [
                    f"blocks  <- pull {h.spec.request_id} blocks {job.blocks} to extents {job.extents} from {holders}"
                ]
            case e.TellRenewed(_, handle, _, lease_ms):
                return [f"prefill <- renewed {self.by_handle[handle]} lease={lease_ms}"]
            case e.TellCancel(_, handle, reason):
                return [f"prefill <- cancel {self.by_handle[handle]} ({reason})"]
            case i.Flush(session):
                return self._gateway_lines(session)
            case _:
                return []

    def _rank_line(self, message: m.ToRank) -> str:
        match message:
            case m.OpenWindow(peer, epoch, offsets):
                return f"open window for {peer} epoch={epoch} at {offsets}"
            case m.Fence(peer, epoch):
                return f"fence {peer} epoch={epoch}"
            case m.SealCopy(_, pages, extents):
                self.seals.append(message)
                return f"seal pages {pages} in extents {extents}"
            case m.LoadCopy(_, extents, pages):
                return f"load extents {extents} to pages {pages}"
            case m.CopyIn(handle, extents, pages):
                return f"copy in {self.by_handle[handle]} extents {extents} to pages {pages}"
            case m.CopyOut(handle, pages, extents):
                return f"copy out {self.by_handle[handle]} pages {pages} to extents {extents}"
            case m.Join():
                return (
                    f"join {self.by_handle[message.handle]} pages={message.pages} context={message.context_tokens} "
                    f"token[{message.token_index}]={message.next_token}"
                )
            case m.Grant(handle, pages):
                return f"grant {self.by_handle[handle]} pages {pages}"
            case m.Leave(handle):
                return f"leave {self.by_handle[handle]}"
        raise ValueError(f"unexpected {message}")

    def _gateway_lines(self, session: int) -> list[str]:
        box = self.state.sessions.get(session)
        if box is None:
            return []
        parcel = box.take()
        lines = [
            f"gateway <- {self.slots[slot]} token[{index}]={token}"
            for slot, token, index in zip(parcel.slots, parcel.token_ids, parcel.indices, strict=True)
        ]
        for slot, end in parcel.finished:
            lines.append(
                f"gateway <- {self.slots[slot]} finished {end.reason.name} after {end.completion_tokens} tokens"
            )
        for slot, error in parcel.failed:
            again = " (retryable)" if error.retryable else ""
            lines.append(f"gateway <- {self.slots[slot]} failed {error.code}: {error.message}{again}")
        return lines


def run(text: str) -> str:
    """Play a transcript; returns it with the outputs of now."""
    story = Story()
    out: list[str] = []
    block: list[str] = []
    expecting = False
    for line in text.splitlines():
        if expecting:
            expecting = bool(line.strip())
        elif line == "----":
            told = [said for command in block for said in story.play(command)]
            scheduler = getattr(story.state, "scheduler")  # noqa: B009
            pages, extents = scheduler.pages, scheduler.extents
            told.append(f"  free pages {pages.free}/{pages.total} extents {extents.free}/{extents.total}")
            if extents.stats.sealed or extents.stats.writing:
                told[-1] += f" sealed {extents.stats.sealed} writing {extents.stats.writing}"
            out += [*block, "----", *told, ""]
            block, expecting = [], True
        elif line.startswith("#") or not line.strip():
            if block:
                raise ValueError(f"commands without a line ---- after them: {block}")
            out.append(line)
        else:
            block.append(line)
    while out and not out[-1].strip():
        out.pop()
    return _squeeze("\n".join(out) + "\n")


def _squeeze(text: str) -> str:
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text


def check_input(text: str) -> None:
    """Raises InvalidRequest when a transcript has no `new` line: a file that tests nothing."""
    if "\nnew " not in f"\n{text}":
        raise InvalidRequest("a transcript begins with `new`")


def main() -> None:
    for path in sorted(FOLDER.glob("*.txt")):
        path.write_text(run(path.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stdout.write(f"rewrote {path.name}\n")


if __name__ == "__main__":
    main()
