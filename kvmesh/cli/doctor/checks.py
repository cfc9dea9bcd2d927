"""What `kvmesh doctor` finds of the software and of the machine itself."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path

from kvmesh import extras
from kvmesh.cli.doctor.findings import Finding
from kvmesh.errors import ConfigError
from kvmesh.native import library

MIB = 1 << 20


def text_of(path: Path) -> str:
    """ "" for what is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def software() -> tuple[Finding, ...]:
    """What the engine runs on."""
    return python(), machine(), torch(), cpu_operators(), decisions(), cuda(), triton()


def python() -> Finding:
    """The interpreter."""
    return Finding("python", "ok", f"{platform.python_version()} ({sys.executable})")


def machine() -> Finding:
    """CPU, its features that torch uses, memory."""
    flags: set[str] = set()
    model = platform.machine()
    text = text_of(Path("/proc/cpuinfo"))
    flags = set((re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M) or ["", ""])[1].split())
    model = (re.search(r"^model name\s*:\s*(.*)$", text, re.M) or ["", model])[1]
    has = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sve", "bf16") if name in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    told = f"{cores} core{'s' if cores != 1 else ''} ({', '.join(has) or 'no vector features'})"
    return Finding("cpu", "ok", f"{model}, {told}, {memory:.0f} GiB")


def torch() -> Finding:
    """The engine's library."""
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError) as err:
        return Finding("torch", "broken", str(err), todo="pip install torch: the engine needs it")
    return Finding("torch", "ok", f"{module.__version__}, {module.get_num_threads()} threads")


def cpu_operators() -> Finding:
    """The C++ operators that bfloat16 models run on (docs/adr/0025)."""
    enables = "bfloat16 models on the CPU at the rate of its memory and its products"
    try:
        native = importlib.import_module("kvmesh.engine.cpu.native")
        why = native.why_not()
    except Exception as err:
        return Finding("cpu operators", "missing", f"{type(err).__name__}: {err}", enables, "pip install torch")
    if why:
        return Finding("cpu operators", "missing", why, enables, "python -m kvmesh.engine.cpu.build (needs g++)")
    return Finding("cpu operators", "ok", "built and loaded")


def decisions() -> Finding:
    """The native code that the conductor's decisions run in."""
    enables = "twice as many decisions a second (docs/conductor-speed.md)"
    if why := library.why_not():
        return Finding("decisions", "missing", why, enables, f"{library.BUILD} (needs a C++ compiler)")
    return Finding("decisions", "ok", "native code is built and loaded")


def cuda() -> Finding:
    """A GPU that torch can use."""
    enables = "the engine on GPUs (docs/reports/cuda.md)"
    try:
        module = importlib.import_module("torch")
    except (ImportError, OSError):
        return Finding("cuda", "missing", "no torch", enables, "pip install torch")
    if not module.cuda.is_available():
        if module.version.cuda is None:
            return Finding("cuda", "missing", "torch was built without CUDA", enables, "install a CUDA build of torch")
        why = "no usable GPU or driver"
        return Finding("cuda", "missing", why, enables, "nvidia-smi says what the driver sees")
    names = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
    return Finding("cuda", "ok", f"CUDA {module.version.cuda}: {', '.join(names)}")


def triton() -> Finding:
    """Attention kernels on GPUs."""
    try:
        return Finding("triton", "ok", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        enables = "attention kernels on GPUs, in a later version"
        return Finding("triton", "missing", "not installed", enables, extras.install("cuda"))


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
            found.append(Finding(f"port {port}", "warn", why, todo=f"kvmesh up {flag} PORT takes another"))
        else:
            found.append(Finding(f"port {port}", "ok", "free"))
    return found


# ── memory ────────────────────────────────────────────────────────────────────────────────────────


def shared_memory() -> Finding:
    """Memory that processes of one machine share: KV moves through it without a copy through the kernel."""
    enables = "the shm transport; without it KV moves over tcp"
    if not hasattr(os, "memfd_create"):
        return Finding("shared memory", "missing", "no memfd_create", enables, "Linux 3.17 or later has it")
    try:
        os.close(os.memfd_create("kvmesh-doctor"))
    except OSError as err:
        todo = "a container's seccomp profile may forbid it: allow memfd_create"
        return Finding("shared memory", "missing", f"memfd_create: {err.strerror}", enables, todo)
    return Finding("shared memory", "ok", "memfd")


def warm_segments(folder: Path = Path("/dev/shm"), wanted_mb: int = 0) -> Finding:
    """A memory file system, for host memory that outlives its process. `wanted_mb`: of a mesh by `kvmesh up`."""
    from kvmesh.transfer.segment_file import check_folder

    enables = "--warm-segment: a restarted instance has its blocks again"
    try:
        check_folder(str(folder))
        free = shutil.disk_usage(folder).free // MIB
    except (ConfigError, OSError) as err:
        why = err.message.partition(": ")[2] if isinstance(err, ConfigError) else err.strerror
        todo = f"mount -t tmpfs -o size=4g tmpfs {folder} (docs/internals/tiers.md)"
        return Finding("warm segments", "missing", f"{folder}: {why}", enables, todo)
    shown = f"{folder}, {free:,} MiB free"
    if free < wanted_mb:
        todo = f"a mesh takes {wanted_mb:,} MiB of it: mount -o remount,size=... {folder}, or docker run --shm-size=..."
        return Finding("warm segments", "warn", shown, enables, todo)
    return Finding("warm segments", "ok", shown)


def huge_pages(root: Path) -> Finding:
    """Transparent ones for shared memory, which segments are; and reserved ones, for people to know."""
    base = root / "sys/kernel/mm/transparent_hugepage"
    modes = {}
    for key in ("enabled", "shmem_enabled"):
        chosen = re.search(r"\[(\w+)\]", text_of(base / key))
        modes[key] = chosen[1] if chosen else "unknown"
    info = text_of(root / "proc/meminfo")
    total = re.search(r"^HugePages_Total:\s*(\d+)", info, re.M)
    size = re.search(r"^Hugepagesize:\s*(\d+) kB", info, re.M)
    count = total[1] if total and total[1] != "0" else "none"
    reserved = f"{count} of {int(size[1]) // 1024} MiB reserved" if size else "none reserved"
    found = f"transparent: {modes['enabled']}, for shared memory: {modes['shmem_enabled']}; {reserved}"
    if modes["shmem_enabled"] in ("never", "deny"):
        todo = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled: segments start faster, TLBs miss less"
        return Finding("huge pages", "warn", found, todo=todo)
    if modes["enabled"] == "unknown":
        return Finding("huge pages", "ok", f"no transparent ones in this kernel; {reserved}")
    return Finding("huge pages", "ok", found)


def locked_memory(limit: int | None = None, privileged: bool | None = None) -> Finding:
    """What RDMA may pin. `limit` in bytes; None: this process's own."""
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if privileged is None:
        privileged = os.geteuid() == 0
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    shown = f"at most {limit / MIB:.0f} MiB"
    if privileged:
        return Finding("locked memory", "ok", f"{shown}, but root may lock more")
    todo = "ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit: RDMA pins all memory that it moves"
    return Finding("locked memory", "warn", shown, todo=todo)
