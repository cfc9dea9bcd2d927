"""Orders of operators and trainers for all instances of a model: pause, resume, other weights, sleep. Who carries them
out is each instance; the order among them is here, and nothing is decided by the brain.

Instances that decode are paused first, so that the prompts of what they have taken are still computed in a pause that
lets requests finish. All of them are paused before any takes other weights, and none goes on before all that can have
taken them: at no time do two instances that compute have weights of different epochs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvmesh.errors import DeadlinePassed, InvalidRequest, KvmeshError, ModelNotFound, Overloaded, Paused, Unavailable
from kvmesh.kvcache.keys import check_epoch
from kvmesh.rpc import channels, status
from kvmesh.rpc.authorisation import ServerRole
from kvmesh.rpc.pb import common_pb2, conductor_pb2, instance_pb2, instance_pb2_grpc
from kvmesh.rpc.running_orders import RunningOrders
from kvmesh.services.conductor.fleet.instance import Instance
from kvmesh.services.conductor.mapping import ref_out

log = logging.getLogger(__name__)

PAUSE_MS, UPDATE_MS, MOST_MS = 60_000, 600_000, 3_600_000
RESUME_S = 10.0
UNDO_S = 60.0  # for instances that wake because another one could not sleep
ASLEEP = f"{Paused.PREFIX}asleep"
CATCH_UP = "fetching the weights"  # begins the reason of a pause that this is
MAX_REASON = 300
GRACE_S = 2.0  # after its deadline an instance's own word is still waited for
Answer = TypeVar("Answer")
Call = Callable[[Any, Instance], Awaitable[Any]]  # of an Instance stub


class ModelControl:
    """Carries out one order a model at a time. `instances` returns those that are known. An order that has begun is
    carried out to its end though its caller goes away: half of an update would leave the model paused for ever."""

    def __init__(self, instances: Callable[[], Sequence[Instance]]) -> None:
        self._instances = instances
        self._orders = RunningOrders()
        self._busy: set[str] = set()
        self._paused: set[str] = set()  # by an order here, that no other has ended
        self._asleep: dict[str, bool] = {}  # by an order here: whether it goes on once it is awake
        self._waking: dict[str, asyncio.Task[conductor_pb2.WakeModelResponse]] = {}

    async def pause(self, request: conductor_pb2.PauseModelRequest) -> conductor_pb2.PauseModelResponse:
        """Raises ModelNotFound, Overloaded, or the first instance's error; then those stay paused that are."""
        return await self._orders.carry_out(self._pause_model(request))

    async def _pause_model(self, request: conductor_pb2.PauseModelRequest) -> conductor_pb2.PauseModelResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, PAUSE_MS)
        with self._alone(model):
            self._paused.add(model)
            if model in self._asleep:
                self._asleep[model] = False
            ended = await self._pause(instances, request.mode, until, request.reason)
        return conductor_pb2.PauseModelResponse(model=model, ended=ended, instances=len(instances))

    async def resume(self, request: conductor_pb2.ResumeModelRequest) -> conductor_pb2.ResumeModelResponse:
        """Raises ModelNotFound, Overloaded, or the first instance's error, after all have been asked."""
        return await self._orders.carry_out(self._resume_model(request))

    async def _resume_model(self, request: conductor_pb2.ResumeModelRequest) -> conductor_pb2.ResumeModelResponse:
        model, instances = self._of(request.model)
        with self._alone(model):
            epochs = await self._resume(instances)
            self._paused.discard(model)
        return conductor_pb2.ResumeModelResponse(model=model, weights_epoch=max(epochs), instances=len(epochs))

    async def update(
        self, request: conductor_pb2.UpdateModelWeightsRequest
    ) -> conductor_pb2.UpdateModelWeightsResponse:
        """Pauses, updates and resumes. Instances that were paused before, or could not take the weights, stay paused.
        Raises as `pause` does, or the first error where no instance has taken the weights; then what ran goes on. It
        goes on to its end, too, when the caller goes away."""
        return await self._orders.carry_out(self._update_model(request))

    async def _update_model(
        self, request: conductor_pb2.UpdateModelWeightsRequest
    ) -> conductor_pb2.UpdateModelWeightsResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, UPDATE_MS)
        epoch = request.weights_epoch or time.time_ns()
        highest = max(instance.model.weights_epoch for instance in instances)
        if epoch <= highest:
            why = f"must be greater than {highest}, which {model} has: an epoch names the weights of one update"
            raise InvalidRequest.of("weights_epoch", epoch, why)
        check_epoch(epoch, highest, time.time_ns())
        stays = request.stay_paused or self._is_paused(model, instances)
        with self._alone(model):
            start = time.monotonic()
            try:
                ended = await self._pause(instances, request.mode, until, f"weights epoch {epoch}")
                taken = await self._take(instances, epoch, request.source, until)
            except KvmeshError:
                if not stays:
                    await self._resume(instances, quietly=True)
                raise
            new = [i for i, one in zip(instances, taken, strict=True) if not one.HasField("error")]
            if not new:  # the old weights are served on, where they are whole
                if not stays:
                    await self._resume(instances, quietly=True)
                raise status.from_detail(taken[0].error)
            if not stays:
                await self._resume(new)
            elif request.stay_paused:
                self._paused.add(model)
            paused_s = time.monotonic() - start
        log.info("model %s has weights of epoch %d at %d of %d instances", model, epoch, len(new), len(instances))
        return conductor_pb2.UpdateModelWeightsResponse(
            model=model, weights_epoch=epoch, taken=taken, paused_seconds=paused_s, ended=ended
        )

    async def sleep(self, request: conductor_pb2.SleepModelRequest) -> conductor_pb2.SleepModelResponse:
        """Pauses, and puts all instances to sleep. Raises ModelNotFound, Overloaded, or the first instance's error;
        then none sleeps that was awake, and what ran goes on."""
        return await self._orders.carry_out(self._sleep_model(request))

    async def _sleep_model(self, request: conductor_pb2.SleepModelRequest) -> conductor_pb2.SleepModelResponse:
        model, instances = self._of(request.model)
        until = time.monotonic() + _deadline_s(request.deadline_ms, PAUSE_MS)
        with self._alone(model):
            sleeps, goes_on = self._sleeps(model, instances), not self._is_paused(model, instances)
            try:
                ended = await self._pause(instances, request.mode, until, request.reason or "going to sleep")
                left_s = max(0.1, until - time.monotonic())
                order = instance_pb2.SleepRequest(level=request.level, deadline_ms=max(1, int(1000 * left_s)))
                answers = _good(await _all(instances, lambda stub, _: stub.Sleep(order, timeout=left_s + GRACE_S)))
            except KvmeshError:
                if not sleeps:
                    undo = instance_pb2.WakeRequest(stay_paused=not goes_on)
                    await _all(instances, lambda stub, _: stub.Wake(undo, timeout=UNDO_S))
                    if goes_on:
                        await self._resume(instances, quietly=True)
                raise
            self._paused.add(model)
            self._asleep.setdefault(model, sleeps or goes_on)
        released = [answer.released for answer in answers]
        log.info("model %s sleeps at all of %d instances", model, len(instances))
        return conductor_pb2.SleepModelResponse(
            model=model, released=released, ended=ended + sum(one.ended for one in released)
        )

    async def wake(self, request: conductor_pb2.WakeModelRequest) -> conductor_pb2.WakeModelResponse:
        """Wakes all instances, then lets the model go on if it was the sleep that paused it. Two calls at once are one.
        Raises ModelNotFound, Overloaded, or the first instance's error; then it may be called again."""
        model, _ = self._of(request.model)
        waking = self._waking.get(model)
        if waking is None:
            waking = self._waking[model] = asyncio.ensure_future(self._orders.carry_out(self._wake_model(request)))
            waking.add_done_callback(lambda _: self._waking.pop(model, None))
        return await asyncio.shield(waking)

    async def _wake_model(self, request: conductor_pb2.WakeModelRequest) -> conductor_pb2.WakeModelResponse:
        model, instances = self._of(request.model)
        left_s = _deadline_s(request.deadline_ms, UPDATE_MS)
        with self._alone(model):
            goes_on = self._asleep.get(model, self._sleeps(model, instances))
            order = instance_pb2.WakeRequest(deadline_ms=int(1000 * left_s), stay_paused=True)
            answers = _good(await _all(instances, lambda stub, _: stub.Wake(order, timeout=left_s + GRACE_S)))
            if goes_on:
                await self._resume(instances)
                self._paused.discard(model)
            self._asleep.pop(model, None)
        epoch = max(answer.weights_epoch for answer in answers)
        paused = not goes_on and self._is_paused(model, instances)
        return conductor_pb2.WakeModelResponse(model=model, weights_epoch=epoch, instances=len(answers), paused=paused)

    def _sleeps(self, model: str, instances: Sequence[Instance]) -> bool:
        return model in self._asleep or any(one.not_ready_reason.startswith(ASLEEP) for one in instances)

    def is_busy(self, model: str) -> bool:
        """Whether an order for this model is being carried out."""
        return model in self._busy

    async def catch_up(self, members: Sequence[Instance], epoch: int, path: str, deadline_s: float) -> None:
        """Gives the members that are one instance, which gets no work, the weights that others of its model have, and
        lets it go on unless the model is paused. Raises the first member's error: it stays paused then, and says
        why."""
        model, until = members[0].model.name, time.monotonic() + deadline_s
        paused = [
            i for i in members if i.not_ready_reason.startswith(Paused.PREFIX) and CATCH_UP not in i.not_ready_reason
        ]
        if any(instance.model.weights_epoch < epoch for instance in members):
            await self._pause(members, common_pb2.PAUSE_MODE_ABORT, until, f"{CATCH_UP} of epoch {epoch}")
            for one in await self._take(members, epoch, common_pb2.WeightsSource(path=path), until):
                if one.HasField("error"):
                    error = status.from_detail(one.error)
                    reason = f"{CATCH_UP} of epoch {epoch}: {error.message}"[:MAX_REASON]
                    await self._pause(members, common_pb2.PAUSE_MODE_ABORT, time.monotonic() + RESUME_S, reason)
                    raise error
        others = [i for i in self._instances() if i.model.name == model and i not in members]
        if model in self._paused or (paused and all(i.not_ready_reason.startswith(Paused.PREFIX) for i in others)):
            return
        with self._alone(model):
            await self._resume(members)

    def _of(self, name: str) -> tuple[str, list[Instance]]:
        """Returns the model and its instances. Raises ModelNotFound."""
        known = self._instances()
        models = dict.fromkeys(instance.model.name for instance in known)
        if not name and len(models) == 1:
            [name] = models
        found = [instance for instance in known if instance.model.name == name]
        if not found:
            raise ModelNotFound(f"model={name!r}: no instance of it; there are: {', '.join(models)}", field="model")
        return name, found

    def _is_paused(self, model: str, instances: Sequence[Instance]) -> bool:
        told = (instance.not_ready_reason.startswith(Paused.PREFIX) for instance in instances)
        return model in self._paused or all(told)

    def _alone(self, model: str) -> _Turn:
        if model in self._busy:
            raise Overloaded(f"model={model!r}: another order is being carried out", retry_after_ms=1000)
        return _Turn(self._busy, model)

    async def _pause(self, instances: Sequence[Instance], mode: Any, until: float, reason: str) -> int:
        ended = 0
        for decodes in (True, False):
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise DeadlinePassed("the instances were not paused in time", field="deadline_ms")
            order = instance_pb2.PauseRequest(mode=mode, deadline_ms=max(1, int(1000 * left_s)), reason=reason)
            these = [instance for instance in instances if instance.role.decodes is decodes]
            answers = await _all(these, lambda stub, _: stub.Pause(order, timeout=left_s + GRACE_S))  # noqa: B023
            ended += sum(answer.ended for answer in _good(answers))
        return ended

    async def _take(
        self, instances: Sequence[Instance], epoch: int, source: common_pb2.WeightsSource, until: float
    ) -> list[common_pb2.WeightsTaken]:
        left_s = max(0.1, until - time.monotonic())
        order = instance_pb2.UpdateWeightsRequest(
            weights_epoch=epoch, source=source, deadline_ms=max(1, int(1000 * left_s))
        )
        answers = await _all(instances, lambda stub, _: stub.UpdateWeights(order, timeout=left_s + GRACE_S))
        return [
            common_pb2.WeightsTaken(
                instance=ref_out(i.ref), weights_epoch=i.model.weights_epoch, error=status.to_detail(answer)
            )
            if isinstance(answer, KvmeshError)
            else answer.taken
            for i, answer in zip(instances, answers, strict=True)
        ]

    async def _resume(self, instances: Sequence[Instance], *, quietly: bool = False) -> list[int]:
        """Returns the epochs that are served."""
        answers = await _all(instances, lambda stub, _: stub.Resume(instance_pb2.ResumeRequest(), timeout=RESUME_S))
        if quietly:
            return [answer.weights_epoch for answer in answers if not isinstance(answer, KvmeshError)]
        return [answer.weights_epoch for answer in _good(answers)]


class _Turn:
    def __init__(self, busy: set[str], model: str) -> None:
        self._busy, self._model = busy, model

    def __enter__(self) -> None:
        self._busy.add(self._model)

    def __exit__(self, *_: object) -> None:
        self._busy.discard(self._model)


async def _all(instances: Sequence[Instance], call: Call) -> list[Any]:
    """Returns each instance's answer, or the KvmeshError that it was."""

    async def one(instance: Instance) -> Any:
        try:
            async with channels.connect(instance.ref.address, ServerRole.INSTANCE) as channel:
                return await status.called(call(instance_pb2_grpc.InstanceStub(channel), instance))
        except KvmeshError as error:
            return Unavailable(f"{instance.ref.instance_id}: {error.message}") if not error.field else error

    return list(await asyncio.gather(*(one(instance) for instance in instances)))


def _good(answers: Sequence[Any]) -> list[Any]:
    """Raises the first that is an error."""
    for answer in answers:
        if isinstance(answer, KvmeshError):
            raise answer
    return list(answers)


def _deadline_s(told_ms: int, default_ms: int) -> float:
    if told_ms > MOST_MS:
        raise InvalidRequest.of("deadline_ms", told_ms, f"at most {MOST_MS}")
    return (told_ms or default_ms) / 1000
