"""Folders that are fine, and every way in which one can be broken: one clear line each, naming file or tensor."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvmesh.engine.checkpoint import open_checkpoint, read_header
from kvmesh.engine.weights import Weights
from kvmesh.errors import CheckpointError
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.support.checkpoints import make_checkpoint
from tests.support.reference import assert_matches_reference

Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("made")
    return {
        "single": make_checkpoint(root / "single"),
        "sharded": make_checkpoint(root / "sharded", shards=3),
    }


@pytest.fixture
def copy(made: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    return lambda kind: Path(shutil.copytree(made[kind], tmp_path / kind))


def edit(path: Path, **changes: Any) -> None:
    raw = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            raw.pop(key, None)
        else:
            raw[key] = value
    path.write_text(json.dumps(raw))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def message(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    text = caught.value.message
    assert "\n" not in text
    return text


def test_reads_tensors_and_metadata(made: dict[str, Path]) -> None:
    with open_checkpoint(made["single"]) as checkpoint:
        assert checkpoint.name == "single"
        assert checkpoint.config.eos_token_ids == (258,)
        expected = load_file(made["single"] / "model.safetensors")
        assert set(checkpoint.tensors) == set(expected)
        assert checkpoint.nbytes == sum(t.nbytes for t in expected.values())
        weights = Weights(checkpoint, torch.float32, torch.device("cpu"))
        for name, tensor in expected.items():
            assert torch.equal(weights(name), tensor)
        fused = weights(Q, Q.replace("q_proj", "k_proj"))
        assert torch.equal(fused, torch.cat((expected[Q], expected[Q.replace("q_proj", "k_proj")])))


def test_fingerprint_names_the_model_not_its_files(
    made: dict[str, Path], copy: Callable[[str], Path], tmp_path: Path
) -> None:
    first = open_checkpoint(made["single"]).fingerprint
    assert open_checkpoint(made["sharded"]).fingerprint == first
    folder = copy("single")
    edit(folder / "config.json", eos_token_id=[1, 2], transformers_version="9")
    assert open_checkpoint(folder).fingerprint == first
    edit(folder / "config.json", rope_theta=10001.0)
    assert open_checkpoint(folder).fingerprint != first
    edit(folder / "config.json", rope_theta=10000.0)

    def tune(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q][5, 5] += 1e-3

    retensor(folder, tune)
    assert open_checkpoint(folder).fingerprint != first
    assert open_checkpoint(make_checkpoint(tmp_path / "other", seed=1)).fingerprint != first


def test_fingerprint_of_a_large_tensor_sees_both_ends_and_a_fine_tune(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "large", vocab_size=5003, tokenizer=False)
    seen = {open_checkpoint(folder).fingerprint}
    for row, column in ((0, 0), (5002, 63)):

        def change(tensors: dict[str, torch.Tensor], at: tuple[int, int] = (row, column)) -> None:
            tensors["model.embed_tokens.weight"][at] += 1.0

        retensor(folder, change)
        seen.add(open_checkpoint(folder).fingerprint)
    retensor(folder, lambda tensors: tensors.update({Q: tensors[Q] * 1.001}))
    seen.add(open_checkpoint(folder).fingerprint)
    assert len(seen) == 4


def test_eos_ids_of_both_files(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    assert open_checkpoint(folder).config.eos_token_ids == (258, 257)
    edit(folder / "config.json", eos_token_id=[3, 258])
    assert open_checkpoint(folder).config.eos_token_ids == (3, 258, 257)


@pytest.mark.slow
def test_tied_config_with_a_head_of_its_own(copy: Callable[[str], Path]) -> None:
    """transformers then uses the head; the folder's tensors decide, not the flag."""
    folder = copy("single")
    edit(folder / "config.json", tie_word_embeddings=True)
    [answer] = LocalEngine(folder, num_pages=4).generate([[5, 6, 7]], GenerateParams(max_tokens=8))
    assert_matches_reference(folder, [5, 6, 7], answer.token_ids)


@pytest.mark.slow
def test_bfloat16_checkpoint_runs_in_float32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "bf16", dtype=torch.bfloat16, family="llama")
    assert open_checkpoint(folder).config.dtype == "bfloat16"
    [answer] = LocalEngine(folder, num_pages=4).generate([[9, 8, 7, 6]], GenerateParams(max_tokens=12))
    assert_matches_reference(folder, [9, 8, 7, 6], answer.token_ids)


def test_not_a_folder(made: dict[str, Path], tmp_path: Path) -> None:
    assert "not a folder" in message(tmp_path / "nothing")
    assert "not a folder" in message(made["single"] / "config.json")
    (tmp_path / "empty").mkdir()
    assert "config.json" in message(tmp_path / "empty")


def test_broken_json(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text[: len(text) // 2])
    assert INDEX in message(folder) and "not valid JSON" in message(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json" in message(folder) and "list" in message(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json: not valid JSON" in message(folder)
    (folder / "config.json").write_text("[" * 100_000)
    assert "config.json: not valid JSON" in message(folder)


def test_no_weights(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "supported weights: safetensors" in message(folder)


def test_missing_shard(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    (folder / SHARD).unlink()
    assert SHARD in message(folder) and "no such file" in message(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -4096, -1])
def test_truncated_shard(copy: Callable[[str], Path], keep: int) -> None:
    folder = copy("sharded")
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data[:keep] if keep else b"")
    assert SHARD in message(folder) and "truncated" in message(folder)


def test_missing_index_entry(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map[Q]
    edit(folder / INDEX, weight_map=weight_map)
    assert f"tensor {Q} is missing" in message(folder)


def test_index_entry_without_its_tensor(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    other = next(file for file in weight_map.values() if file != weight_map[Q])
    edit(folder / INDEX, weight_map=weight_map | {Q: other})
    assert Q in message(folder) and other in message(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", 7])
def test_index_that_points_out_of_the_folder(copy: Callable[[str], Path], name: Any) -> None:
    folder = copy("sharded")
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, weight_map=weight_map | {Q: name})
    assert "is not a file name" in message(folder)


def test_empty_index(copy: Callable[[str], Path]) -> None:
    folder = copy("sharded")
    edit(folder / INDEX, weight_map={})
    assert "weight_map" in message(folder)


def test_wrong_shape(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    retensor(folder, lambda tensors: tensors.update({Q: tensors[Q][:, :-1].contiguous()}))
    text = message(folder)
    assert Q in text and "[64, 63]" in text and "[64, 64]" in text
    retensor(folder, lambda tensors: tensors.update({Q: tensors[Q].T.flatten().contiguous()}))
    assert Q in message(folder)


def test_wrong_dtype(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    retensor(folder, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int8)}))
    assert Q in message(folder) and "I8" in message(folder) and "BF16" in message(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.k_norm.weight"])
def test_missing_tensor(copy: Callable[[str], Path], name: str) -> None:
    folder = copy("single")
    retensor(folder, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing" in message(folder)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"{", "broken safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}', "8 bytes for shape"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}', "begins at byte"),
        (b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}}', "broken safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [2]}}', "broken safetensors header"),
        (b'{"a": 3}', "broken safetensors header"),
        (b"[1]", "broken safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "has bytes after the last tensor"),
    ],
)
def test_broken_header(tmp_path: Path, header: bytes, why: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CheckpointError, match=why) as caught:
        read_header(file)
    assert str(file) in caught.value.message


def test_header_length_that_would_exhaust_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 2**62) + bytes(64))
    with pytest.raises(CheckpointError, match="truncated or not safetensors"):
        read_header(file)


def test_config_errors_name_the_folder(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    edit(folder / "config.json", hidden_act="gelu")
    assert message(folder).startswith(str(folder)) and "supported: silu" in message(folder)


def test_a_front_process_can_look_inside_without_torch(made: dict[str, Path]) -> None:
    code = (
        "import sys; from kvmesh.engine.checkpoint import open_checkpoint; from kvmesh.kvcache.layout import plan;"
        "print(open_checkpoint(sys.argv[1]).fingerprint, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code, made["single"]], capture_output=True, text=True, timeout=60)
    assert out.stdout.split() == [open_checkpoint(made["single"]).fingerprint, "False"], out.stderr
