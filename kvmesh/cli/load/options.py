"""Options that `kvmesh bench` and `kvmesh replay` have in common."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvmesh.cli.console import ApiKey, RunDir, console

if TYPE_CHECKING:
    from kvmesh.cli.load.report import LoadSlo
    from kvmesh.cli.load.target import LoadTarget


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options of where a load goes, what it may find cached and what its report tells."""

    slo_ttft: Annotated[float | None, typer.Option(help="TTFT that counts for goodput.", metavar="MS")] = None
    slo_tbt: Annotated[float | None, typer.Option(help="TBT that counts for goodput.", metavar="MS")] = None
    reuse: Annotated[
        bool, typer.Option("--reuse-cache", help="Let prompts find what earlier runs of this seed left cached.")
    ] = False
    url: Annotated[str | None, typer.Option(envvar="KVMESH_URL", help="The mesh; by default the one running here.")] = (
        None
    )
    run_dir: RunDir = None
    model: Annotated[str | None, typer.Option(help="Model name; by default the first one served.")] = None
    vocab: Annotated[
        int | None, typer.Option(help="Vocabulary, when the gateway does not tell.", metavar="N", min=1)
    ] = None
    api_key: ApiKey = None
    timeout: Annotated[float, typer.Option(help="Longest wait for an answer.", metavar="SECONDS", min=1)] = 600.0
    json_to: Annotated[
        str | None, typer.Option("--json", help="Report as JSON, '-': standard output.", metavar="FILE|-")
    ] = None

    @property
    def slo(self) -> LoadSlo:
        """What goodput is judged by."""
        from kvmesh.cli.load.report import LoadSlo

        return LoadSlo(self.slo_ttft, self.slo_tbt)

    @property
    def screen(self) -> Console:
        """The console that people read: standard error where the report goes to standard output."""
        return console(stderr=self.json_to == "-")

    def target(self) -> LoadTarget:
        """Asks the mesh what it serves; raises as `target.find` does."""
        from kvmesh.cli.load.target import find

        return find(self.url, self.run_dir, self.model, self.api_key, self.vocab)

    def salt(self, kind: str) -> str:
        """A cache salt of this run alone; "" where it may find what others left."""
        return "" if self.reuse else f"{kind}-{secrets.token_hex(8)}"
