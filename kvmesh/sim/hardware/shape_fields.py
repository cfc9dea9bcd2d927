"""Fields of a Hugging Face config.json, read under the names that families give them. Errors name field and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmesh.errors import ConfigError


class Fields:
    """What one config says; where it describes several models, what it says of the text."""

    def __init__(self, raw: Mapping[str, Any], name: str) -> None:
        text = raw.get("text_config")
        nested = isinstance(text, Mapping) and "num_hidden_layers" not in raw
        self._raw: Mapping[str, Any] = text if nested else raw  # type: ignore[assignment]
        self._name = name
        self.family = str(self._raw.get("model_type", ""))

    def _bad(self, field: str, value: Any, why: str) -> ConfigError:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        return ConfigError(f"model={self._name!r}: config.json: {field}={shown}: {why}", field=field)

    def number(self, field: str, default: int) -> int:
        """A whole number of at least 0; `default` where it is absent or null."""
        value = self._raw.get(field)
        if value is None:
            return default
        if type(value) is not int or not 0 <= value < 2**40:
            raise self._bad(field, value, "must be a whole number of at least 0")
        return value

    def count(self, *fields: str) -> int:
        """The first of them that is there, at least 1. ConfigError names the first when all are missing."""
        for field in fields:
            if self._raw.get(field) is not None:
                value = self.number(field, 0)
                if value < 1:
                    raise self._bad(field, value, "must be at least 1")
                return value
        raise ConfigError(f"model={self._name!r}: config.json: {fields[0]} is missing", field=fields[0])

    def flag(self, field: str, default: bool) -> bool:
        """True or false; `default` where it is absent or null."""
        value = self._raw.get(field)
        if value is None:
            return default
        if type(value) is not bool:
            raise self._bad(field, value, "must be true or false")
        return value

    def divided(self, hidden: int, heads: int) -> int:
        """The dimension of a head that config.json does not tell."""
        if hidden % heads:
            why = f"is no multiple of num_attention_heads={heads}, and head_dim is missing"
            raise self._bad("hidden_size", hidden, why)
        return hidden // heads

    def kv_heads(self, heads: int) -> int:
        """As many as heads where nothing else is said; one with `multi_query`."""
        found = self.number("num_key_value_heads", 0) or self.number("num_kv_heads", 0)
        if self.flag("multi_query", False) and not self.flag("new_decoder_architecture", False):
            found = 1
        found = found or heads
        if heads % found:
            raise self._bad("num_key_value_heads", found, f"must divide num_attention_heads={heads}")
        return found

    def attention_layers(self, layers: int) -> tuple[int, int, int]:
        """(layers that keep KV, of those the ones with a window, its tokens; 0: none)."""
        window = self.number("sliding_window", 0)
        if not self.flag("use_sliding_window", True):
            window = 0
        kinds = self._raw.get("layer_types")
        if kinds is not None:
            return self._by_kind(kinds, layers, window)
        if not window:
            return layers, 0, 0
        if self.family == "gemma2":
            return layers, (layers + 1) // 2, window
        every = self.number("sliding_window_pattern", 0) or (6 if self.family.startswith("gemma3") else 0)
        if every:  # each such layer sees all
            return layers, layers - layers // every, window
        full = self.number("max_window_layers", 0) if self.family.startswith("qwen") else 0
        return layers, max(0, layers - full), window

    def _by_kind(self, kinds: Any, layers: int, window: int) -> tuple[int, int, int]:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self._bad("layer_types", kinds, f"must list {layers} layers")
        full, local = kinds.count("full_attention"), kinds.count("sliding_attention")
        stateful = kinds.count("linear_attention")  # a state of constant size, no KV
        if full + local + stateful != layers:
            unknown = next(k for k in kinds if k not in ("full_attention", "sliding_attention", "linear_attention"))
            raise self._bad("layer_types", unknown, "is no kind of layer that is known")
        if local and not window:
            raise ConfigError(f"model={self._name!r}: config.json: sliding_window is missing", field="sliding_window")
        return full + local, local, window if local else 0
