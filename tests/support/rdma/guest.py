r"""The RDMA guest: a User-Mode-Linux process whose kernel has Soft-RoCE, started for one command and gone with it.

It sees the host's files, the repository and the virtual environment among them; what it writes is thrown away, but for
``out_dir``. Two sides, a and b, are joined by ``rails`` pairs of devices: rxa0 (on nica0, 10.90.0.1) to rxb0 (on nicb0,
10.90.0.2) and so on; ``scripts/rdma/network.sh`` has the picture. From a shell::

    .venv/bin/python -m tests.support.rdma.guest [--rails N] [--ipv6-only] [--memory MIB] [--out DIR] [--timeout S] \
        COMMAND ...
"""

from __future__ import annotations

import argparse
import itertools
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

REPOSITORY = ROOT
MTU = 9000  # bytes, of the Ethernet devices: the RDMA ports then take 4,096
GRACE = 15.0  # seconds that the guest has, after the job's limit, to end it and switch off
INSIDE = "IN_RDMA_GUEST"  # set in the guest; the prefix KVMESH_ is for configuration keys

_turns = itertools.count(os.getpid())


class GuestUnavailable(Exception):
    """No guest can be made here; the text says why, and what would change that."""


@dataclass(frozen=True)
class CompletedGuest:
    """What a job left: its exit status (124: over its time limit), its output, and where the time went, in seconds."""

    rc: int
    output: str
    console: str  # what the guest's kernel and init said
    boot_s: float  # from power-on to the job's start, by the guest's clock
    wall_s: float  # all of it, by the host's clock


def prepare(*, compile_kernel: bool = False) -> Path:
    """The folder that guests are started from; made first, in seconds, where that has not been done.

    ``compile_kernel`` allows minutes for a kernel where none is prebuilt. Raises GuestUnavailable.
    """
    made = _prepare(compile_kernel)
    if isinstance(made, str):
        raise GuestUnavailable(made)
    return made


@cache
def _prepare(compile_kernel: bool) -> Path | str:
    """That folder or the reason why there is none: tried once for each process."""
    if os.environ.get(INSIDE):
        return "this is the guest"
    for program in ("bash", "taskset", "setpriv"):
        if shutil.which(program) is None:
            return f"no {program!r} here; install util-linux and bash, then run: make rdma-guest"
    argv = [str(REPOSITORY / "scripts/rdma/build.sh"), *([] if compile_kernel else ["--no-compile"])]
    limit = 3600 if compile_kernel else 90
    try:
        done = subprocess.run(argv, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"scripts/rdma/build.sh took over {limit} s (a slow network?); run: make rdma-guest"
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["scripts/rdma/build.sh failed"])[-1]
        return said if done.returncode == 3 else said + "; when that is mended, run: make rdma-guest"
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("RDMA_GUEST_CACHE") or Path(root, "kvmesh", "rdma-guest"))


def prepare_for_tests() -> Path:
    """As ``prepare``, and pyverbs is there for this interpreter. Raises GuestUnavailable."""
    home = prepare()
    modules = [path.name for path in (home / "python/pyverbs").glob("device.*so")]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if f"device{suffix}" not in modules:
        ours = f"CPython {sys.version_info.major}.{sys.version_info.minor}"
        raise GuestUnavailable(
            f"this distribution's pyverbs ({', '.join(modules)}) is not for {ours}; make .venv with its own"
        )
    return home


def run_in_guest(
    argv: Sequence[str],
    *,
    timeout_s: float,
    rails: int = 2,
    out_dir: Path | None = None,
    memory_mb: int = 2048,
    ipv6_only: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path = REPOSITORY,
    echo: bool = False,
) -> CompletedGuest:
    """Runs ``argv`` as root in a fresh guest, which is over when this returns, however it ends.

    ``timeout_s`` bounds the job: then it is ended in the guest (rc 124, with its output so far), and if the guest
    itself hangs it is killed ``GRACE`` later (rc 124 too). ``out_dir`` is the one host folder whose files survive.
    ``env`` adds to this process's environment. ``echo`` also passes output on as it comes. Guest memory is taken from
    the host as it is used, up to ``memory_mb``, and given back at the end.
    Raises GuestUnavailable when there is no guest or it did not start.
    """
    home = prepare()
    job = Path(tempfile.mkdtemp(prefix="kvmesh-guest-"))
    try:
        _write_job(job, argv, home, env or {}, cwd)
        family = 6 if ipv6_only else 4
        settings = f"RAILS={rails}\nMTU={MTU}\nFAMILY={family}\nSECONDS_LIMIT={max(1, round(timeout_s))}\n"
        (job / "settings").write_text(settings)
        (job / "cpuinfo").write_text(_one_cpu())
        begun = time.monotonic()
        output, hung = _power_on(home, job, out_dir, memory_mb, timeout_s + GRACE, echo)
        wall = time.monotonic() - begun
        console = (job / "console").read_text(errors="replace")
        started = _number(job / "started")
        if started is None:
            raise GuestUnavailable(
                f"the guest did not start: {(console or output).strip()[-1500:] or 'it said nothing'}"
            )
        status = _number(job / "status")
        if status == 143:  # busybox: the job was ended by its limit
            status = 124
        rc = 124 if hung else 125 if status is None else int(status)
        return CompletedGuest(rc, output, console, started, wall)
    finally:
        shutil.rmtree(job, ignore_errors=True)


def _one_cpu() -> str:
    """The host's first CPU, for /proc/cpuinfo: the guest's own has no clock rate, which perftest needs to report."""
    return Path("/proc/cpuinfo").read_text().partition("\n\n")[0] + "\n\n"


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _write_job(job: Path, argv: Sequence[str], home: Path, extra: Mapping[str, str], cwd: Path) -> None:
    """A shell script that sets this process's environment and becomes ``argv``."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name.isidentifier() and name not in ("TMPDIR", "PWD", "SHLVL")
    }
    env |= extra
    env |= {INSIDE: "1", "TMPDIR": "/run/tmp", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = ":".join(filter(None, [str(home / "python"), str(REPOSITORY), env.get("PYTHONPATH", "")]))
    env["PATH"] = env.get("PATH", "/usr/bin:/bin") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines += ["ulimit -l unlimited", f"cd {shlex.quote(str(cwd))} || exit 125", f"exec {shlex.join(argv)}"]
    (job / "run").write_text("\n".join(lines) + "\n")


def _memory_folder(memory_mb: int) -> str:
    """A folder for the file that is the guest's memory: tmpfs, with room, and programs may be mapped from it."""
    choices = [os.environ.get("RDMA_GUEST_MEMORY"), "/dev/shm", tempfile.gettempdir(), "/var/tmp"]
    for folder in filter(None, choices):
        try:
            found = os.statvfs(folder)
        except OSError:
            continue
        free = found.f_bavail * found.f_frsize
        if free > memory_mb << 20 and not found.f_flag & os.ST_NOEXEC and os.access(folder, os.W_OK):
            return folder
    raise GuestUnavailable(
        f"the guest's memory needs a folder with {memory_mb} MiB free that programs may run from; "
        "name one in RDMA_GUEST_MEMORY"
    )


def _command(home: Path, job: Path, out_dir: Path | None, memory_mb: int) -> list[str]:
    cpus = sorted(os.sched_getaffinity(0))
    # One CPU in the guest on one CPU of the host: a system call of the guest is a hand-over between two host processes,
    # a few microseconds on one CPU and tens across two. The guest dies with whoever started it.
    argv = ["setpriv", "--pdeathsig", "KILL", "taskset", "-c", str(cpus[next(_turns) % len(cpus)])]
    argv += [
        str(home / "linux"),
        f"mem={memory_mb}M",
        "ncpus=1",
        "seccomp=on",
        f"uml_dir={job / 'uml'}",
        f"umid=g{job.name[-8:]}",
    ]
    argv += ["rootfstype=hostfs", f"rootflags={home / 'boot'}", "ro", "init=/init", "quiet", "loglevel=4"]
    argv += ["con=null", "con0=null,fd:2", "con1=null,fd:1", "ssl=null", "stderr=1"]
    argv += [f"kvmesh.job={job}", f"kvmesh.over={home / 'overlay'}"]
    if out_dir is not None:
        argv.append(f"kvmesh.out={out_dir.resolve()}")
    for word in argv:
        if any(c.isspace() for c in word):
            raise GuestUnavailable(f"a guest's folders can have no white space in their names: {word!r}")
    return argv


def _power_on(
    home: Path, job: Path, out_dir: Path | None, memory_mb: int, limit_s: float, echo: bool
) -> tuple[str, bool]:
    """The guest's output, and whether it had to be killed."""
    deadline = time.monotonic() + limit_s
    env = os.environ | {"TMPDIR": _memory_folder(memory_mb)}
    chunks: list[bytes] = []
    hung = False
    with (
        open(job / "console", "wb") as console,
        subprocess.Popen(
            _command(home, job, out_dir, memory_mb),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=console,
            env=env,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        try:
            hung = not _collect(process, chunks, deadline, echo)
        finally:
            _kill_group(process.pid)
            process.wait()
            while block := process.stdout.read(1 << 20):
                chunks.append(block)
    return b"".join(chunks).decode(errors="replace"), hung


def _collect(process: subprocess.Popen[bytes], chunks: list[bytes], deadline: float, echo: bool) -> bool:
    """Reads output until the guest ends; False when the deadline came first."""
    assert process.stdout is not None
    output, ended = process.stdout.fileno(), os.pidfd_open(process.pid)
    try:
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([output, ended], [], [], left)
            block = process.stdout.read(1 << 20) if output in ready else None
            if block:
                chunks.append(block)
                if echo:
                    sys.stdout.buffer.write(block)
                    sys.stdout.buffer.flush()
            elif ready:  # ended, and nothing is left to read; or its side of the pipe is closed
                return True
        return False
    finally:
        os.close(ended)


def _kill_group(group: int) -> None:
    """The guest's processes are one process group: its kernel, and one for each address space in it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main() -> int:
    """Runs the command of the command line in a guest; its output and exit status are ours."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.rdma.guest", description="Run a command in the RDMA guest."
    )
    parser.add_argument("--rails", type=int, default=2, help="pairs of devices, rxa0 and rxb0 being the first (2)")
    parser.add_argument("--ipv6-only", action="store_true", help="give the devices no IPv4 addresses")
    parser.add_argument("--memory", type=int, default=2048, metavar="MIB", help="of the guest (2048)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for the command (600)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a host folder the command may really write")
    parser.add_argument("--times", action="store_true", help="say at the end how long it took")
    parser.add_argument("--compile", action="store_true", help="compile the kernel, in minutes, where none is prebuilt")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="and its arguments")
    options = parser.parse_args()
    try:
        if options.compile:
            prepare(compile_kernel=True)
        if not options.command:
            parser.error("no command")
        done = run_in_guest(
            options.command,
            timeout_s=options.timeout,
            rails=options.rails,
            out_dir=options.out,
            memory_mb=options.memory,
            ipv6_only=options.ipv6_only,
            cwd=Path.cwd(),
            echo=True,
        )
    except GuestUnavailable as unavailable:
        print(unavailable, file=sys.stderr)
        return 125
    if done.rc == 125:
        print(done.console, file=sys.stderr)
    if options.times:
        print(f"guest: {done.boot_s:.2f} s to boot, {done.wall_s:.2f} s in all, exit status {done.rc}", file=sys.stderr)
    return done.rc


if __name__ == "__main__":
    raise SystemExit(main())
