"""Says which weights a checkpoint has, so that two models never share KV."""

from __future__ import annotations

from pathlib import Path

from kvmesh.engine.checkpoint import TensorInfo, read_header
from kvmesh.engine.fingerprint import fingerprint
from kvmesh.errors import ConfigError


def checkpoint_identity(folder: str) -> str:
    """Returns a hash of every byte of the safetensors in a folder; it is kept beside them, so the next start reads
    nothing. Raises ConfigError when there are none, CheckpointError when one cannot be read."""
    files = sorted(Path(folder).glob("*.safetensors")) if folder and Path(folder).is_dir() else []
    if not files:
        why = "has no safetensors whose hash could tell them; set model_identity in kv_connector_extra_config"
        raise ConfigError(f"model_identity='': {folder!r} {why}", field="model_identity")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update({f"{file.name}/{name}": info for name, info in read_header(file).items()})
    return fingerprint(Path(folder), {"files": [file.name for file in files]}, tensors).hexdigest
