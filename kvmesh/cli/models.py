"""From what a user calls a model to a checkpoint folder on this machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvmesh.errors import ConfigError

# What an engine, a tokenizer and a chat template need; no pickles, no other frameworks' weights.
HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
)
# Checkpoints that come with kvmesh (examples/); the first one is served where none is named.
DEMOS = ("demo-model", "demo-moe")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def demo_model(name: str = DEMOS[0]) -> Path:
    """A checkpoint that comes with kvmesh: of the repository, else of the installation. ConfigError: neither."""
    places = (
        Path(__file__).resolve().parents[2] / "examples" / name,
        Path(sys.prefix) / "share" / "kvmesh" / name,
    )
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise ConfigError(f"model='': {name} is not installed; give a checkpoint with --model", field="model")


def resolve(model: str, key: str = "model") -> Path:
    """The checkpoint folder of `model`: a path, or a Hugging Face id, which is downloaded (with a progress bar) or
    taken from the hub's cache. Empty, or a name of DEMOS that is no folder here: what comes
    with kvmesh. ConfigError says in one line, under `key`, why there is none."""
    if not model:
        return demo_model()
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{key}={model!r}: the folder holds no config.json", field=key)
        return path.resolve()
    if path.exists():
        raise ConfigError(f"{key}={model!r}: is a file; a checkpoint is a folder", field=key)
    if model in DEMOS:
        return demo_model(model)
    if path.is_absolute() or model.startswith((".", "~")) or not _HUB_ID.fullmatch(model):
        raise ConfigError(f"{key}={model!r}: no such folder", field=key)
    return _download(model, key)


def _download(hub_id: str, key: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"{key}={hub_id!r}: {why}", field=key)

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(HUB_FILES)))
    except GatedRepoError:
        raise refuse("access must be asked for on huggingface.co, then log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise refuse("no folder of this name here and no model of this id on the hub") from None
    except HFValidationError:
        raise refuse("no such folder, and not a hub id (ORG/NAME)") from None
    except LocalEntryNotFoundError:
        why = "no such folder, not in the hub's cache, and the hub cannot be reached; give a checkpoint folder"
        raise refuse(why) from None
    except (HfHubHTTPError, OSError) as err:
        line = str(err).strip().splitlines()
        raise refuse(f"download failed ({line[0] if line else type(err).__name__})") from None
