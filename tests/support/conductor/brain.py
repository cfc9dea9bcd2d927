"""A conductor's brain with a clock and short words, for tests."""

import dataclasses
import random
from typing import Any

from kvmesh.clock import Tick
from kvmesh.kvcache.announce import Announcement
from kvmesh.services.conductor.domain import (
    Action,
    Blocks,
    Event,
    Heartbeat,
    Load,
    Member,
    MemberJoined,
    MembersReset,
    ModelCard,
    Placed,
    PrefillSample,
    Ref,
    Refuse,
    Register,
    Role,
    Schedule,
)
from kvmesh.services.conductor.settings import Settings
from kvmesh.services.conductor.state import ConductorState

BLOCK = 16
IDLE = Load(free_pages=1000, free_extents=1000)


def card(name: str = "demo", fingerprint: str = "f1", **more: Any) -> ModelCard:
    values: dict[str, Any] = {
        "name": name,
        "fingerprint": fingerprint,
        "block_tokens": BLOCK,
        "kv_dtype": "float32",
        "max_context_tokens": 4096,
        "vocab_size": 100,
        "eos_token_ids": (1,),
        "kv_bytes_per_token": 1024,
        "weights_epoch": 0,
    }
    return ModelCard(**(values | more))


def chain(name: str, blocks: int) -> tuple[bytes, ...]:
    return tuple(f"{name}-{i}".encode().ljust(16, b".") for i in range(blocks))


def member(name: str, incarnation: int = 1, node: str = "node") -> Member:
    return Member(Ref(name, f"{name}:1", incarnation), node)


def reset(master: int, *names: str | tuple[str, int]) -> MembersReset:
    """A snapshot of members: names of first lives, or lives."""
    lives = [(n, 1) if isinstance(n, str) else n for n in names]
    return MembersReset(master, tuple(member(*life) for life in lives))


def joined(name: str, incarnation: int = 1, node: str = "node") -> MemberJoined:
    return MemberJoined(member(name, incarnation, node))


class Brain:
    def __init__(self, seed: int = 0, **settings: Any) -> None:
        self.now = 100.0
        self.settings = dataclasses.replace(Settings(stall_s=1e9), **settings)
        self.state = ConductorState(self.settings, random.Random(seed), self.now)
        self.refs: dict[str, Ref] = {}
        self.seq = 0
        self.requests = 0
        self.said: dict[tuple[str, int], int] = {}

    def step(self, event: Event) -> list[Action]:
        return list(self.state.step(event, self.now))

    def register(
        self, name: str, role: Role, *, incarnation: int = 1, capacity: int = 1000, **more: Any
    ) -> list[Action]:
        self.refs[name] = Ref(name, f"{name}:1", incarnation)
        max_running = more.pop("max_running", 64)
        model = more.pop("model", card())
        return self.step(Register(self.refs[name], role, "node", model, capacity, max_running, **more))

    def add(self, name: str, role: Role, **more: Any) -> None:
        """Registered and ready."""
        assert self.register(name, role, **more) == []
        assert self.beat(name) == []

    def pair(self) -> None:
        self.add("p0", Role.PREFILL)
        self.add("d0", Role.DECODE)

    def beat(self, name: str, load: Load = IDLE, *, ready: bool = True, **more: Any) -> list[Action]:
        self.seq += 1
        return self.step(Heartbeat(self.refs[name], more.pop("seq", self.seq), ready, load, **more))

    def beat_all(self) -> None:
        for name in self.refs:
            self.beat(name)

    def schedule(self, prompt: int = 100, **more: Any) -> Placed | Refuse:
        self.requests += 1
        values: dict[str, Any] = {
            "request_id": f"r{self.requests}",
            "attempt": 0,
            "model": "demo",
            "prompt_tokens": prompt,
            "max_tokens": 16,
        }
        (answer,) = self.step(Schedule(**(values | more)))
        assert isinstance(answer, Placed | Refuse)
        return answer

    def placed(self, prompt: int = 100, **more: Any) -> Placed:
        answer = self.schedule(prompt, **more)
        assert isinstance(answer, Placed), answer
        return answer

    def refused(self, kind: type[Exception], prompt: int = 100, **more: Any) -> Refuse:
        answer = self.schedule(prompt, **more)
        assert isinstance(answer, Refuse), answer
        assert type(answer.error) is kind, answer
        return answer

    def done(
        self, name: str, request_id: str, computed: int, *, seconds: float = 0.01, cached: int = 0
    ) -> list[Action]:
        """The prefill instance reports one request as computed."""
        sample = PrefillSample(request_id, computed, cached, seconds, computed * 1024, 0.001)
        return self.beat(name, prefill_samples=(sample,), finished_request_ids=(request_id,))

    def seal(
        self,
        name: str,
        keys: tuple[bytes, ...] = (),
        *,
        incarnation: int = 1,
        removed: tuple[bytes, ...] = (),
        **more: Any,
    ) -> list[Action]:
        """That life's node store announces its next batch, or a snapshot of all it holds."""
        life = name, incarnation
        self.said[life] = seq = self.said.get(life, 0) + 1
        return self.step(Blocks(Announcement(name, incarnation, more.pop("seq", seq), keys, removed, **more)))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.step(Tick())

    def view(self, name: str) -> Any:
        return next(v for v in self.state.views(self.now) if v.ref.instance_id == name)
