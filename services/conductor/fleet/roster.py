"""The registered instances: their models, their KV identities, and which incarnation replaces which."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from kvmesh.errors import InvalidRequest, KvmeshError, Overloaded
from kvmesh.kvcache.keys import EXTERNAL
from kvmesh.kvcache.tiers import MARK
from kvmesh.membership.places import instance_of
from kvmesh.pacing import MembershipLease, Pulse
from kvmesh.services.conductor.domain import Life, ModelCard, NewestWeights, Register, Role
from kvmesh.services.conductor.fleet.instance import Instance, ModelFits

MAX_REPLACED = 4096
MAX_INSTANCES = 16_384
MAX_PATH = 4096
MAX_TEXT = 256  # characters of a name, an address, a fingerprint

_IDENTITY = ("fingerprint", "block_tokens", "dtype", "weights_epoch")  # of ModelCard.kv_identity

WhyNot = Callable[[Instance], str]


class Fleet:
    """The instances by name, in the order in which they registered."""

    def __init__(self, confidence: float = 0.0) -> None:
        """`confidence` is explained in margins.py."""
        self._confidence = confidence
        self._instances: dict[str, Instance] = {}
        self._places: dict[str, dict[str, None]] = {}  # the members that are one instance, by its name
        self._fits: dict[tuple[str, tuple[object, ...]], ModelFits] = {}
        self._replaced: OrderedDict[Life, None] = OrderedDict()
        self._turn = 0
        self._round: list[Instance] = []  # as `_instances`, as long as nobody comes or goes
        self._kin: dict[str, Counter[tuple[object, ...]]] = {}  # instances by model name and KV identity
        self.known_models: dict[str, None] = {}  # ever served here
        # By model name and fingerprint: which weights an order here has made, how many instances have which, and the
        # newest that are believed.
        self._ordered: dict[tuple[str, str], NewestWeights] = {}
        self._weights: dict[tuple[str, str], Counter[NewestWeights]] = {}
        self._newest: dict[tuple[str, str], NewestWeights] = {}

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._instances.values()))

    def __len__(self) -> int:
        return len(self._instances)

    def next(self, count: int) -> list[Instance]:
        """Returns the next `count` of all instances, round-robin."""
        if len(self._round) != len(self._instances):
            self._round = list(self._instances.values())
        instances = self._round
        if len(instances) <= count:
            return list(instances)
        first, self._turn = self._turn, (self._turn + count) % len(instances)
        return instances[first : first + count] + instances[: max(0, first + count - len(instances))]

    def named(self, instance_id: str) -> Instance | None:
        """Returns the instance of that name, or None."""
        return self._instances.get(instance_id)

    def places(self, instance_id: str) -> list[Instance]:
        """Returns all places of the instance that has this name, or has a place of this name."""
        return [self._instances[name] for name in self._places.get(instance_of(instance_id), ())]

    def of(self, life: Life) -> Instance | None:
        """Returns the instance if exactly that incarnation is registered, else None."""
        instance = self._instances.get(life[0])
        return instance if instance is not None and instance.ref.incarnation == life[1] else None

    def check(self, event: Register) -> KvmeshError | None:
        """Returns why this registration is refused, or None."""
        ref = event.ref
        if error := _invalid(event):
            return error
        if ref.life in self._replaced:
            why = f"a later incarnation has taken the name {ref.instance_id!r}"
            return InvalidRequest.of("instance.incarnation", ref.incarnation, why)
        if len(self) >= MAX_INSTANCES and self.named(ref.instance_id) is None:
            return Overloaded(f"{MAX_INSTANCES} instances are registered here already", retry_after_ms=1000)
        return None

    def is_same(self, event: Register) -> bool:
        """Says whether a known incarnation registers again, perhaps in another role."""
        old = self._instances.get(event.ref.instance_id)
        new = event.ref, event.model, event.capacity_blocks
        return old is not None and (old.ref, old.model, old.capacity_blocks) == new

    def add(self, event: Register, slot: int, pulse: Pulse, now: float) -> Instance:
        """Adds a new instance whose registration was checked, and which is told `pulse`. An earlier one of that name
        was removed before."""
        self._round = []
        model = event.model
        fits = self._fits.setdefault((model.name, model.compute_identity), ModelFits())
        self._weights.setdefault((model.name, model.fingerprint), Counter())[_weights_of(model)] += 1
        self._learn_weights(model.name, model.fingerprint)
        instance = self._instances[event.ref.instance_id] = Instance(
            event, slot, fits, MembershipLease(pulse), now, self._confidence
        )
        self._places.setdefault(instance_of(event.ref.instance_id), {})[event.ref.instance_id] = None
        self.known_models[model.name] = None
        self._kin.setdefault(model.name, Counter())[model.kv_identity] += 1
        return instance

    def remove(self, instance: Instance, *, replaced: bool = False) -> None:
        """Removes an instance. `replaced` says that its incarnation may not come back."""
        self._round = []
        name = instance.ref.instance_id
        del self._instances[name]
        places = self._places[instance_of(name)]
        del places[name]
        if not places:
            del self._places[instance_of(name)]
        instance.leave()
        model = instance.model
        self._kin[model.name] -= Counter([model.kv_identity])
        self._weights[model.name, model.fingerprint] -= Counter([_weights_of(model)])
        self._learn_weights(model.name, model.fingerprint)
        if replaced:
            self._replaced[instance.ref.life] = None
            if len(self._replaced) > MAX_REPLACED:
                self._replaced.popitem(last=False)

    def weights_ordered(self, name: str, fingerprint: str, weights: NewestWeights) -> None:
        """Takes it that an order has given a model these weights. They are forgotten with its last instance."""
        known = self._ordered.get((name, fingerprint), NewestWeights())
        self._ordered[name, fingerprint] = max(known, weights)
        self._learn_weights(name, fingerprint)

    def _learn_weights(self, name: str, fingerprint: str) -> None:
        """Believes the newest weights that an order here has made, or whose epoch at least half of the model's
        instances have reached: one instance alone, whatever it says of itself, must not take the work from all others,
        nor have them read a folder that it names."""
        key = name, fingerprint
        there = self._weights.get(key)
        if not there:
            for known in (self._weights, self._ordered, self._newest):
                known.pop(key, None)
            return
        half, reached = there.total() / 2, 0
        for weights in sorted(there, reverse=True):
            reached += there[weights]
            if reached >= half:
                self._newest[key] = max(weights, self._ordered.get(key, NewestWeights()))
                return

    def newest_weights(self, model: ModelCard) -> NewestWeights:
        """Returns the newest weights of this model that are believed."""
        return self._newest.get((model.name, model.fingerprint), NewestWeights())

    def stale(self, instance: Instance) -> str:
        """Returns why an instance must get no work though it is ready: its model has newer weights; "" where it has
        not. One that starts anew has the weights of its checkpoint again."""
        own, newest = instance.model.weights_epoch, self.newest_weights(instance.model)
        if own >= newest.epoch:
            return ""
        mend = f"it is to fetch them from {newest.path}" if newest.path else "update them"
        return f"has weights of epoch {own}, the model is at epoch {newest.epoch}: {mend}"

    def fade(self, now: float) -> None:
        """Lets the departures of instances fade up to `now`."""
        for fits in self._fits.values():
            fits.fade(now)

    def changed(self) -> list[str]:
        """Returns the names of instances whose predictions have changed since the last call."""
        return [name for fits in self._fits.values() for name in fits.changed()]

    def models(self, why_not: WhyNot) -> list[ModelCard]:
        """Returns one card per model name, of the KV identity that `serving` returns."""
        names = dict.fromkeys(i.model.name for i in self._instances.values())
        return [
            max((i.model for i in self.serving(name, why_not)), key=lambda m: m.max_context_tokens) for name in names
        ]

    def serving(self, model: str, why_not: WhyNot) -> list[Instance]:
        """Returns the registered instances of a model whose KV fits together. If the name stands for several such sets
        (during a rolling update), one that can serve now is preferred, then the more numerous."""
        groups: dict[tuple[object, ...], list[Instance]] = {}
        for instance in self._instances.values():
            if instance.model.name == model:
                groups.setdefault(instance.model.kv_identity, []).append(instance)
        if len(groups) <= 1:
            return next(iter(groups.values()), [])

        def worth(group: list[Instance]) -> tuple[bool, int, str]:
            live = [i for i in group if not why_not(i)]
            decodes = [i for i in live if i.role.decodes]
            complete = bool(decodes) and any(i.role.prefills or i.alone_tokens for i in live)
            return complete, len(live), group[0].model.fingerprint

        return max(groups.values(), key=worth)

    def stranded(self, instance: Instance) -> str:
        """Returns why no instance of its model can work with this one though some could if their KV fitted together; ""
        if one can, or if there is none of the other role at all."""
        if instance.alone_tokens or len(self._kin.get(instance.model.name, ())) <= 1:
            return ""
        kin = [i for i in self._instances.values() if i.model.name == instance.model.name and i is not instance]
        others = [i for i in kin if (i.role.decodes if instance.role.prefills else i.role.prefills)]
        if not others or any(i.model.kv_identity == instance.model.kv_identity for i in others):
            return ""
        other = others[0]
        differs = [
            f"{name}={theirs!r}, this one {ours!r}"
            for name, theirs, ours in zip(_IDENTITY, other.model.kv_identity, instance.model.kv_identity, strict=True)
            if theirs != ours
        ]
        return f"its KV does not fit {other.ref.instance_id}, which has {' and '.join(differs)}"


def _weights_of(model: ModelCard) -> NewestWeights:
    return NewestWeights(model.weights_epoch, model.weights_path)


def _invalid(event: Register) -> InvalidRequest | None:
    ref, model = event.ref, event.model
    wrong: list[tuple[str, object, str, bool]] = [
        ("instance.instance_id", ref.instance_id, "must not be empty", not ref.instance_id),
        (
            "instance.instance_id",
            ref.instance_id,
            f"must not hold {MARK!r}: it sets off tiers",
            MARK in ref.instance_id,
        ),
        ("instance.address", ref.address, "must be host:port", not ref.address),
        ("instance.incarnation", ref.incarnation, "must be new at every process start, never 0", not ref.incarnation),
        ("model.name", model.name, "must not be empty", not model.name),
        ("model.fingerprint", model.fingerprint, "must not be empty", not model.fingerprint),
        ("model.block_tokens", model.block_tokens, "must be at least 1", model.block_tokens < 1),
        ("capacity_blocks", event.capacity_blocks, "must be at least 1", event.capacity_blocks < 1),
    ]
    texts = (
        ("instance.instance_id", ref.instance_id),
        ("instance.address", ref.address),
        ("node_id", event.node_id),
        ("model.name", model.name),
        ("model.fingerprint", model.fingerprint),
        ("model.kv_dtype", model.kv_dtype),
        ("http_url", event.http_url),
    )
    path = model.weights_path
    wrong.append(("model.weights_path", path[:MAX_TEXT], f"is longer than {MAX_PATH} characters", len(path) > MAX_PATH))
    external = model.fingerprint.startswith(EXTERNAL)
    why = f"an external instance has a fingerprint that begins with {EXTERNAL!r}, and no other has one"
    wrong.append(("model.fingerprint", model.fingerprint, why, external != bool(event.http_url)))
    if event.http_url:
        http = event.http_url.startswith(("http://", "https://"))
        wrong.append(("http_url", event.http_url, "must begin with http:// or https://", not http))
        why = "an external instance does both: it must be both"
        wrong.append(("role", event.role.value, why, event.role is not Role.BOTH))
    wrong += [(name, text, f"is longer than {MAX_TEXT} characters", len(text) > MAX_TEXT) for name, text in texts]
    return next((InvalidRequest.of(name, value, why) for name, value, why, bad in wrong if bad), None)
