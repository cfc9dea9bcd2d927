"""Where a configuration value comes from, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from kvmesh.config import ServiceConfig, load
from kvmesh.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Example(ServiceConfig):
    size: int = field(default=4, metadata={"help": "x", "min": 1, "max": 9})
    rate: float = field(default=0.5, metadata={"min": 0})
    fast: bool = False
    mode: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()
    limit: int | None = None
    hidden: dict[str, str] = field(default_factory=dict, metadata={"internal": True})
    low: int = 0

    def __post_init__(self) -> None:
        if self.low > self.size:
            raise ConfigError(f"low={self.low}: is above size={self.size}", field="low")


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "k.toml"
    path.write_text(text)
    return path


def test_flag_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = toml(tmp_path, "size = 5\nrate = 1\nport = 7\n")
    env = {"KVMESH_SIZE": "6", "KVMESH_PORT": "8", "HOME": "/"}
    config = load(Example, {"size": 7, "rate": None}, toml=file, env=env)
    assert (config.size, config.port, config.rate, config.mode) == (7, 8, 1.0, "a")


def test_text_becomes_the_type_of_the_field() -> None:
    env = {"KVMESH_FAST": "Yes", "KVMESH_NAMES": "x, y", "KVMESH_LIMIT": "3", "KVMESH_RATE": "2.5"}
    config = load(Example, {}, toml=None, env=env)
    assert (config.fast, config.names, config.limit, config.rate) == (True, ("x", "y"), 3, 2.5)
    assert load(Example, {"limit": ""}, toml=None, env={}).limit is None


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"KVMESH_SIZE": "many"}, "size='many' (from KVMESH_SIZE): must be a whole number"),
        ({"KVMESH_SIZE": "1.5"}, "size='1.5' (from KVMESH_SIZE): must be a whole number"),
        ({"KVMESH_SIZE": "0"}, "size='0' (from KVMESH_SIZE): must be at least 1"),
        ({"KVMESH_SIZE": "10"}, "must be at most 9"),
        ({"KVMESH_RATE": "nan"}, "must be at least 0"),
        ({"KVMESH_FAST": "maybe"}, "must be true or false"),
        ({"KVMESH_MODE": "c"}, "choose one of a, b"),
        ({"KVMESH_LOG_LEVEL": "loud"}, "choose one of debug, info, warning, error"),
        ({"KVMESH_PORT": "70000"}, "must be at most 65535"),
        ({"KVMESH_LOW": "9"}, "low=9: is above size=4 (from KVMESH_LOW)"),
        ({"KVMESH_SIZZE": "3"}, "unknown key 'KVMESH_SIZZE' (from KVMESH_SIZZE); did you mean KVMESH_SIZE?"),
    ],
)
def test_a_bad_environment_is_refused_by_name_and_value(env: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Example, {}, toml=None, env=env)
    assert expected in caught.value.message
    assert caught.value.message.count("\n") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sise = 3", "unknown key 'sise' (in "),
        ("size = '3x'", "must be a whole number"),
        ("size = true", "must be a whole number"),
        ("fast = 1", "must be true or false"),
        ("mode = 3", "choose one of a, b"),
        ("names = 3", "must be a list"),
        ("hidden = {}", "unknown key 'hidden'"),
        ("size = = 3", "not TOML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"k\.toml") as caught:
        load(Example, {}, toml=toml(tmp_path, text), env={})
    assert expected in caught.value.message


def test_a_missing_file_and_an_unknown_flag_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(Example, {}, toml=tmp_path / "none.toml", env={})
    with pytest.raises(ConfigError, match=r"unknown key 'colour' \(from --colour\)"):
        load(Example, {"colour": None}, toml=None, env={})


def test_keys_of_other_services_may_stand_in_a_shared_environment() -> None:
    env = {"KVMESH_BLOCK_TOKENS": "32", "KVMESH_SIZE": "2"}
    assert load(Example, {}, toml=None, env=env, also_known={"block_tokens", "size"}).size == 2
    with pytest.raises(ConfigError, match="KVMESH_BLOCK_TOKENS"):
        load(Example, {}, toml=None, env=env)


def test_a_flag_may_have_a_name_of_its_own() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Named:
        slo_ms: int = field(default=1, metadata={"flag": "--slo", "min": 1})

    globals()["Named"] = Named
    with pytest.raises(ConfigError, match=r"slo_ms='x' \(from --slo\)"):
        load(Named, {"slo_ms": "x"}, toml=None, env={})
