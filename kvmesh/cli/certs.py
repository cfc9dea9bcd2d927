"""`kvmesh certs`: certificates of a mesh, one for each process, which say what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from kvmesh.cli.console import console, one_line_errors
from kvmesh.rpc.authorisation import ALL_IDENTITIES, ANY_NAME, Identity, identities

ALL = "all"  # a role's name on the command line


def folder_name(held: Sequence[Identity]) -> str:
    """Returns the subfolder of a certificate: its roles, and their names where they have one."""
    if set(held) == set(ALL_IDENTITIES):
        return ALL
    return "+".join(str(role) if name == ANY_NAME else f"{role}-{quote(name, safe='')}" for role, name in held)


@one_line_errors
def certs(
    folder: Annotated[Path, typer.Argument(help="Where they are written, a subfolder each.")],
    role: Annotated[
        list[str],
        typer.Option(
            help="Whose: instance/ID, store/ID, conductor, gateway, operator or client; without /ID for any id. "
            "Several joined by commas share one certificate; all stands for every role. May be given several times.",
            metavar="ROLE[/ID],...",
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address that the processes are called by, beside localhost. May be given often."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long they are valid.", min=1, max=3650)] = 365,
) -> None:
    """Make certificates for a mesh: an authority (ca-key.pem is its key: keep it where no process of the mesh runs) and
    one for each role. With a folder that has an authority its certificates are renewed, or others are added; running
    processes read theirs again.

    Examples:

        kvmesh certs tls --role instance/prefill-0 --role instance/decode-0 --role store --role conductor
        --role gateway --role operator --host node-1 --host 10.0.0.5

        kvmesh serve prefill ... --tls-ca tls/instance-prefill-0/ca.pem --tls-cert tls/instance-prefill-0/cert.pem
        --tls-key tls/instance-prefill-0/key.pem
    """
    from kvmesh.rpc.certificates import make_role_certificates

    asked = [ALL_IDENTITIES if one == ALL else identities(one.split(",")) for one in role]
    wanted = {folder_name(one): one for one in asked}
    made = make_role_certificates(folder, wanted, host or (), days=days, keep_authority=True)
    for name, files in made.items():
        console().out(f"{files.cert}  {' '.join(one.uri for one in wanted[name])}", highlight=False)
