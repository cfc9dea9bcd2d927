"""`kvmesh cordon`, `drain` and `uncordon`: keep new work away from an instance, let it have some again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors
from kvmesh.errors import KvmeshError, Unavailable, UnknownInstance

if TYPE_CHECKING:
    from kvmesh.rpc.pb import conductor_pb2 as pb

LOOK_S = 2.0
TELL_S = 10.0  # the conductor tells Redis and the store master first
STATES = {0: "open", 1: "cordoned", 2: "draining"}

Reason = Annotated[str, typer.Option(help="For those who read `kvmesh status`.")]
Wait = Annotated[
    bool | None,
    typer.Option(
        "--wait/--no-wait",
        help="Show what is left until it is drained. By default only on a terminal.",
        show_default=False,
    ),
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the drain.", min=0.1)]
Instance = Annotated[str, typer.Argument(help="Its name, as `kvmesh status` shows it.")]
Conductors = Annotated[
    str | None,
    typer.Option(
        "--conductor",
        help="Conductors of a mesh that `kvmesh up` did not start here; without Redis: all of them.",
        metavar="HOST:PORT[,...]",
    ),
]


@one_line_errors
def cordon(
    instance: Instance,
    drain: Annotated[bool, typer.Option("--drain", help="Also move the last replicas of its blocks away.")] = False,
    reason: Reason = "",
    wait: Wait = None,
    timeout: Timeout = 600.0,
    conductor: Conductors = None,
    run_dir: RunDir = None,
) -> None:
    """Keep new work away from an instance. What runs there goes on to its end.

    It holds for that name, whatever life bears it, until `kvmesh uncordon`. With --drain, pool nodes also copy what
    only this instance holds; what is left is shown until there is nothing: then it can be stopped. Leaves with 1 when
    that is not so in time, or blocks would be lost. Ctrl-C ends the command, not the drain. Examples:

        kvmesh cordon decode-1 --reason "a fan fails"

        kvmesh cordon prefill-0 --drain
    """
    _set(instance, 2 if drain else 1, reason, conductor, run_dir)
    if drain:
        _wait(instance, wait, timeout, conductor, run_dir)


@one_line_errors
def drain(
    instance: Instance,
    reason: Reason = "",
    wait: Wait = None,
    timeout: Timeout = 600.0,
    conductor: Conductors = None,
    run_dir: RunDir = None,
) -> None:
    """Keep new work away from an instance, and copy to pool nodes what only it holds, so that it can be stopped.

    The same as `kvmesh cordon --drain`, until `kvmesh uncordon`. Leaves with 1 when that is not so in time, or
    blocks would be lost. Ctrl-C ends the command, not the drain. Example:

        kvmesh drain prefill-0 --wait --timeout 120
    """
    _set(instance, 2, reason, conductor, run_dir)
    _wait(instance, wait, timeout, conductor, run_dir)


@one_line_errors
def uncordon(instance: Instance, conductor: Conductors = None, run_dir: RunDir = None) -> None:
    """Let a cordoned or draining instance have work again. What has been moved away is not moved back.

    Example:

        kvmesh uncordon decode-1
    """
    _set(instance, 0, "", conductor, run_dir)


def _set(instance: str, state: int, reason: str, conductor: str | None, run_dir: Path | None) -> None:
    was = _say(instance, state, reason, conductor, run_dir)
    console().print(f"{escape(instance)}: {STATES[state]} (was {was})")


def _wait(instance: str, wait: bool | None, timeout_s: float, conductor: str | None, run_dir: Path | None) -> None:
    """Show the drain until it is over, if `wait` (None: if somebody looks on). Raises Unavailable as
    `draining.watch`."""
    if not (console().is_terminal if wait is None else wait):
        return
    from kvmesh.cli import draining

    addresses, masters = _whom(conductor, run_dir)

    async def watched(tell: Callable[[str], None]) -> str:
        async with draining.looking(instance, addresses, masters) as look:
            return await draining.watch(instance, look, tell, timeout_s)

    try:
        with draining.shown() as tell:
            done = asyncio.run(watched(tell))
    except KeyboardInterrupt:
        text = f"the drain of {instance} goes on without this command: `kvmesh drain {instance}` shows it again"
        console(stderr=True).print(f"{text}, `kvmesh uncordon {instance}` ends it", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    console().print(f"[green]{escape(done)}[/]")


def _whom(conductor: str | None, run_dir: Path | None) -> tuple[tuple[str, ...], str]:
    """The conductors, and the store masters as far as they are known here; this process secured as they want it."""
    from kvmesh.rpc.addresses import split

    run = None if conductor else runs.find_running(run_dir)
    runs.secure(run)
    masters = runs.masters(run) if run else ""
    return split(conductor or (runs.conductors(run) if run else ""), "conductor"), masters


def _say(instance: str, state: int, reason: str, conductor: str | None, run_dir: Path | None) -> str:
    """Have the conductors mind it; returns what was. KvmeshError: some do not."""
    from kvmesh.rpc.pb import conductor_pb2 as pb

    addresses, _ = _whom(conductor, run_dir)
    request = pb.CordonRequest(instance_id=instance, state=pb.CordonState.ValueType(state), reason=reason)
    return STATES[asyncio.run(tell(addresses, request))]


async def tell(addresses: tuple[str, ...], request: pb.CordonRequest) -> int:
    """Through Redis one conductor tells all; without it each must be told. The state that was.

    Raises KvmeshError: what the conductor refused; or, naming them, which could not be told."""
    roles = dict(zip(addresses, await asyncio.gather(*(_role(address) for address in addresses)), strict=True))
    shared = [address for address, role in roles.items() if role in ("leader", "standby")]
    if shared:
        return await _tell(shared[0], request)
    told = await asyncio.gather(*(_tell(address, request) for address in addresses), return_exceptions=True)
    was = [answer for answer in told if isinstance(answer, int)]
    errors = [(address, error) for address, error in zip(addresses, told, strict=True) if not isinstance(error, int)]
    for _, error in errors:
        if not was or not isinstance(error, KvmeshError):
            raise error
    if errors:
        text = "; ".join(f"{address}: {error}" for address, error in errors)
        raise Unavailable(f"{len(was)} of {len(addresses)} conductors mind it, say it again to the others ({text})")
    return max(was)


async def _role(address: str) -> str:
    """In the leadership; "" when it does not answer."""
    import grpc

    from kvmesh.rpc.authorisation import ServerRole
    from kvmesh.rpc.channels import connect
    from kvmesh.rpc.pb import conductor_pb2 as pb
    from kvmesh.rpc.pb import conductor_pb2_grpc

    async with connect(address, ServerRole.CONDUCTOR) as channel:
        try:
            stub = conductor_pb2_grpc.ConductorStub(channel)
            return str((await stub.GetStatus(pb.GetConductorStatusRequest(), timeout=LOOK_S)).leadership.role)
        except grpc.RpcError:
            return ""


async def _tell(address: str, request: pb.CordonRequest) -> int:
    import grpc

    from kvmesh.rpc.authorisation import ServerRole
    from kvmesh.rpc.channels import connect
    from kvmesh.rpc.pb import conductor_pb2_grpc
    from kvmesh.rpc.status import from_rpc_error

    async with connect(address, ServerRole.CONDUCTOR) as channel:
        try:
            return int((await conductor_pb2_grpc.ConductorStub(channel).Cordon(request, timeout=TELL_S)).was)
        except grpc.RpcError as err:
            error = from_rpc_error(err)
            if isinstance(error, UnknownInstance):
                text = error.message.replace("instance_id=", "instance=", 1)
                error = UnknownInstance(f"{text}; `kvmesh status` shows them", field="instance")
            raise error from None
