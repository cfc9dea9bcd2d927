"""`kvmesh doctor`: what this machine has, what it lacks, and what that would give."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kvmesh.cli.console import console, one_line_errors
from kvmesh.rpc.errors import ConfigError


@dataclass(frozen=True)
class Finding:
    """`level`: ok; missing (kvmesh runs without it); broken (kvmesh does not run)."""

    what: str
    level: str
    found: str
    enables: str = ""


def python() -> Finding:
    """The interpreter."""
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def machine() -> Finding:
    """CPU, its features that torch uses, memory."""
    flags: set[str] = set()
    model = platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
        flags = set((re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M) or ["", ""])[1].split())
        model = (re.search(r"^model name\s*:\s*(.*)$", text, re.M) or ["", model])[1]
    except OSError:
        pass
    has = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16") if name in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("cpu", "ok", f"{model}, {cores} cores ({', '.join(has) or 'no vector features'}), {memory:.0f} GiB")


def torch() -> Finding:
    """The engine's library."""
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as err:
        return Finding("torch", "broken", str(err), "the engine: pip install torch")
    return Finding("torch", "ok", f"{module.__version__}, {module.get_num_threads()} threads")


def cuda() -> Finding:
    """A GPU that torch can use."""
    enables = "the engine on GPUs (kvmesh.engine); services of this version run on the CPU"
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError):
        return Finding("cuda", "missing", "no torch", enables)
    if not module.cuda.is_available():
        why = "torch was built without CUDA" if module.version.cuda is None else "no usable GPU or driver"
        return Finding("cuda", "missing", why, enables)
    names = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
    return Finding("cuda", "ok", f"CUDA {module.version.cuda}: {', '.join(names)}")


def triton() -> Finding:
    """Attention kernels on GPUs."""
    try:
        return Finding("triton", "ok", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("triton", "missing", "not installed", "attention kernels on GPUs, in a later version")


def rdma() -> Finding:
    """pyverbs, which must be of the very version of the installed libibverbs, and a device to use it on."""
    enables = "KV transfer over RDMA, in a later version; it needs pyverbs of rdma-core's version"
    try:
        ours = importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        return Finding("rdma", "missing", "pyverbs is not installed", enables)
    theirs = _libibverbs_version()
    if not theirs:
        return Finding("rdma", "missing", f"pyverbs {ours}, but no libibverbs", enables)
    if ours.split(".")[0] != theirs.split(".")[0]:
        return Finding("rdma", "missing", f"pyverbs {ours} does not match libibverbs {theirs}", enables)
    devices = [path.name for path in Path("/sys/class/infiniband").glob("*")]
    if not devices:
        return Finding("rdma", "missing", f"pyverbs {ours} and libibverbs match, but there is no device", enables)
    return Finding("rdma", "ok", f"pyverbs {ours}, {', '.join(devices)}")


def _libibverbs_version() -> str:
    """Of the shared library: libibverbs.so.1.14.44.0 is rdma-core 44.0."""
    folders = ("/usr/lib", "/usr/lib64", f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/local/lib")
    for folder in folders:
        for path in Path(folder).glob("libibverbs.so.1.*.*"):
            return ".".join(path.name.split(".")[4:])
    return ""


def shared_memory() -> Finding:
    """Memory that processes of one machine share: KV moves through it without a copy through the kernel."""
    enables = "the shm transport; without it KV moves over tcp"
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", "missing", "no memfd_create", enables)
    try:
        os.close(os.memfd_create("kvmesh-doctor"))
    except OSError as err:
        return Finding("shared memory", "missing", f"memfd_create: {err.strerror}", enables)
    try:
        free = f", /dev/shm {shutil.disk_usage('/dev/shm').free / 2**20:.0f} MiB free"
    except OSError:
        free = ""
    return Finding("shared memory", "ok", f"memfd{free}")


def ports(http_port: int, grpc_port: int) -> list[Finding]:
    """The two ports that `kvmesh up` opens by default."""
    from kvmesh.rpc.server import check_port

    found = []
    for key, port in (("http_port", http_port), ("grpc_port", grpc_port)):
        flag = f"--{key.replace('_', '-')}"
        try:
            check_port("127.0.0.1", port, key)
        except ConfigError as err:
            why = err.message.split(": ", 1)[-1]
            found.append(Finding(f"port {port}", "missing", why, f"kvmesh up needs another: {flag} PORT"))
        else:
            found.append(Finding(f"port {port}", "ok", "free"))
    return found


def findings() -> list[Finding]:
    """Everything, most needed first."""
    from kvmesh.cli.settings import MeshSettings

    checks: tuple[Callable[[], Finding], ...] = (python, machine, torch, shared_memory, cuda, triton, rdma)
    settings = MeshSettings()
    return [check() for check in checks] + ports(settings.http_port, settings.grpc_port)


@one_line_errors
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Look at this machine: what kvmesh finds, what is missing, and what that would enable.

    Leaves with 1 when kvmesh cannot run here. Example:

        kvmesh doctor
    """
    found = findings()
    out = console()
    if as_json:
        import json

        out.out(json.dumps([vars(one) for one in found], indent=2), highlight=False)
    else:
        marks = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "broken": "[red]broken[/]"}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for one in found:
            text = escape(one.found) + (f"  [dim]would enable: {escape(one.enables)}[/]" if one.enables else "")
            table.add_row(one.what, marks[one.level], text)
        out.print(table)
    if any(one.level == "broken" for one in found):
        raise typer.Exit(1)
