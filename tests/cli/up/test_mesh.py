"""The supervisor, with a real store master and a real conductor as its processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvmesh.cli import collect, probe, runs
from kvmesh.cli.role import set_role
from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Event, Mesh, ProcessState, last_line
from kvmesh.cli.up.settings import MeshSettings
from kvmesh.errors import ConfigError, ProtocolMismatch, Unavailable
from kvmesh.rpc.pb import common_pb2
from tests.support.redis_server import needs_redis

pytestmark = pytest.mark.mesh


def make(
    tmp_path: Path, *, change: Callable[[plan.ProcessSpec], plan.ProcessSpec] = lambda spec: spec, **settings: Any
) -> Mesh:
    made = MeshSettings(model="/none", run_dir=str(tmp_path), http_port=0, grpc_port=0, **settings)
    specs = plan.plan(made, tmp_path, plan.Ports())
    return Mesh(made, [change(spec) for spec in specs if spec.service in ("store", "conductor")])


def events(mesh: Mesh) -> queue.Queue[Event]:
    found: queue.Queue[Event] = queue.Queue()
    mesh.listen(found.put)
    return found


def wait_for(found: queue.Queue[Event], name: str, state: ProcessState) -> Event:
    while True:
        event = found.get(timeout=30)
        if (event.name, event.state) == (name, state):
            return event


def told(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "mesh.json").read_text())
    return found


def ended(pid: int) -> bool:
    """Has the process ended, or does it within ten seconds? (A zombie has.)"""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_services_start_become_ready_and_stop_leaving_nothing(tmp_path: Path) -> None:
    before, threads = children(), threading.active_count()
    with make(tmp_path) as mesh:
        mesh.wait_ready(60)
        assert {probe.health(address) for address in mesh.addresses.values()} == {"SERVING"}
        state = told(tmp_path)
        assert state["pid"] == os.getpid()
        assert {name: one["state"] for name, one in state["services"].items()} == {
            "store": "ready",
            "conductor": "ready",
        }
        pids = {one["pid"] for one in state["services"].values()}
        assert pids == {one.pid for one in mesh.processes.values()} <= children()
        assert len({os.getpgid(pid) for pid in pids} | {os.getpgid(0)}) == 3, "a process group each"
    assert children() == before
    assert threading.active_count() == threads
    assert {one["state"] for one in told(tmp_path)["services"].values()} == {"stopped"}
    mesh.stop()  # again: nothing happens


def test_a_second_signal_is_not_taken_for_a_slow_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, mesh = children(), make(tmp_path)
    mesh.start()
    mesh.stop_now()
    mesh.stop()
    assert [record.getMessage() for record in caplog.records if "killing it" in record.getMessage()] == [
        f"{name} was told twice to stop, killing it" for name in mesh.processes
    ]
    assert children() == before


def test_a_killed_service_comes_back_on_its_port_and_the_other_goes_on(tmp_path: Path) -> None:
    mesh = make(tmp_path)
    found = events(mesh)
    with mesh:
        mesh.wait_ready(60)
        other, pid = mesh.processes["conductor"].pid, mesh.processes["store"].pid
        with pytest.raises(ProtocolMismatch, match=f"{mesh.addresses['store']}: what listens there is no instance"):
            asyncio.run(set_role(mesh.addresses["store"], common_pb2.ROLE_BOTH))
        mesh.kill("store")
        assert wait_for(found, "store", ProcessState.DOWN).text == "killed by SIGKILL"
        mesh.wait_ready(60)
        assert probe.health(mesh.addresses["store"]) == "SERVING"
        assert mesh.processes["store"].pid != pid
        assert (mesh.processes["conductor"].pid, mesh.processes["conductor"].restarts) == (other, 0)
        service = told(tmp_path)["services"]["store"]
        assert (service["pid"], service["restarts"]) == (mesh.processes["store"].pid, 1)


def test_a_stopped_process_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with make(tmp_path) as mesh:
        mesh.wait_ready(60)
        mesh.kill("conductor", signal.SIGSTOP)
        pid = mesh.processes["conductor"].pid
    assert not psutil.pid_exists(pid)


def test_a_grandchild_dies_with_its_service(tmp_path: Path) -> None:
    """A front that is killed had no time to end its ranks."""
    pid_file = tmp_path / "grandchild"
    code = (
        "import subprocess, sys, time; one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(pid_file)!r} + '.part', 'w').write(str(one.pid));"
        f"import os; os.rename({str(pid_file)!r} + '.part', {str(pid_file)!r}); time.sleep(0.2); sys.exit('the end')"
    )

    def change(spec: plan.ProcessSpec) -> plan.ProcessSpec:
        return dataclasses.replace(spec, argv=(sys.executable, "-c", code)) if spec.name == "store" else spec

    mesh = make(tmp_path, change=change)
    found = events(mesh)
    with mesh:
        assert wait_for(found, "store", ProcessState.DOWN).text == "exit code 1: the end"
        assert ended(int(pid_file.read_text()))


def test_a_refused_configuration_is_told_as_the_service_told_it(tmp_path: Path) -> None:
    def change(spec: plan.ProcessSpec) -> plan.ProcessSpec:
        return dataclasses.replace(spec, argv=(*spec.argv, "--lease-ms=1")) if spec.name == "store" else spec

    with make(tmp_path, change=change) as mesh, pytest.raises(ConfigError) as caught:
        mesh.wait_ready(60)
    assert caught.value.message.startswith("store: lease_ms=1: must be at least two heartbeats (1000)")


@pytest.mark.parametrize(
    ("log", "tells"),
    [
        (
            "2026 INFO    a begins\n2026 CRITICAL a failed: full | X: full (a.py:3)\n2026 INFO    a ends",
            "a failed: full",
        ),
        ("2026 CRITICAL a failed | X: no room (a.py:3)", "a failed | X: no room (a.py:3)"),
        ("0\nerror: port=1: in use\n", "error: port=1: in use"),
        ("one\n two \n\n", "two"),
        ("", ""),
    ],
)
def test_what_a_log_tells_of_an_end(tmp_path: Path, log: str, tells: str) -> None:
    (tmp_path / "log").write_text(log)
    assert last_line(tmp_path / "log") == tells


def test_a_service_that_keeps_dying_ends_the_wait_with_its_last_line(tmp_path: Path) -> None:
    def change(spec: plan.ProcessSpec) -> plan.ProcessSpec:
        argv = (sys.executable, "-c", "print('nothing to say'); raise SystemExit('my last words')")
        return dataclasses.replace(spec, argv=argv) if spec.name == "conductor" else spec

    with make(tmp_path, change=change) as mesh, pytest.raises(Unavailable, match="my last words"):
        mesh.wait_ready(60)
    assert mesh.processes["conductor"].restarts >= 2


def test_a_service_that_never_is_ready_is_named_when_time_runs_out(tmp_path: Path) -> None:
    def change(spec: plan.ProcessSpec) -> plan.ProcessSpec:
        argv = (sys.executable, "-c", "import time; print('still reading', flush=True); time.sleep(600)")
        return dataclasses.replace(spec, argv=argv) if spec.name == "conductor" else spec

    with make(tmp_path, change=change) as mesh:
        mesh.wait_ready(60, names=["store"])
        with pytest.raises(Unavailable, match="conductor is starting"):
            mesh.wait_ready(0.01)


def test_ports_are_each_given_once_free_and_out_of_the_kernels_range() -> None:
    first = plan.Ports(seed=1).take()
    with socket.create_server(("127.0.0.1", first)):
        assert plan.Ports(seed=1).take() != first
    narrow = plan.Ports(seed=1)
    narrow._high = 10_000 + 40
    found = [narrow.take() for _ in range(20)]
    assert len(set(found)) == 20
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max([first, *found]) < max(low, 12_000)


def test_two_meshes_of_one_machine_never_choose_the_same_port() -> None:
    """Between its choice and the service that listens there, and while that service starts again."""
    mine = plan.Ports(seed=1)
    port = mine.take()
    code = f"from kvmesh.cli.up.plan import Ports; print(Ports(seed=1).take() != {port})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == "True"
    del mine
    assert plan.Ports(seed=1).take() == port, "and it is free once the mesh has ended"


def test_the_plan_of_a_whole_mesh(tmp_path: Path) -> None:
    settings = MeshSettings(
        model="/m/tiny", prefill=2, decode=1, http_port=9000, grpc_port=9001, block_tokens=32,
        flags={"*": {"log_level": "debug"}, "decode": {"max_running": 3}, "prefill-1": {"threads": 2}},
        env={"decode-0": {"MARK": "1"}}, store_eviction="lfu", decode_tp=3,
    )  # fmt: skip
    specs = {spec.name: spec for spec in plan.plan(settings, tmp_path, plan.Ports())}
    assert list(specs) == ["store", "conductor", "prefill-0", "prefill-1", "decode-0", "gateway"]
    assert specs["gateway"].http == "127.0.0.1:9000"
    assert {"--host=127.0.0.1", "--http-port=9000", "--port=9001", "--served-name=tiny"} <= set(specs["gateway"].argv)
    assert "--max-running=3" in specs["decode-0"].argv
    assert "--threads=2" in specs["prefill-1"].argv
    assert "--threads=1" in specs["prefill-0"].argv and not any("--mesh" in one for one in specs["prefill-0"].argv)
    assert "--mesh=tp=3" in specs["decode-0"].argv
    for spec in specs.values():
        assert "--log-level=debug" in spec.argv
        assert ("MARK" in spec.env) == (spec.name == "decode-0")
    for name in ("prefill-0", "decode-0"):
        argv = specs[name].argv
        wanted = {f"--conductor={specs['conductor'].address}", f"--store={specs['store'].address}", "--block-tokens=32"}
        assert wanted | {f"--instance-id={name}", "--model=/m/tiny", "--store-eviction=lfu"} <= set(argv)
    assert len({spec.address for spec in specs.values()} | {spec.metrics for spec in specs.values()}) == 12


def test_the_plan_of_pool_nodes_and_several_models(tmp_path: Path) -> None:
    settings = MeshSettings(
        model="/m/tiny", add_model=("org/code=/m/code", "/m"), prefill=2, pool=2, pool_memory_mb=7, api_keys="/k.toml",
        tls_ca="/ca.pem", http_port=0, grpc_port=0, ssd_path="/disk", ssd_capacity_mb=9,
    )  # fmt: skip
    specs = {spec.name: spec for spec in plan.plan(settings, tmp_path, plan.Ports())}
    instances = ["prefill-0", "prefill-1", "decode-0"]
    assert list(specs) == [
        "store", "conductor", "pool-0", "pool-1", *instances, *(f"org-code-{name}" for name in instances),
        *(f"-m-{name}" for name in instances), "gateway",
    ]  # fmt: skip
    assert {"--memory-mb=7", f"--store={specs['store'].address}", "--instance-id=pool-1"} <= set(specs["pool-1"].argv)
    assert {"--model=/m/code", "--served-name=org/code"} <= set(specs["org-code-decode-0"].argv)
    assert {"--model=/m/tiny", "--served-name=tiny"} <= set(specs["prefill-1"].argv)
    for name in ("pool-1", "prefill-1", "org-code-decode-0"):
        assert {f"--ssd-path=/disk/{name}", "--ssd-capacity-mb=9"} <= set(specs[name].argv), "a folder of its own"
    gateway = set(specs["gateway"].argv)
    assert {"--model=/m/tiny", "--models=org/code=/m/code,/m=/m", "--api-keys=/k.toml"} <= gateway
    assert all("--tls-ca=/ca.pem" in spec.argv for spec in specs.values())
    assert not [arg for spec in specs.values() for arg in spec.argv if arg.startswith("--tls-cert")]


def test_ranks_are_told_their_part_of_the_memory_where_nobody_names_it(tmp_path: Path) -> None:
    """All of them start at once and would find the same memory free."""
    host = MeshSettings(model="/m", add_model=("a=/a",), decode_tp=2, pool=2, pool_memory_mb=100, run_dir="r")
    assert plan.memory_parts(host, 10_000 << 20) == {"room_mb": (7_000 - 200) // 6}
    assert plan.memory_parts(host, 0) == {"room_mb": 1}, "a rank then says what it needs"
    assert plan.segment_mb(host, 10_000 << 20) == 566
    assert plan.memory_parts(dataclasses.replace(host, memory_mb=7), 1 << 40) == {}
    assert plan.memory_parts(dataclasses.replace(host, device="cuda"), 0) == {"device_instances": 4}
    for made in (host, dataclasses.replace(host, device="cuda:1", decode_tp=1)):
        specs = plan.plan(dataclasses.replace(made, http_port=0, grpc_port=0), tmp_path, plan.Ports())
        for spec in specs:
            flags = [arg.partition("=")[0] for arg in spec.argv]
            wanted = ["--device-instances" if made.device != "cpu" else "--room-mb"]
            wanted = wanted if spec.service in ("prefill", "decode") else []
            assert [flag for flag in flags if flag in ("--device-instances", "--room-mb")] == wanted


@needs_redis
def test_several_masters_with_a_redis_of_their_own(tmp_path: Path) -> None:
    """All start and end together; a killed Redis comes back with what it held, and one leader goes on or follows."""
    made = MeshSettings(model="/none", run_dir=str(tmp_path), http_port=0, grpc_port=0, masters=3, redis="auto")
    specs = plan.plan(made, tmp_path, plan.Ports())
    assert [spec.name for spec in specs][:4] == ["redis", "store-0", "store-1", "store-2"]
    masters = ",".join(spec.address for spec in specs if spec.service == "store")
    assert all(
        f"--store={masters}" in spec.argv for spec in specs if spec.service in ("conductor", "prefill", "decode")
    )
    before = children()
    with Mesh(made, [spec for spec in specs if spec.service in ("redis", "store")]) as mesh:
        mesh.wait_ready(60)
        run = runs.Run(tmp_path, told(tmp_path))
        assert runs.masters(run) == masters

        def leading(above: int) -> int:
            deadline = time.monotonic() + 30
            while True:
                found = asyncio.run(collect.ask_masters(masters))
                if "error" not in found and found["map"]["term"] > above:
                    assert len(found["masters"]) == 3
                    return int(found["map"]["term"])
                assert time.monotonic() < deadline, found
                time.sleep(0.05)

        term = leading(0)
        mesh.kill("redis")
        mesh.wait_ready(60)
        assert leading(0) >= term
        leader = asyncio.run(collect.ask_masters(masters))["address"]
        mesh.kill(next(name for name, address in mesh.addresses.items() if address == leader))
        leading(term)
        mesh.wait_ready(60)
    assert children() <= before


def test_several_masters_need_redis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"masters=3: .*--redis auto"):
        MeshSettings(model="/none", masters=3)
    monkeypatch.setenv("PATH", str(tmp_path))
    made = MeshSettings(model="/none", masters=3, redis="auto", http_port=0, grpc_port=0)
    with pytest.raises(ConfigError, match="redis='auto': redis-server is not installed"):
        plan.plan(made, tmp_path, plan.Ports())


SUPERVISOR = """
import sys, pathlib
from kvmesh.cli.up import plan
from kvmesh.cli.up.mesh import Mesh
from kvmesh.cli.up.settings import MeshSettings
run_dir = pathlib.Path(sys.argv[1])
settings = MeshSettings(model="/none", run_dir=str(run_dir), http_port=0, grpc_port=0)
specs = [spec for spec in plan.plan(settings, run_dir, plan.Ports()) if spec.service in ("store", "conductor")]
mesh = Mesh(settings, specs)
mesh.start()
mesh.wait_ready(60)
print(*[one.pid for one in mesh.processes.values()], flush=True)
sys.stdin.read()
"""


def test_kill_nine_of_the_supervisor_leaves_no_service(tmp_path: Path) -> None:
    one = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert one.stdout
    services = [int(pid) for pid in one.stdout.readline().split()]
    assert len(services) == 2
    one.kill()
    one.communicate()
    assert all(ended(pid) for pid in services)
