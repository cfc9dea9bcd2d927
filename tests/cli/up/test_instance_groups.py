"""`kvmesh up --prefill 2 --prefill 1@cpu:float32`: instances of a service on several devices and in several dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmesh.cli.up import plan
from kvmesh.cli.up.instance_groups import InstanceGroup, groups_of
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.config import load
from kvmesh.errors import ConfigError


def made(**settings: Any) -> MeshSettings:
    return MeshSettings(**{"model": "/m", "http_port": 0, "grpc_port": 0, **settings})


def flags(settings: MeshSettings, run_dir: Path) -> dict[str, dict[str, str]]:
    """The command line of every instance, by its name."""
    return {
        spec.name: dict(arg.removeprefix("--").split("=", 1) for arg in spec.argv if "=" in arg)
        for spec in plan.plan(settings, run_dir, plan.Ports())
        if spec.service in ("prefill", "decode", "coupled")
    }


@pytest.mark.parametrize(
    ("value", "groups"),
    [
        (0, [(0, "", "")]),
        (2, [(2, "", "")]),
        ("3", [(3, "", "")]),
        ("1@cpu", [(1, "cpu", "")]),
        ("1:float32", [(1, "", "float32")]),
        ("2,1@cuda:1", [(2, "", ""), (1, "cuda:1", "")]),
        ("1@cuda:bfloat16, 4@cuda:12:auto", [(1, "cuda", "bfloat16"), (4, "cuda:12", "auto")]),
    ],
)
def test_what_can_be_asked_for(value: int | str, groups: list[tuple[int, str, str]]) -> None:
    assert groups_of("prefill", value) == tuple(InstanceGroup(*one) for one in groups)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "prefill='': must be N[@DEVICE][:DTYPE], as 2, 1@cpu:float32 or 1@cuda:0"),
        (-1, "prefill='-1': must be N[@DEVICE]"),
        ("cpu", "prefill='cpu': must be N[@DEVICE]"),
        ("1@tpu", "prefill='1@tpu': must be N[@DEVICE]"),
        ("2,1@cpu:1", "prefill='1@cpu:1': must be N[@DEVICE]"),
        ("1@cpu:float8", "prefill='1@cpu:float8': dtype must be one of auto, float32, bfloat16, float16"),
        ("64,1@cpu", "prefill='64,1@cpu': at most 64 instances, not 65"),
    ],
)
def test_anything_else_is_one_clear_error(value: int | str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(prefill=value)
    assert str(refused.value).startswith(message)
    assert refused.value.field == "prefill"


def test_a_file_and_the_environment_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text('prefill = 2\ndecode = "1,1@cpu:float32"\n')
    found = load(MeshSettings, {}, toml=file, env={"KVMESH_COUPLED": "1@cuda"})
    assert [(found.count(one), len(found.groups(one))) for one in ("prefill", "decode", "coupled")] == [
        (2, 1), (2, 2), (1, 1)
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"prefill='x': must be N\[@DEVICE\].*\(from KVMESH_PREFILL\)"):
        load(MeshSettings, {}, toml=None, env={"KVMESH_PREFILL": "x"})


def test_each_instance_is_told_its_own(tmp_path: Path) -> None:
    settings = made(prefill="1,1@cpu:float32", decode="2@cuda:1,1@cpu", device="cuda", dtype="bfloat16", pool=1)
    found = {name: (told["device"], told["dtype"]) for name, told in flags(settings, tmp_path).items()}
    assert found == {
        "prefill-0": ("cuda", "bfloat16"),
        "prefill-1": ("cpu", "float32"),
        "decode-0": ("cuda:1", "bfloat16"),
        "decode-1": ("cuda:1", "bfloat16"),
        "decode-2": ("cpu", "bfloat16"),
    }


def test_set_still_has_the_last_word(tmp_path: Path) -> None:
    settings = made(decode="1,1@cpu:float32", dtype="bfloat16", set=("decode-1.dtype=float16",))
    assert flags(settings, tmp_path)["decode-1"]["dtype"] == "float16"


def test_host_memory_is_divided_among_those_on_the_cpu_and_a_gpu_among_those_on_one(tmp_path: Path) -> None:
    settings = made(prefill="2@cuda:0,1", decode="3", decode_tp=2, add_model=("a=/a",))
    room = 1000 << 20
    assert plan.memory_parts(settings, room, "cuda:0") == {"device_instances": 4}
    assert plan.memory_parts(settings, room, "cpu") == {"room_mb": 700 // (2 * (1 + 3 * 2))}
    told = flags(settings, tmp_path)
    assert told["prefill-0"]["device-instances"] == "4"
    assert "room-mb" not in told["prefill-0"]
    assert "device-instances" not in told["decode-0"]
    assert told["prefill-2"]["room-mb"] == told["a-decode-2"]["room-mb"]


def test_decodes_of_which_none_fits_a_prefill_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode='1:float16': none has the dtype of a prefill instance \(bfloat16\)"):
        made(prefill="1:bfloat16", decode="1:float16")
    for fits in ("1:float16,1:bfloat16", "1:auto", "1:float16"):
        assert made(prefill="1:bfloat16", decode=fits, coupled=int(fits == "1:float16")).mixed
    assert not made(prefill="2", decode="1@cpu").mixed
    assert made(prefill="2@cuda", decode="1@cpu").mixed, "auto is another dtype on another kind of device"
    assert not made(prefill="2@cuda", decode="1@cpu", dtype="bfloat16").mixed
