"""The models behind one gateway: what each reads, what the mesh says of it, whether it can be served."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from kvmesh.errors import InvalidRequest, ModelNotFound, Unavailable
from kvmesh.kvcache.keys import EXTERNAL, Namespace
from kvmesh.rpc.pb import common_pb2, conductor_pb2
from kvmesh.services.gateway.api_keys import ANYBODY, Tenant, combined_salt
from kvmesh.services.gateway.generation import brief
from kvmesh.services.gateway.text.prepare import Preparer

_SHOWN = 20  # names in an error


@dataclass(frozen=True, slots=True)
class ServedModelFacts:
    """What the mesh says about a served model."""

    fingerprint: str
    block_tokens: int
    kv_dtype: str
    max_context_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]
    weights_epoch: int

    @classmethod
    def of(cls, card: common_pb2.ModelCard) -> ServedModelFacts:
        return cls(
            card.fingerprint,
            card.block_tokens,
            card.kv_dtype,
            card.max_context_tokens,
            card.vocab_size,
            frozenset(card.eos_token_ids),
            card.weights_epoch,
        )

    def namespace(self, tenant: Tenant, cache_salt: str) -> Namespace:
        """Where the block keys of this model, for this tenant and its salt, are rooted."""
        return Namespace(
            fingerprint=self.fingerprint,
            kv_dtype=self.kv_dtype,
            tenant_salt=combined_salt(tenant.salt, cache_salt),
            tenant=tenant.salt,
            weights_epoch=self.weights_epoch,
        )

    @property
    def external(self) -> bool:
        """Whether engines that are not kvmesh's own serve it."""
        return self.fingerprint.startswith(EXTERNAL)

    def engine_salt(self, tenant: Tenant, cache_salt: str) -> str:
        """What such an engine is told, so that prompts meet in its cache as their block keys do; "" for those who may
        share with everybody."""
        if not self.external or not combined_salt(tenant.salt, cache_salt):
            return ""
        return self.namespace(tenant, cache_salt).root(self.block_tokens).hex()


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Device pages of the instances that decode a model."""

    block_tokens: int
    pages: int
    free_pages: int

    @property
    def used_share(self) -> float:
        return 1 - min(self.free_pages, self.pages) / self.pages if self.pages else 0.0


def kv_usage(model: str, instances: Collection[conductor_pb2.InstanceStatus]) -> KvUsage:
    """Returns the pages of all ready instances that decode `model`: each answer needs room at one of them."""
    mine = [
        one
        for one in instances
        if one.model == model and one.ready and one.role in (common_pb2.ROLE_DECODE, common_pb2.ROLE_BOTH)
    ]
    return KvUsage(
        mine[0].card.block_tokens if mine else 0,
        sum(one.capacity_blocks for one in mine),
        sum(one.load.free_pages for one in mine),
    )


class Model:
    """One served model. `not_ready_reason` is "" while requests can be placed."""

    def __init__(self, name: str, preparer: Preparer) -> None:
        self.name = name
        self.preparer = preparer
        self.facts: ServedModelFacts | None = None
        self.kv: KvUsage | None = None  # as the conductor last told it
        self.not_ready_reason = "the conductor has not answered yet"

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    def require(self) -> ServedModelFacts:
        """The facts. Unavailable, saying why, while nobody has registered the model."""
        if self.facts is None:
            raise Unavailable(f"model {self.name!r} cannot be served yet: {self.not_ready_reason}", retry_after_ms=1000)
        return self.facts


class Models:
    """Every model of one gateway, in the order of its configuration."""

    def __init__(self, preparers: Mapping[str, Preparer]) -> None:
        self._models = {name: Model(name, preparer) for name, preparer in preparers.items()}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._models.values())

    def __len__(self) -> int:
        return len(self._models)

    @property
    def names(self) -> list[str]:
        return list(self._models)

    def of(self, tenant: Tenant) -> list[Model]:
        """Those that `tenant` may use."""
        return [model for model in self if tenant.may_use(model.name)]

    def find(self, name: str, tenant: Tenant = ANYBODY) -> Model:
        """The model that clients call `name`. ModelNotFound names those that `tenant` may use; that others are there,
        it is not told."""
        model = self._models.get(name)
        if model is None or not tenant.may_use(name):
            shown = repr(brief(name, 200))
            raise ModelNotFound(f"model={shown}: not served here; served: {self._list(tenant)}", field="model")
        return model

    def only(self, tenant: Tenant = ANYBODY) -> Model:
        """The model of a request that names none. InvalidRequest unless `tenant` may use exactly one."""
        mine = self.of(tenant)
        if len(mine) != 1:
            why = f"required, as there are several; served: {self._list(tenant)}" if mine else "none is served to you"
            raise InvalidRequest(f"model='': {why}", field="model")
        return mine[0]

    def _list(self, tenant: Tenant) -> str:
        names = [model.name for model in self.of(tenant)]
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return ", ".join(names[:_SHOWN]) + more if names else "none"

    @property
    def ready(self) -> bool:
        """Whether any can be served: one model without instances must not close the door on the others."""
        return any(model.ready for model in self)

    @property
    def not_ready_reason(self) -> str:
        """ "" when any is ready, else why none is, in one line."""
        reasons = {model.name: model.not_ready_reason for model in self}
        if self.ready:
            return ""
        if len(set(reasons.values())) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
