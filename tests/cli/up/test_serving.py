"""`kvmesh up` says that a mesh is up only when it serves."""

from __future__ import annotations

from typing import Any

import pytest

from kvmesh.cli.up.serving import judged

NODES = {"prefill-0": "prefill", "decode-0": "decode", "pool-0": "pool"}


def known(*names: str, ready: bool = True) -> list[dict[str, Any]]:
    return [
        {"instance": {"instance_id": n}, "ready": ready, "not_ready_reason": "" if ready else "loads"} for n in names
    ]


def test_a_mesh_whose_nodes_are_all_known_serves() -> None:
    assert judged(NODES, {"instances": known("prefill-0", "decode-0")}, {"members": known(*NODES)}) == []


@pytest.mark.parametrize(
    ("conductor", "store", "says"),
    [
        ({"instances": known("prefill-0", "decode-0")}, {"error": "no store master leads"}, "no store master leads"),
        ({"instances": known("prefill-0", "decode-0")}, {"members": known("pool-0")}, "no store master has taken it"),
        ({"instances": known("prefill-0")}, {"members": known(*NODES)}, "decode-0: no conductor has registered it"),
        ({"instances": known(*NODES, ready=False)}, {"members": known(*NODES)}, "gets no work: loads"),
        ({"error": "gone"}, {"members": known(*NODES)}, "conductor: gone"),
    ],
)
def test_what_is_wrong_is_named(conductor: dict[str, Any], store: dict[str, Any], says: str) -> None:
    assert any(says in line for line in judged(NODES, conductor, store))


def test_instances_of_another_dtype_may_wait_for_partners_where_several_were_asked_for() -> None:
    unfit = known("decode-0", ready=False)
    unfit[0]["not_ready_reason"] = "its KV does not fit prefill-0, which has dtype='float32', this one 'bfloat16'"
    told = {"instances": [*known("prefill-0"), *unfit]}, {"members": known(*NODES)}
    assert judged(NODES, *told, mixed=True) == []
    assert len(judged(NODES, *told)) == 1
    assert judged(NODES, {"instances": known("prefill-0", "decode-0", ready=False)}, told[1], mixed=True) != []
