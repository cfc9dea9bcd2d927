"""One instance at several conductors: each hears all that there is to tell, once, whatever becomes of the others."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.membership.registrar import MAX_KEPT_FINISHED, _Kept
from kvmesh.rpc.pb import common_pb2
from tests.membership.test_registration import Deaf, Instance, alive, count, deaf
from tests.support.services import until

NOBODY = "127.0.0.1:1"


def told(servicer: Deaf, name: str) -> list[Any]:
    return [one for beat in servicer.beats for one in getattr(beat, name)]


async def test_every_conductor_hears_everything_though_another_does_not_answer() -> None:
    well, ill = Deaf(), Deaf()
    ill.failing = True
    async with deaf(well) as a, deaf(ill) as b:
        instance = Instance(f"{NOBODY},{a},{b}", NOBODY)
        instance.fresh.prefill_samples.add(request_id="first", computed_tokens=5)
        async with alive(instance):
            await count(well.beats, 1)
            await count(ill.beats, 2)
            instance.fresh.finished_request_ids.append("x")
            instance.fresh.outcomes.add(request_id="x")
            instance.registrar.urge()

            async def heard() -> bool:
                return told(well, "finished_request_ids") == ["x"]

            await until(heard)
            assert instance.registrar.registered["conductor"]
            ill.failing = False
            failed = len(ill.beats)
            await count(ill.beats, failed + 1)
            late = ill.beats[failed]
            assert [s.request_id for s in late.prefill_samples] == ["first"]
            assert list(late.finished_request_ids) == ["x"]
            assert [o.request_id for o in late.outcomes] == ["x"]
        assert [s.request_id for s in told(well, "prefill_samples")] == ["first"], "once is enough"
        assert [o.request_id for o in told(well, "outcomes")] == ["x"]
        assert not well.beats[-1].ready and not ill.beats[-1].ready, "both hear the goodbye"


async def test_a_new_role_is_told_to_all() -> None:
    one, two = Deaf(), Deaf()
    async with deaf(one) as a, deaf(two) as b, alive(instance := Instance(f"{a},{b}", NOBODY)):
        await count(one.beats, 1)
        await count(two.beats, 1)
        instance.registrar.become(common_pb2.ROLE_BOTH)

        async def again() -> bool:
            return (one.registrations, two.registrations) == (2, 2)

        await until(again)


def test_what_is_kept_is_bounded_and_nothing_new_is_lost_with_what_was_sent() -> None:
    kept: _Kept[int] = _Kept(3)
    kept.extend([1, 2])
    end = kept.end
    kept.extend([3, 4])  # while [1, 2] is on its way; 1 has no room any more
    assert list(kept) == [2, 3, 4]
    kept.drop_until(end)
    assert list(kept) == [3, 4]
    kept.extend(range(MAX_KEPT_FINISHED))
    assert list(kept) == list(range(MAX_KEPT_FINISHED))[-3:]
    kept.drop_until(kept.end)
    assert list(kept) == []


def test_an_instance_needs_a_conductor() -> None:
    with pytest.raises(ConfigError, match="conductor=' , '"):
        Instance(" , ", NOBODY)
