"""Who may be how urgent (finding 16): over REST and gRPC, with keys and without."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import grpc
import pytest

from kvmesh.errors import InvalidRequest
from kvmesh.rpc.pb import gateway_pb2
from kvmesh.rpc.status import from_rpc_error
from tests.gateway.conftest import MeshMaker
from tests.support.gateway.scripted import MODEL

KEY = "sk-kvmesh-{}" + "x" * 40


def entry(name: str, more: str = "") -> str:
    digest = hashlib.sha256(KEY.format(name).encode()).hexdigest()
    return f'[[key]]\nname = "{name}"\nsha256 = {json.dumps(digest)}\n{more}\n'


@pytest.mark.parametrize(
    ("key", "best", "refused"), [("alice", 0, -1), ("boss", -50, -51), ("batch", 5, 4), ("", -100, -101)]
)
async def test_the_cap_of_each_client(make_mesh: MeshMaker, tmp_path: Path, key: str, best: int, refused: int) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice") + entry("boss", "max_priority = -50") + entry("batch", "max_priority = 5"))
    mesh = await make_mesh(api_keys=str(keys) if key else "")
    bearer = f"Bearer {KEY.format(key)}"
    for priority, status in ((best, 200), (best + 7, 200), (None, 200), (refused, 400), (-(2**31) + 1, 400)):
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
        body |= {} if priority is None else {"priority": priority}
        told = await mesh.http.post("/v1/completions", json=body, headers={"authorization": bearer})
        assert told.status_code == status, told.text
        if status == 400:
            assert told.json()["error"]["param"] == "priority" and str(best) in told.json()["error"]["message"]
    headers = {"authorization": bearer, "x-kvmesh-priority": str(refused)}
    told = await mesh.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"}, headers=headers)
    assert told.status_code == 400
    call = mesh.stub.Generate(
        gateway_pb2.GenerateRequest(text="Hi", priority=refused), metadata=[("authorization", bearer)], timeout=10
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    err = from_rpc_error(caught.value)
    assert isinstance(err, InvalidRequest) and err.field == "priority"
    starts = [run.start.priority for decode in mesh.decodes for run in decode.runs]
    # a request without one is ordinary, also where the key may not be urgent
    assert starts == [best, best + 7, 0]
