"""Orders of operators and trainers for all instances of a model: pause, resume, other weights, fewer instances, sleep.
Who carries them out is each instance; the order among them is here, and nothing is decided by the brain.

Instances that decode are paused first, so that the prompts of what they have taken are still computed in a pause that
lets requests finish. All of them are paused before any takes other weights, and none goes on before all that can have
taken them: at no time do two instances that compute have weights of different epochs. An order holds all instances by
leases (order_lease.py): when this process dies in the middle, each goes on by itself if its weights are whole.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, ModelNotFound, Overloaded, Paused
from kvmesh.kvcache.keys import check_epoch
from kvmesh.membership.places import instance_of
from kvmesh.rpc import status
from kvmesh.rpc.pb import common_pb2, conductor_pb2, instance_pb2
from kvmesh.rpc.running_orders import RunningOrders
from kvmesh.services.conductor.balance.gather import holdings, plan_gather, prefill_s
from kvmesh.services.conductor.domain import NewestWeights
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.mapping import ref_out
from kvmesh.services.conductor.order_lease import LEASE_S, OrderLease, call_all, good

log = logging.getLogger(__name__)

PAUSE_MS, UPDATE_MS, MOST_MS = 60_000, 600_000, 3_600_000
RESUME_S = 10.0
MOST_SLOWER = 1000  # percent
UNDO_S = 60.0  # for instances that wake because another one could not sleep
ASLEEP = f"{Paused.PREFIX}asleep"
MOST_PAUSE_MS = 7 * 86_400_000
MAX_ORDER_ID = 64
CATCH_UP = "fetching the weights"  # begins the reason of a pause that this is
MAX_REASON = 300
GRACE_S = 2.0  # after its deadline an instance's own word is still waited for


class ModelControl:
    """Carries out one order a model at a time. `instances` returns those that are known; `on_weights` is told the
    model's name, its fingerprint and the weights that an update has given it.

    An order that has begun is carried out to its end though its caller goes away, and one that is repeated is answered
    as the first time."""

    def __init__(
        self,
        instances: Callable[[], Sequence[Instance]],
        on_weights: Callable[[str, str, NewestWeights], None] = lambda name, fingerprint, weights: None,
        lease_s: float = LEASE_S,
    ) -> None:
        self._instances = instances
        self._on_weights = on_weights
        self._lease_s = lease_s
        self._orders = RunningOrders()
        self._busy: set[str] = set()
        self._waking: dict[str, asyncio.Task[conductor_pb2.WakeModelResponse]] = {}
        self._name = f"conductor {socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"

    async def pause(self, request: conductor_pb2.PauseModelRequest) -> conductor_pb2.PauseModelResponse:
        """Raises ModelNotFound, Overloaded, or the first instance's error; then those stay paused that are."""
        _check_pause(request.for_ms)
        order_id = _order_id(request.order_id)
        order = self._pause_model(request, order_id)
        return await self._orders.carry_out(order, order_id, f"pause {request.model!r}")

    async def _pause_model(
        self, request: conductor_pb2.PauseModelRequest, order_id: str
    ) -> conductor_pb2.PauseModelResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, PAUSE_MS)
        with self._alone(model):
            lease = self._lease(instances, order_id)
            if result := await lease.begin(until):
                return conductor_pb2.PauseModelResponse.FromString(result)
            answer = conductor_pb2.PauseModelResponse(model=model, instances=len(instances))
            stays: dict[str, Any] = {"keep_paused": True, "for_ms": request.for_ms}
            try:
                answer.ended = await self._pause(lease, instances, request.mode, until, request.reason)
            except BaseException:
                await lease.end(**stays)
                raise
            good(await lease.end(answer.SerializeToString(), **stays))
        return answer

    async def resume(self, request: conductor_pb2.ResumeModelRequest) -> conductor_pb2.ResumeModelResponse:
        """Raises ModelNotFound, Overloaded, or the first instance's error, after all have been asked."""
        order_id = _order_id(request.order_id)
        order = self._resume_model(request, order_id)
        return await self._orders.carry_out(order, order_id, f"resume {request.model!r}")

    async def _resume_model(
        self, request: conductor_pb2.ResumeModelRequest, order_id: str
    ) -> conductor_pb2.ResumeModelResponse:
        model, instances = self._of(request.model)
        if any(one.not_ready_reason.startswith(ASLEEP) for one in instances):
            raise InvalidRequest.of("model", model, "it sleeps; wake it first")
        with self._alone(model):
            lease = self._lease(instances, order_id)
            if result := await lease.begin(time.monotonic() + RESUME_S):
                return conductor_pb2.ResumeModelResponse.FromString(result)
            answer = conductor_pb2.ResumeModelResponse(model=model, instances=len(instances))
            answer.weights_epoch = max(instance.model.weights_epoch for instance in instances)
            told = good(await lease.end(answer.SerializeToString(), ends_pause=True))
            answer.weights_epoch = max(one.weights_epoch for one in told)
        return answer

    async def update(
        self, request: conductor_pb2.UpdateModelWeightsRequest
    ) -> conductor_pb2.UpdateModelWeightsResponse:
        """Pauses, updates and resumes. Instances that were paused by hand stay so, and those that could not take the
        weights get no work before they have some. Raises as `pause` does, or the first error where no instance has
        taken the weights; then what ran goes on. It goes on to its end, too, when the caller goes away."""
        order_id = _order_id(request.order_id)
        order = self._update_model(request, order_id)
        return await self._orders.carry_out(order, order_id, f"update {request.model!r} to {request.weights_epoch}")

    async def _update_model(
        self, request: conductor_pb2.UpdateModelWeightsRequest, order_id: str
    ) -> conductor_pb2.UpdateModelWeightsResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, UPDATE_MS)
        epoch = request.weights_epoch or time.time_ns()
        highest = max(instance.model.weights_epoch for instance in instances)
        check_epoch(epoch, highest, time.time_ns())
        with self._alone(model):
            lease = self._lease(instances, order_id)
            if result := await lease.begin(until):
                return conductor_pb2.UpdateModelWeightsResponse.FromString(result)
            if epoch <= highest and not lease.seen:
                await lease.release()
                why = f"must be greater than {highest}, which {model} has: an epoch names the weights of one update"
                raise InvalidRequest.of("weights_epoch", epoch, why)
            start = time.monotonic()
            answer = conductor_pb2.UpdateModelWeightsResponse(model=model, weights_epoch=epoch)
            try:
                answer.ended = await self._pause(lease, instances, request.mode, until, f"weights epoch {epoch}")
                taken = await self._take(lease, instances, epoch, request.source, until)
                new = [i for i, one in zip(instances, taken, strict=True) if not one.HasField("error")]
                if not new:  # the old weights are served on, where they are whole
                    raise status.from_detail(taken[0].error)
            except BaseException:
                await lease.release()
                raise
            self._on_weights(model, new[0].model.fingerprint, NewestWeights(epoch, request.source.path))
            answer.taken.extend(taken)
            answer.paused_seconds = time.monotonic() - start
            behind = [instance for instance in instances if instance not in new]
            for error in await lease.end(answer.SerializeToString(), epoch, behind, keep_paused=request.stay_paused):
                if isinstance(error, KvmeshError):  # it goes on by itself when its lease ends
                    log.warning("model %s: %s", model, error.message)
            answer.paused_seconds = time.monotonic() - start
        log.info("model %s has weights of epoch %d at %d of %d instances", model, epoch, len(new), len(instances))
        return answer

    def _lease(self, instances: Sequence[Instance], order_id: str) -> OrderLease:
        return OrderLease(instances, instance_pb2.OrderRef(id=order_id, conductor=self._name), self._lease_s)

    async def gather(self, request: conductor_pb2.GatherModelRequest) -> conductor_pb2.GatherModelResponse:
        """Has running answers gathered on fewer instances (`balance.gather`); those that are freed are paused until the
        model is resumed. Raises as `pause` does, and Paused for a model that is paused."""
        return await self._orders.carry_out(self._gather_model(request))

    async def _gather_model(self, request: conductor_pb2.GatherModelRequest) -> conductor_pb2.GatherModelResponse:
        model, instances = self._of(request.model)
        if request.slower_percent > MOST_SLOWER:
            raise InvalidRequest.of("slower_percent", request.slower_percent, f"at most {MOST_SLOWER}")
        until = time.monotonic() + _deadline_s(request.deadline_ms, PAUSE_MS)
        with self._alone(model):
            at_work = [instance for instance in instances if instance.ready]
            if not at_work:
                raise Paused(f"model={model!r}: none of its instances is at work, as when it is paused")
            plan = plan_gather(holdings(at_work), prefill_s(at_work), (request.slower_percent or 25) / 100)
            freed = [i for i in at_work if instance_of(i.ref.instance_id) in plan.freed]
            if freed:
                lease = self._lease(freed, _order_id(""))
                await lease.begin(until)
                try:
                    await self._pause(lease, freed, common_pb2.PAUSE_MODE_KEEP, until, "its answers are elsewhere")
                except BaseException:
                    await lease.release()
                    raise
                good(await lease.end(keep_paused=True))
        log.info("model %s: %d answers gathered, %s are free: %s", model, plan.moved, plan.freed or "none", plan.why)
        return conductor_pb2.GatherModelResponse(
            model=model, kept=plan.kept, freed=plan.freed, moved=plan.moved, why=plan.why
        )

    async def sleep(self, request: conductor_pb2.SleepModelRequest) -> conductor_pb2.SleepModelResponse:
        """Pauses, and puts all instances to sleep. Raises ModelNotFound, Overloaded, or the first instance's error;
        then none sleeps, and what ran goes on."""
        return await self._orders.carry_out(self._sleep_model(request))

    async def _sleep_model(self, request: conductor_pb2.SleepModelRequest) -> conductor_pb2.SleepModelResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, PAUSE_MS)
        with self._alone(model):
            lease = self._lease(instances, secrets.token_hex(16))
            await lease.begin(until)
            answer = conductor_pb2.SleepModelResponse(model=model)
            try:
                reason = request.reason or "falling asleep"
                answer.ended = await self._pause(lease, instances, request.mode, until, reason)
                left_s = max(0.1, until - time.monotonic())
                order = instance_pb2.SleepRequest(
                    level=request.level, deadline_ms=max(1, int(1000 * left_s)), order=lease.ref
                )
                told = await call_all(instances, lambda stub, _: stub.Sleep(order, timeout=left_s + GRACE_S))
                if any(isinstance(one, KvmeshError) for one in told):
                    undo = instance_pb2.WakeRequest(order=lease.ref)
                    await call_all(instances, lambda stub, _: stub.Wake(undo, timeout=UNDO_S))
                answer.released.extend(one.released for one in good(told))
            finally:
                await lease.release()
        answer.ended += sum(one.ended for one in answer.released)
        log.info("model %s sleeps at all of %d instances", model, len(instances))
        return answer

    async def wake(self, request: conductor_pb2.WakeModelRequest) -> conductor_pb2.WakeModelResponse:
        """Wakes all instances, then lets the model go on unless it is paused by hand. Two calls at once are one. Raises
        ModelNotFound, Overloaded, or the first instance's error; then it may be called again."""
        model, _ = self._of(request.model)
        waking = self._waking.get(model)
        if waking is None:
            waking = self._waking[model] = asyncio.ensure_future(self._orders.carry_out(self._wake_model(request)))
            waking.add_done_callback(lambda _: self._waking.pop(model, None))
        return await asyncio.shield(waking)

    async def _wake_model(self, request: conductor_pb2.WakeModelRequest) -> conductor_pb2.WakeModelResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, UPDATE_MS)
        with self._alone(model):
            lease = self._lease(instances, secrets.token_hex(16))
            await lease.begin(until)
            try:
                if any(one.not_ready_reason.startswith(ASLEEP) for one in instances):  # none goes on before all can
                    await self._pause(lease, instances, common_pb2.PAUSE_MODE_KEEP, until, "waking")
                left_s = max(0.1, until - time.monotonic())
                order = instance_pb2.WakeRequest(deadline_ms=max(1, int(1000 * left_s)), order=lease.ref)
                told = good(await call_all(instances, lambda stub, _: stub.Wake(order, timeout=left_s + GRACE_S)))
            finally:
                await lease.release()
        epoch = max(one.weights_epoch for one in told)
        return conductor_pb2.WakeModelResponse(model=model, weights_epoch=epoch, instances=len(told))

    def is_busy(self, model: str) -> bool:
        """Whether an order for this model is being carried out."""
        return model in self._busy

    async def catch_up(self, members: Sequence[Instance], epoch: int, path: str, deadline_s: float) -> None:
        """Gives the members that are one instance, which gets no work, the weights that others of its model have, and
        lets it go on unless the model is paused. It holds nothing by a lease, so that it delays no order of others: who
        dies in the middle leaves it paused, and the next leader goes on. Raises the first member's error: it stays
        paused then, and says why."""
        model, until = members[0].model.name, time.monotonic() + deadline_s
        if any(instance.model.weights_epoch < epoch for instance in members):
            await self._pause(None, members, common_pb2.PAUSE_MODE_ABORT, until, f"{CATCH_UP} of epoch {epoch}")
            for one in await self._take(None, members, epoch, common_pb2.WeightsSource(path=path), until):
                if one.HasField("error"):
                    error = status.from_detail(one.error)
                    reason = f"{CATCH_UP} of epoch {epoch}: {error.message}"[:MAX_REASON]
                    until = time.monotonic() + RESUME_S
                    await self._pause(None, members, common_pb2.PAUSE_MODE_ABORT, until, reason)
                    raise error
        with self._alone(model):  # an order that is carried out here may have paused the others for itself alone
            others = [
                i
                for i in self._instances()
                # Two that catch up at once do not wait for each other.
                if i.model.name == model and i not in members and CATCH_UP not in i.not_ready_reason
            ]
            if others and all(i.not_ready_reason.startswith(Paused.PREFIX) for i in others):
                return
            request = instance_pb2.ResumeRequest()
            good(await call_all(members, lambda stub, _: stub.Resume(request, timeout=RESUME_S)))

    def _of(self, name: str) -> tuple[str, list[Instance]]:
        """Returns the model and its instances. Raises ModelNotFound, or InvalidRequest where external engines serve it,
        which take no orders of a conductor."""
        known = self._instances()
        models = dict.fromkeys(instance.model.name for instance in known)
        if not name and len(models) == 1:
            [name] = models
        found = [instance for instance in known if instance.model.name == name]
        if not found:
            raise ModelNotFound(f"model={name!r}: no instance of it; there are: {', '.join(models)}", field="model")
        if external := next((instance.http_url for instance in found if instance.external), ""):
            raise InvalidRequest.of(
                "model", name, f"external engines serve it, as {external}, which take no orders here"
            )
        return name, found

    def _alone(self, model: str) -> _Turn:
        if model in self._busy:
            raise Overloaded(f"model={model!r}: another order is being carried out", retry_after_ms=1000)
        return _Turn(self._busy, model)

    async def _pause(
        self, lease: OrderLease | None, instances: Sequence[Instance], mode: Any, until: float, reason: str
    ) -> int:
        ended = 0
        for decodes in (True, False):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlinePassed("the instances were not paused in time", field="deadline_ms")
            order = instance_pb2.PauseRequest(
                mode=mode, deadline_ms=max(1, int(1000 * left_s)), reason=reason, order=lease.ref if lease else None
            )
            these = [instance for instance in instances if instance.role.decodes is decodes]
            answers = await call_all(these, lambda stub, _: stub.Pause(order, timeout=left_s + GRACE_S))  # noqa: B023
            ended += sum(answer.ended for answer in good(answers))
        return ended

    async def _take(
        self,
        lease: OrderLease | None,
        instances: Sequence[Instance],
        epoch: int,
        source: common_pb2.WeightsSource,
        until: float,
    ) -> list[common_pb2.WeightsTaken]:
        left_s = max(0.1, until - time.monotonic())
        order = instance_pb2.UpdateWeightsRequest(
            weights_epoch=epoch,
            source=source,
            deadline_ms=max(1, int(1000 * left_s)),
            order=lease.ref if lease else None,
        )
        answers = await call_all(instances, lambda stub, _: stub.UpdateWeights(order, timeout=left_s + GRACE_S))
        return [
            common_pb2.WeightsTaken(
                instance=ref_out(i.ref), weights_epoch=i.model.weights_epoch, error=status.to_detail(answer)
            )
            if isinstance(answer, KvmeshError)
            else answer.taken
            for i, answer in zip(instances, answers, strict=True)
        ]


class _Turn:
    def __init__(self, busy: set[str], model: str) -> None:
        self._busy, self._model = busy, model

    def __enter__(self) -> None:
        self._busy.add(self._model)

    def __exit__(self, *_: object) -> None:
        self._busy.discard(self._model)


def _order_id(told: str) -> str:
    """Returns an order's id, a new one where none is told. Raises InvalidRequest."""
    if len(told) > MAX_ORDER_ID or not told.isprintable():
        raise InvalidRequest.of("order_id", told, f"at most {MAX_ORDER_ID} characters that can be printed")
    return told or secrets.token_hex(16)


def _check_pause(for_ms: int) -> None:
    if for_ms > MOST_PAUSE_MS:
        raise InvalidRequest.of("for_ms", for_ms, f"at most {MOST_PAUSE_MS}, seven days; 0: until it is resumed")


def _deadline_s(told_ms: int, default_ms: int) -> float:
    if told_ms > MOST_MS:
        raise InvalidRequest.of("deadline_ms", told_ms, f"at most {MOST_MS}")
    return (told_ms or default_ms) / 1000
