"""`kvmesh doctor`: what this machine has, what it lacks, what that would give; and the network between two."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kvmesh.cli.console import console, one_line_errors, wide_enough
from kvmesh.cli.doctor.findings import MARKS, Finding, screen
from kvmesh.cli.models import DEMOS, demo_model
from kvmesh.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from kvmesh.cli.doctor.machines import RankMachine


def findings(root: Path = Path("/")) -> list[Finding]:
    """Everything, most needed first."""
    from kvmesh.cli.doctor import checks as checks
    from kvmesh.cli.doctor import network as network
    from kvmesh.cli.up.plan import segment_mb
    from kvmesh.cli.up.settings import MeshSettings
    from kvmesh.ranks.host_memory import available_bytes
    from kvmesh.transfer.host import look

    settings = MeshSettings()
    host = look(root, os.environ)
    groups: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
        ("kvmesh", checks.software),
        ("ports of kvmesh up", lambda: checks.ports(settings.http_port, settings.grpc_port)),
        (
            "memory",
            lambda: (
                checks.shared_memory(),
                checks.warm_segments(wanted_mb=settings.ranks * segment_mb(settings, available_bytes())),
                checks.huge_pages(root),
                checks.locked_memory(),
            ),
        ),
        (
            "RDMA",
            lambda: (
                network.verbs(root),
                *network.rdma_devices(root, host),
                *network.device_memory(root, host),
            ),
        ),
        (
            "network",
            lambda: (
                *network.interfaces(host, network.interface_addresses),
                network.tcp_buffers(root),
                network.firewall(root),
            ),
        ),
        ("NICs that each memory prefers", lambda: network.topology(host)),
        ("transports", lambda: network.transports()),
    )
    return [dataclasses.replace(one, group=group) for group, look_at in groups for one in look_at()]


def summary(found: Sequence[Finding]) -> str:
    """One line: how many of each, and whether kvmesh runs here."""
    counts = [(level, sum(one.level == level for one in found)) for level in MARKS]
    told = ", ".join(f"{count} {level}" for level, count in counts if count)
    broken = [one.what for one in found if one.level == "broken"]
    if broken:
        return f"[red]✗[/] kvmesh does not run here, because of {escape(', '.join(broken))} ({told})"
    return f"[green]✓[/] kvmesh runs here ({told})"


@one_line_errors
def doctor(
    port: Annotated[
        int | None, typer.Argument(help="With --listen: the port; by default 7040.", min=0, max=65535)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    peer: Annotated[
        str | None, typer.Option("--peer", help="Transfer to and from a listening doctor.", metavar="HOST[:PORT]")
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Wait for doctors of other hosts, until Ctrl-C.")] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Say as well how many ranks can share this checkpoint's model, and whether it fits this machine and "
            "those that lend ranks to the mesh that runs here (or that --store names).",
            metavar="PATH",
        ),
    ] = "",
    mesh: Annotated[bool, typer.Option("--mesh", help="Look at a running mesh, from this machine.")] = False,
    conductor: Annotated[
        str, typer.Option(help="With --mesh: its conductors; by default KVMESH_CONDUCTOR, or the mesh that runs here.")
    ] = "",
    store: Annotated[str, typer.Option(help="With --mesh or --model: its store masters, KVMESH_STORE.")] = "",
    redis: Annotated[str, typer.Option(help="With --mesh: its Redis, KVMESH_REDIS.", metavar="redis://...")] = "",
    gateway: Annotated[str, typer.Option(help="With --mesh: its gateway (gRPC).", metavar="HOST:PORT")] = "",
    host: Annotated[str, typer.Option(help="With --listen: the address to listen on; empty: all.")] = "",
    token: Annotated[str, typer.Option(help="Shared secret of the two; --listen makes one and prints it.")] = "",
    transports: Annotated[str, typer.Option(help="Only these of rdma,shm,tcp; empty: all. Each must then work.")] = "",
    nics: Annotated[
        str, typer.Option(help="NICs to use here, like mlx5_0,eth1 (RDMA devices, interfaces); empty: all with a link.")
    ] = "",
    size_mb: Annotated[int, typer.Option(help="With --peer: MiB of each transfer.", min=1, max=1024)] = 32,
    seconds: Annotated[
        float, typer.Option(help="With --peer: how long to measure for each figure.", min=0.01, max=60)
    ] = 0.5,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for any one step.", min=0.5, max=600)] = 15.0,
    fault: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Look at this machine: what kvmesh finds, what is missing, what that would enable, and what to do next.

    A line each: ok; warn (it works, worse than it could); missing (kvmesh runs without it); broken (it does not).

    Between two hosts: --listen on one, which prints the command for the other; that one (--peer) writes and reads over
    every pair of NICs of every transport, compares every byte, and shows GB/s (10^9 bytes): rows are NICs here, columns
    NICs there. It takes about 2 s a pair; the bytes are not encrypted.

    Of a mesh (--mesh): whether this machine reaches each conductor, store master, Redis, gateway and instance under
    the address that it gives to others, who leads, whether versions, TLS, models and names fit, and how far each
    machine is.

    Exit status: 0 all is well (--mesh: requests can be served); 1 something is broken (they cannot), a pair failed, or
    the peer is not to be had; 2 a wrong option; 130 Ctrl-C (0 with --listen, which ends that way).

    Examples:

        kvmesh doctor

        kvmesh doctor --model ~/models/Qwen3-32B

        kvmesh doctor --model ~/models/Qwen3-235B-A22B --store 10.0.0.1:7002

        kvmesh doctor --mesh --conductor 10.0.0.1:7001 --gateway 10.0.0.1:8001

        kvmesh doctor --listen

        kvmesh doctor --peer 10.0.0.7:7040 --token TOKEN

        kvmesh doctor --peer 10.0.0.7 --token TOKEN --transports tcp --nics eth1,eth2
    """
    if listen or mesh or peer is not None:
        _refuse("only a look at this machine takes one", model=model)
    if listen:
        _refuse("--listen waits for others, --peer calls one: give one of them", peer=peer)
    else:
        _refuse("only --listen takes one", port=port, host=host)
    if not mesh:
        _refuse("only --mesh takes one", conductor=conductor, redis=redis, gateway=gateway)
    if not mesh and not model:
        _refuse("only --mesh and --model take one", store=store)
    if mesh:
        from kvmesh.cli.doctor import mesh as doctor_mesh

        why = "--mesh looks at services, --listen and --peer at the network: give one of them"
        _refuse(why, peer=peer, listen=listen or None, transports=transports, nics=nics)
        code = doctor_mesh.show(conductor, store, redis, gateway, as_json=as_json)
    elif listen or peer is not None:
        from kvmesh.cli.doctor.listener import DEFAULT_PORT
        from kvmesh.cli.doctor.listener import listen as wait_for_callers
        from kvmesh.cli.doctor.measure import Plan
        from kvmesh.cli.doctor.peer import call
        from kvmesh.ranks.transfer_config import listed

        plan = Plan(listed(transports), listed(nics), size_mb << 20, seconds, timeout_s, fault)
        if listen:
            code = wait_for_callers(host, DEFAULT_PORT if port is None else port, token, plan, console())
        else:
            code = call(peer or "", token, plan, as_json=as_json)
    else:
        _refuse("only --listen and --peer take any", transports=transports, nics=nics)
        code = _here(as_json, model, store)
    if code:
        raise typer.Exit(code)


def _refuse(why: str, **options: object) -> None:
    """ConfigError when one of these was given."""
    for key, value in options.items():
        if value not in (None, ""):
            raise ConfigError(f"{key}={value!r}: {why}", field=key)


def _machines(store: str) -> list[RankMachine]:
    """Returns this machine, and those that lend ranks to the mesh of the store masters `store`, else of KVMESH_STORE,
    else that runs here. Raises Unavailable where masters that were named do not answer."""
    from kvmesh.cli import probe, runs
    from kvmesh.cli.doctor.machines import RankMachine, lenders
    from kvmesh.instance.rank_lending import gpu_memory, memory_for_ranks
    from kvmesh.rpc import security
    from kvmesh.rpc.addresses import split

    here = RankMachine("this machine", len(gpu_memory()), memory_for_ranks())
    named, run = store or os.environ.get("KVMESH_STORE", ""), None
    if not named:
        with suppress(ConfigError):
            run = runs.find_running(None)
    runs.secure(run)
    masters = named or (runs.masters(run) if run is not None else "")
    if not masters:
        return [here]
    hosts = probe.rank_hosts(split(masters), tls=security.current())
    if hosts is None and named:
        why = (
            "no store master answers there: is the mesh up, and are its certificates in KVMESH_TLS_CERT, _KEY and _CA?"
        )
        raise Unavailable(f"store={named!r}: {why}", field="store")
    return [here, *lenders(hosts or ())]


def _here(as_json: bool, model: str, store: str) -> int:
    """Looks at this machine and shows it; the exit status."""
    if model in DEMOS and not Path(model).is_dir():
        model = str(demo_model(model))
    machines = _machines(store) if model else []
    found = findings()
    if model:
        from kvmesh.cli.doctor.fits import fits
        from kvmesh.cli.doctor.machines import findings as fits_machines

        found += [dataclasses.replace(one, group=f"ranks that can share {model}") for one in fits(model)]
        found += [dataclasses.replace(one, group=f"machines for {model}") for one in fits_machines(model, machines)]
    out = console()
    if as_json:
        out.out(json.dumps([dataclasses.asdict(one) for one in found], indent=2), highlight=False)
    else:
        wide_enough(out)
        out.print(screen(found))
        out.print(f"\n{summary(found)}")
    return int(any(one.level == "broken" for one in found))
