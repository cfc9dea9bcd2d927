"""`kvmesh role`: what a coupled instance does, changed while it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors
from kvmesh.cli.instances import call_instance, host_port
from kvmesh.cli.up.settings import INSTANCES
from kvmesh.errors import ConfigError

if TYPE_CHECKING:
    from kvmesh.rpc.pb import common_pb2, instance_pb2

TIMEOUT_S = 5.0


@one_line_errors
def role(
    instance: Annotated[
        str, typer.Argument(help="Its name in the mesh that runs here, or HOST:PORT of its gRPC server.")
    ],
    role: Annotated[str, typer.Argument(help="prefill, decode or both.", metavar="prefill|decode|both")],
    run_dir: RunDir = None,
) -> None:
    """Give a coupled instance another role while it runs.

    New work comes as the role says from the next moment on; what runs goes on to its end, and every block that it holds
    in memory stays. Instances that were started as `prefill` or `decode` refuse: they can do one thing only.

    Examples:

        kvmesh role coupled-0 prefill

        kvmesh role 10.0.0.5:7040 both
    """
    from kvmesh.rpc.pb import common_pb2
    from kvmesh.services.coupled.config import ROLES

    if role not in ROLES:
        raise ConfigError(f"role={role!r}: must be one of {', '.join(ROLES)}", field="role")
    answer = asyncio.run(set_role(_address(instance, run_dir), ROLES[role]))
    was = common_pb2.Role.Name(answer.was).removeprefix("ROLE_").lower()
    console().print(f"{answer.instance.instance_id}: {role} (was {was})")


def _address(instance: str, run_dir: RunDir) -> str:
    if address := host_port(instance):
        runs.secure(None)
        return address
    run = runs.find_running(run_dir)
    runs.secure(run)
    if run.services.get(instance, {}).get("service") not in INSTANCES:
        known = ", ".join(name for name, one in run.services.items() if one["service"] == "coupled") or "none"
        raise ConfigError(f"instance={instance!r}: no instance of the mesh of {run.run_dir}; coupled ones: {known}")
    return str(run.services[instance]["address"])


async def set_role(address: str, role: common_pb2.Role.ValueType) -> instance_pb2.SetRoleResponse:
    """Raises KvmeshError as the instance answered: FixedRole, Unavailable; or, with the address, that none does."""
    from kvmesh.rpc.pb import instance_pb2

    request = instance_pb2.SetRoleRequest(role=role)
    answer: instance_pb2.SetRoleResponse = await call_instance(address, "SetRole", request, TIMEOUT_S)
    return answer
