"""A rank as the decode brain knows it: it takes commands in order, takes its time over copies and fences, and follows
what lies in every page and extent."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmesh.kvcache import keys as block_keys
from kvmesh.ranks import protocol as m

PAGE_BASE, EXTENT_BASE, SHARD = 0, 1_000_000, 10
BLOCK = 4
Slot = tuple[str, int]  # ("page", 3)


def slots_of(offsets: tuple[int, ...]) -> set[Slot]:
    return {("extent", (o - EXTENT_BASE) // SHARD) if o >= EXTENT_BASE else ("page", o // SHARD) for o in offsets}


@dataclass
class Row:
    """One request in the rank's batch."""

    join: m.Join
    pages: list[int]
    context: int
    made: int
    stalled: bool = False


@dataclass
class Use:
    """Somebody who may touch slots now."""

    who: str
    reads: set[Slot]
    writes: set[Slot]


@dataclass
class Prompt:
    """What a request's blocks are called."""

    tokens: int
    keys: tuple[bytes, ...]

    def key(self, block: int, answer: Sequence[int]) -> bytes:
        """Of a full block of prompt and answer together."""
        if block < len(self.keys):
            return self.keys[block]
        tokens = [0] * (self.tokens % BLOCK) + list(answer)
        digest, found = digest_of(self.keys), b""
        for at in range(block - len(self.keys) + 1):
            found, digest = block_keys.extend(digest, block_keys.pack_tokens(tokens[at * BLOCK : (at + 1) * BLOCK]))
        return found


def digest_of(keys: Sequence[bytes]) -> bytes:
    return (keys[-1] if keys else b"root").ljust(32)


Copy = m.CopyIn | m.CopyOut | m.LoadCopy | m.SealCopy


@dataclass
class Rank:
    """A rank as the front knows it: commands are taken in order, fences and copies take their time."""

    prompts: dict[int, Prompt]
    commands: deque[m.ToRank] = field(default_factory=deque)
    says: deque[m.ToFront] = field(default_factory=deque)
    windows: dict[tuple[str, int], set[Slot]] = field(default_factory=dict)
    fencing: list[tuple[str, int]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    vain: dict[int, Row] = field(default_factory=dict)  # out of the batch, and in the step in flight
    memory: dict[Slot, bytes] = field(default_factory=dict)  # key of the block whose KV lies there, complete
    marked: set[tuple[str, int]] = field(default_factory=set)  # writers that have sent their end mark
    answers: dict[int, dict[int, int]] = field(default_factory=dict)  # handle → index → token

    def take_command(self) -> None:
        match self.commands.popleft():
            case m.OpenWindow(peer, epoch, offsets):
                self.windows[peer, epoch] = slots_of(offsets)
                self.says.append(m.WindowOpened(peer, epoch))
            case m.Fence(peer, epoch):
                self.fencing.append((peer, epoch))
            case m.CopyIn() | m.CopyOut() | m.LoadCopy() | m.SealCopy() as copy:
                self.copies.append(copy)
            case m.Join() as join:
                self._join(join)
            case m.Grant(handle, pages):
                if handle in self.rows:
                    self.rows[handle].pages += pages
                    self.rows[handle].stalled = False
            case m.Leave(handle):
                self.rows.pop(handle, None)
                if handle not in self.vain:
                    self.says.append(m.Left(handle))

    def end_step(self) -> None:
        """The step in flight is over: it has computed a token too many of rows that had stopped."""
        for handle, row in self.vain.items():
            if row.context < len(row.pages) * BLOCK:
                self.memory["page", row.pages[row.context // BLOCK]] = b"partial"
            self.says.append(m.Left(handle))
        self.vain.clear()

    def _join(self, join: m.Join) -> None:
        assert join.handle not in self.rows
        self.rows[join.handle] = Row(join, list(join.pages), join.context_tokens, join.token_index + 1)
        self.answers.setdefault(join.handle, {})[join.token_index] = join.next_token
        for block in range(join.context_tokens // BLOCK):
            lies = self.memory.get(("page", join.pages[block]))
            assert lies == self._key(join.handle, block), f"{join.handle} joins with wrong bytes in block {block}"

    def _key(self, handle: int, block: int) -> bytes:
        answer = self.answers[handle]
        return self.prompts[handle].key(block, [answer[at] for at in range(len(answer))])

    def fill(self, peer: str, epoch: int, handle: int, offsets: tuple[int, ...]) -> None:
        """All bytes of the landing are here (`offsets`: of every prompt block), and the end mark behind them."""
        window = self.windows.get((peer, epoch))
        if window is None:
            return  # refused
        self.marked.add((peer, epoch))
        keys = self.prompts[handle].keys
        for block, offset in enumerate(offsets):
            (slot,) = slots_of((offset,))
            if slot in window:
                self.memory[slot] = keys[block] if block < len(keys) else b"partial"
        self.says.append(m.FillEnded(peer, epoch))

    def scribble(self) -> None:
        """Writers that are not done write all over what they were invited to."""
        for writer, slots in self.windows.items():
            if writer not in self.marked:
                self.memory.update(dict.fromkeys(slots, b"scribble"))

    def finish_fence(self) -> None:
        key = self.fencing.pop(0)
        self.windows.pop(key, None)
        self.says.append(m.Fenced(*key))

    def finish_copy(self, at: int = 0) -> None:
        copy = self.copies.pop(at)
        into_pages = isinstance(copy, m.CopyIn | m.LoadCopy)
        for page, extent in zip(copy.pages, copy.extents, strict=True):
            source, target = ("extent", extent), ("page", page)
            if not into_pages:
                source, target = target, source
            self.memory[target] = self.memory.get(source, b"nothing")
        match copy:
            case m.LoadCopy(ticket):
                self.says.append(m.LoadCopied(ticket, 1, 2))
            case m.SealCopy(ticket, _, extents):
                # Now and then the last block is found not finite: of use to nobody.
                bad = (len(extents) - 1,) if ticket % 5 == 4 else ()
                self.memory.update({("extent", extents[at]): b"not finite" for at in bad})
                self.says.append(m.SealCopied(ticket, 1, 2, bad))
            case _:
                self.says.append(m.Copied(copy.handle, into_pages, 1, 2))

    def step(self, stop: bool = False, ahead: bool = False, drafted: int = 0) -> None:
        """One decode step; `stop`: the first row samples EOS; `ahead`: the next step has been launched by then.
        `drafted`: so many tokens of each row's draft are kept, if it has room for them."""
        self.end_step()
        tokens: list[m.Token] = []
        context = rows = 0
        for handle, row in list(self.rows.items()):
            if row.context >= len(row.pages) * BLOCK:
                if not row.stalled:
                    row.stalled = True
                    self.says.append(m.Stalled(handle))
                continue
            rows += 1
            room = min(drafted, len(row.pages) * BLOCK - row.context - 1, row.join.max_tokens - row.made - 1)
            for at in range(1 + max(0, room)):
                row.context += 1
                page = ("page", row.pages[(row.context - 1) // BLOCK])
                full = row.context % BLOCK == 0
                self.memory[page] = self._key(handle, row.context // BLOCK - 1) if full else b"partial"
                self.answers[handle][row.made] = 1000 + row.made
                ends = stop and rows == 1 and at == max(0, room)
                finish = 1 if ends else 2 if row.made + 1 >= row.join.max_tokens else 0
                tokens.append(m.Token(handle, 1000 + row.made, row.made, finish))
                row.made += 1
            if row.context < len(row.pages) * BLOCK and drafted:  # what was not kept lies behind
                self.memory["page", row.pages[row.context // BLOCK]] = b"partial"
            context += row.context
            if finish:
                del self.rows[handle]
            if finish == 1 and ahead:
                self.vain[handle] = row
        if tokens:
            drafts = (("ngram", drafted * rows, len(tokens) - rows),) if drafted else ()
            done = m.DecodeStepDone(1, 2, rows, context, tuple(tokens), held=tuple(self.vain), drafts=drafts)
            self.says.append(done)

    def touched(self) -> list[Use]:
        """Slots that something may write or read now."""
        found = [Use(f"window {key}", set(), slots) for key, slots in self.windows.items()]
        for handle, row in (self.rows | self.vain).items():
            full = row.context // BLOCK  # behind these it writes
            reads: set[Slot] = {("page", p) for p in row.pages[:full]}
            found.append(Use(f"batch {handle}", reads, {("page", p) for p in row.pages[full:]}))
        for copy in self.copies:
            pages: set[Slot] = {("page", p) for p in copy.pages}
            extents: set[Slot] = {("extent", x) for x in copy.extents}
            match copy:
                case m.CopyIn():
                    found.append(Use(f"copy in {copy.handle}", extents, pages))
                case m.CopyOut():
                    found.append(Use(f"copy out {copy.handle}", pages, extents))
                case m.LoadCopy():
                    found.append(Use(f"load {copy.ticket}", extents, pages))
                case m.SealCopy():
                    found.append(Use(f"seal {copy.ticket}", pages, extents))
        return found
