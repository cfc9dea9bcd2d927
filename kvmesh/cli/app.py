"""The `kvmesh` command. Commands import what is heavy when they run, so that `--help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from kvmesh.cli import apikey, certs, chat, cordon, explain, kvsize, profile, role, scale, serve, status, terms, trace
from kvmesh.cli.console import console
from kvmesh.cli.doctor import command as doctor
from kvmesh.cli.load import bench, replay
from kvmesh.cli.sim import command as sim
from kvmesh.cli.store import command as store
from kvmesh.cli.up import command as up
from kvmesh.version import kvmesh_version

app = typer.Typer(
    name="kvmesh",
    help="Large language models served with prefill and decode apart and the KV cache at the centre.\n\n"
    "Start here:\n\n    kvmesh up\n\nIt starts a whole mesh on this machine, asks it something and shows how to go on.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.command("up", help=up.HELP)(up.command())
serve_app = typer.Typer(
    help=f"Run one service in this process.\n\n{serve.PRECEDENCE}\n\n"
    "Example:\n\n    kvmesh serve conductor --port 7001 --store 127.0.0.1:7002",
    no_args_is_help=True,
)
serve.register(serve_app)
app.add_typer(serve_app, name="serve")
app.command("chat")(chat.chat)
app.command("status")(status.status)
app.command("trace")(trace.trace)
app.command("profile")(profile.profile)
app.command("explain")(explain.explain)
app.command("role")(role.role)
app.command("scale")(scale.scale)
app.command("cordon")(cordon.cordon)
app.command("drain")(cordon.drain)
app.command("uncordon")(cordon.uncordon)
app.command("bench", help=bench.HELP)(bench.bench)
app.command("replay", help=replay.HELP)(replay.replay)
app.add_typer(sim.app, name="sim")
app.command("kvsize", help=kvsize.HELP)(kvsize.kvsize)
app.add_typer(store.app, name="store")
app.add_typer(terms.app, name="terms")
app.command("apikey")(apikey.apikey)
app.command("certs")(certs.certs)
app.command("doctor")(doctor.doctor)


@app.command("version")
def version(short: Annotated[bool, typer.Option("--short", help="Only the number.")] = False) -> None:
    """Print the versions of kvmesh, its protocol and Python.

    Example:

        kvmesh version --short
    """
    number = kvmesh_version()
    if short:
        console().print(number)
        return
    import platform

    from kvmesh.rpc.protocol import PROTOCOL_VERSION

    console().print(f"kvmesh {number}, protocol {PROTOCOL_VERSION}, Python {platform.python_version()}")


def main() -> None:
    """Entry point of the `kvmesh` script."""
    app()


if __name__ == "__main__":
    main()
