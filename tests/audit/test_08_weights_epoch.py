"""A request says which weights its block keys were made for, and instances of others refuse it by name (finding 8)."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.errors import KvmeshError, ModelNotFound, WeightsChanged
from kvmesh.instance.served_weights import ServedWeights
from kvmesh.rpc.pb import common_pb2, conductor_pb2, decode_pb2, prefill_pb2
from kvmesh.services.decode import mapping
from kvmesh.services.decode.requests import ServingInstance, check_start
from kvmesh.services.prefill import wire

SERVED = ServedWeights("ab" * 32, 4)
OTHERS = [
    ({"model_fingerprint": "cd" * 32}, "model_fingerprint", "cdcdcdcdcdcd"),
    ({"weights_epoch": 5}, "weights_epoch", "weights_epoch=5: this instance serves epoch 4"),
    ({"weights_epoch": 0}, "weights_epoch", "weights_epoch=0"),
    ({"weights_epoch": 2**64 - 1}, "weights_epoch", str(2**64 - 1)),
]


def start(**changes: Any) -> decode_pb2.StartRequest:
    known: dict[str, Any] = {
        "request_id": "r",
        "model_fingerprint": SERVED.fingerprint,
        "weights_epoch": SERVED.epoch,
        "token_ids": bytes(20),
        "deadline_ms": 1000,
        "sampling": common_pb2.SamplingParams(max_tokens=1, top_p=1.0),
        "placement": conductor_pb2.Placement(prefill=common_pb2.InstanceRef(address="127.0.0.1:1")),
    }
    return decode_pb2.StartRequest(**(known | changes))


def at_decode(request: decode_pb2.StartRequest) -> None:
    check_start(request, ServingInstance(common_pb2.InstanceRef(), SERVED, 16, 512, (2,), 256), 0, None)


def at_prefill(request: decode_pb2.StartRequest) -> None:
    """What decode hands on of it."""
    handed: prefill_pb2.StartPrefill = mapping.start_prefill(1, request, 1, 1000, "").start
    wire.start_in(handed, 1, 1, SERVED, "me", 0, "", 512)


@pytest.mark.parametrize("check", [at_decode, at_prefill])
def test_a_request_for_other_weights_is_refused_by_field_and_value(check: Any) -> None:
    check(start())
    for changes, field, words in OTHERS:
        kind: type[KvmeshError] = WeightsChanged if field == "weights_epoch" else ModelNotFound
        with pytest.raises(kind, match=words) as caught:
            check(start(**changes))
        assert caught.value.field == field
