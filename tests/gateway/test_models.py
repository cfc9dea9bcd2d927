"""Several models behind one gateway, each with its tokenizer, facts and readiness."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvmesh.config import load
from kvmesh.errors import ConfigError, InvalidRequest, ModelNotFound, Unavailable
from kvmesh.rpc.pb import gateway_pb2
from kvmesh.rpc.status import from_rpc_error
from kvmesh.services.gateway.config import GatewayConfig
from kvmesh.services.gateway.models import Models
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import Mesh, MeshMaker, until
from tests.support.gateway import tokenizers_made
from tests.support.gateway.scripted import FINGERPRINT, MODEL, fingerprint_of

OTHER = "org/other"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with another vocabulary and another chat template."""
    folder = tmp_path_factory.mktemp("models") / "other"
    return tokenizers_made.save(tokenizers_made.byte_level(300), folder, chat_template="{{ messages[0]['content'] }}!")


@pytest.fixture
async def both(make_mesh: MeshMaker, other: Path) -> Mesh:
    return await make_mesh(models=(f"{OTHER}={other}",), also={OTHER: True})


async def test_each_model_reads_with_its_own_tokenizer_and_template(both: Mesh, other: Path) -> None:
    theirs = Tokenizer.load(other)
    text = "The quick brown fox"
    assert theirs.encode(text, add_special_tokens=False) != both.ids(text)
    chat: list[Any] = [{"role": "user", "content": text}]
    for model, prompt in (
        (MODEL, both.ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")),
        (OTHER, theirs.encode(f"{text}!", add_special_tokens=False)),
    ):
        both.decodes[0].runs.clear()
        both.conductor.asked.clear()
        answer = await both.client.chat.completions.create(model=model, messages=chat)
        assert answer.model == model
        run = both.decodes[0].runs[0]
        assert run.prompt == prompt
        assert run.start.model_fingerprint == (FINGERPRINT if model == MODEL else fingerprint_of(OTHER))
        assert both.conductor.asked[0].model == model
    # The same token ids of two models are other blocks.
    both.conductor.asked.clear()
    for model in (MODEL, OTHER):
        await both.client.completions.create(model=model, prompt=list(range(40)), max_tokens=3)
    first, second = (asked.block_keys for asked in both.conductor.asked)
    assert len(first) == len(second) == 32
    assert first != second


async def test_logprobs_name_the_models_own_tokens(both: Mesh, other: Path) -> None:
    theirs = Tokenizer.load(other)
    for model, tokenizer in ((MODEL, both.tokenizer), (OTHER, theirs)):
        both.decodes[0].script = both.says("fox", eos=False)
        tokens = both.ids("fox")
        answer = await both.client.completions.create(model=model, prompt="Hi", logprobs=0, max_tokens=len(tokens))
        logprobs: Any = answer.choices[0].logprobs
        assert logprobs.tokens == [tokenizer.piece(token)[0] for token in tokens]
        assert answer.choices[0].text == tokenizer.decode(tokens)


async def test_both_are_listed_with_their_readiness(make_mesh: MeshMaker, other: Path) -> None:
    mesh = await make_mesh(models=(f"{OTHER}={other}",), also={OTHER: False}, wait_ready=False)
    status = await until(mesh.status, lambda status: "loading" in status.model_status[1].not_ready_reason)
    assert (status.ready, status.not_ready_reason, list(status.models)) == (True, "", [MODEL, OTHER])
    assert [(one.name, one.ready) for one in status.model_status] == [(MODEL, True), (OTHER, False)]
    cards = {card["id"]: card for card in (await mesh.http.get("/v1/models")).json()["data"]}
    assert list(cards) == [MODEL, OTHER]
    assert cards[MODEL]["ready"] is True
    assert cards[MODEL]["max_context_tokens"] == 512
    assert cards[MODEL]["block_tokens"] == 16
    assert cards[OTHER]["ready"] is False
    assert "loading" in cards[OTHER]["not_ready_reason"]
    assert (await mesh.http.get(f"/v1/models/{OTHER}")).json() == cards[OTHER]
    assert [model.id for model in (await mesh.client.models.list()).data] == [MODEL, OTHER]
    for path, code in (("/health", 200), ("/ready", 200)):
        response = await mesh.http.get(path)
        assert response.status_code == code, "one model without instances does not close the door on the other"
        assert response.json()["models"][MODEL] == {"ready": True}
        assert "loading" in response.json()["models"][OTHER]["not_ready_reason"]
    metrics = (await mesh.http.get("/metrics")).text
    assert f'kvmesh_gateway_model_ready_bool{{model="{OTHER}"}} 0.0' in metrics
    assert f'kvmesh_gateway_model_ready_bool{{model="{MODEL}"}} 1.0' in metrics


async def test_a_model_that_nobody_has_registered_yet(make_mesh: MeshMaker, other: Path) -> None:
    mesh = await make_mesh(models=(f"{OTHER}={other}",))
    response = await mesh.http.post("/v1/completions", json={"model": OTHER, "prompt": "Hi"})
    assert response.status_code == 503
    assert "'org/other' cannot be served yet: no instance has registered" in response.json()["error"]["message"]
    assert (await mesh.http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"})).status_code == 200
    await mesh.conductor.stop()
    response = await until(lambda: mesh.http.get("/ready"), lambda response: response.status_code == 503)
    assert response.json()["reason"].count("cannot be reached") == 1, "said once, not for each model"


async def test_an_unknown_model_is_told_the_known_ones(both: Mesh) -> None:
    for response in (
        await both.http.post("/v1/completions", json={"model": "gpt", "prompt": "Hi"}),
        await both.http.post(
            "/v1/chat/completions", json={"model": "gpt", "messages": [{"role": "user", "content": "x"}]}
        ),
        await both.http.get("/v1/models/gpt"),
    ):
        assert response.status_code == 404
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == f"model='gpt': not served here; served: {MODEL}, {OTHER}"


async def generate(mesh: Mesh, **fields: Any) -> list[gateway_pb2.GenerateResponse]:
    request = gateway_pb2.GenerateRequest(text="Hi", max_tokens=3, **fields)
    return [part async for part in mesh.stub.Generate(request, timeout=15)]


async def test_over_grpc(both: Mesh) -> None:
    for model in (MODEL, OTHER):
        assert await generate(both, model=model)
        assert both.conductor.asked[-1].model == model
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(both)
    err = from_rpc_error(caught.value)
    assert isinstance(err, InvalidRequest)
    assert err.field == "model"
    assert err.message == f"model='': required, as there are several; served: {MODEL}, {OTHER}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(both, model="gpt")
    assert isinstance(from_rpc_error(caught.value), ModelNotFound)


# ── configuration ─────────────────────────────────────────────────────────────────────────────────


def test_models_from_flags_and_environment() -> None:
    config = load(GatewayConfig, {"models": "a=/m/a, b = /m/b=c"}, toml=None, env={"KVMESH_MODEL": "/m/first"})
    assert config.folders == {"first": "/m/first", "a": "/m/a", "b": "/m/b=c"}
    assert load(GatewayConfig, {"models": "a=/m/a"}, toml=None, env={}).folders == {"a": "/m/a"}
    named = dataclasses.replace(config, served_name="main")
    assert list(named.folders) == ["main", "a", "b"]


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("a", "models='a': must be NAME=FOLDER"),
        ("=x", "must be NAME=FOLDER"),
        ("a=", "must be NAME=FOLDER"),
        ("a=/x,a=/y", "models='a=/y': there are two models of this name"),
        ("first=/x", "there are two models of this name"),
        ("n" * 201 + "=/x", "the name is over 200 characters"),
    ],
)
def test_models_that_are_refused(models: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(GatewayConfig, {"model": "/m/first", "models": models}, toml=None, env={})
    assert words in caught.value.message
    assert caught.value.field == "models"


def test_many_models_do_not_flood_an_error() -> None:
    preparer: Any = None
    models = Models({f"m{index}": preparer for index in range(500)})
    with pytest.raises(ModelNotFound, match=r"served: m0, .*m19 and 480 more$"):
        models.find("x" * 100_000)
    with pytest.raises(Unavailable, match="the conductor has not answered yet"):
        models.find("m3").require()
