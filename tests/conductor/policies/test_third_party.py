"""A package outside the repository adds a placement policy (docs/howto/add-a-placement-policy.md, word for word); a
broken one is told of once and costs no request."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kvmesh.config import checked as value_checked
from kvmesh.config import load
from kvmesh.errors import ConfigError
from kvmesh.plugins import Plugins
from kvmesh.rpc import channels
from kvmesh.rpc.pb import conductor_pb2, conductor_pb2_grpc
from kvmesh.services.conductor import main
from kvmesh.services.conductor.config import ConductorConfig
from kvmesh.services.conductor.domain import Placed, Role
from kvmesh.services.conductor.policies import registry
from kvmesh.services.conductor.policies.chooser import LOGGED_EVERY_S
from kvmesh.services.conductor.policies.kvcache import KvCache
from kvmesh.services.conductor.policies.policy import PlacementPolicy
from tests.support.conductor.brain import Brain
from tests.support.page_package import files_of, install, its_test_passes
from tests.support.services import running

CODE = """
from kvmesh.services.conductor.policies.policy import Choices, Pick, PickingPolicy, PlacementPolicy, Weigh


class LongestCached(PickingPolicy):
    def pick(self, request, pool, rng):
        return max(pool.names, key=lambda name: (pool.cached_tokens(name), -pool.load_s(name), name))


class Raises(PlacementPolicy):
    def choose(self, request, choices):
        raise ZeroDivisionError("by zero")


class Stranger(PickingPolicy):
    def pick(self, request, pool, rng):
        return "nobody"


class Nothing(PlacementPolicy):
    def choose(self, request, choices):
        return None


class Apart(PlacementPolicy):
    def choose(self, request, choices):
        return Pick(choices.prefills.names[0], choices.prefills.names[0])


class NoPolicy:
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package, as pip leaves it: a module and a dist-info folder on the path."""
    (tmp_path / "their_policies.py").write_text(CODE)
    info = tmp_path / "their_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    names = "longest_cached:LongestCached raises:Raises stranger:Stranger nothing:Nothing apart:Apart none:NoPolicy"
    lines = [f"{one.split(':')[0]} = their_policies:{one.split(':')[1]}" for one in names.split()]
    lines += ["gone = their_policies:Gone", "kvcache = their_policies:LongestCached"]
    (info / "entry_points.txt").write_text("\n".join(["[kvmesh.policies]", *lines, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_policies", raising=False)
    importlib.invalidate_caches()
    fresh = Plugins("kvmesh.policies", registry.BUILT_IN)  # one that has loaded nothing of another test's package
    monkeypatch.setattr(registry, "POLICY_NAMES", fresh)
    return tmp_path


def mesh(policy: str) -> Brain:
    brain = Brain(policy=policy, lease_s=1e9)
    for name in ("p0", "p1"):
        brain.add(name, Role.PREFILL)
    for name in ("d0", "d1"):
        brain.add(name, Role.DECODE)
    return brain


def test_the_page_s_own_test_passes(tmp_path: Path) -> None:
    files = files_of("add-a-placement-policy.md")
    install(files, tmp_path)
    its_test_passes(files, tmp_path)


def test_it_is_chosen_by_its_name_and_places(package: Path) -> None:
    config = load(ConductorConfig, {"policy": "longest_cached"}, toml=None, env={})
    brain = mesh(main.settings_of(config).policy)
    placed = [brain.placed() for _ in range(3)]
    assert [(p.prefill.instance_id, p.decode.instance_id) for p in placed] == [("p1", "d1"), ("p0", "d0"), ("p1", "d1")]
    decision = brain.state.explain("r3")
    assert decision is not None
    verdicts = {c.ref.instance_id: decision.verdict(c) for c in decision.candidates}
    assert verdicts["p1"] == verdicts["d1"] == "chosen"
    assert verdicts["p0"] == verdicts["d0"] == "the policy longest_cached took another"


async def test_a_conductor_serves_by_it(package: Path) -> None:
    config = ConductorConfig(policy="longest_cached")
    async with running(main.run, config) as service, channels.connect(service.address) as channel:
        stub = conductor_pb2_grpc.ConductorStub(channel)
        told = await stub.GetStatus(conductor_pb2.GetConductorStatusRequest(), timeout=10)
    assert told.policy == "longest_cached"


def test_an_unknown_name_is_answered_with_all_that_are_known(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy='rnd' \(.*\): choose one of kvcache, .*session_hash, .*stranger"):
        load(ConductorConfig, {"policy": "rnd"}, toml=None, env={})
    with pytest.raises(ConfigError, match=r"choose one of kvcache, .*longest_cached"):
        registry.make("rnd")
    assert value_checked(ConductorConfig, "policy", "longest_cached", "--set") == "longest_cached"  # `kvmesh up --set`


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gone", "their_policies:Gone does not load: AttributeError"),
        ("none", "their_policies:NoPolicy makes a NoPolicy, not a PlacementPolicy"),
        ("kvcache", "KvCache and their_policies:LongestCached have this name"),
    ],
)
def test_what_is_no_policy_is_refused_at_the_start(package: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"policy='{name}': .*{why}"):
        mesh(name)


@pytest.mark.parametrize(
    ("name", "failed"),
    [
        ("raises", "raises ZeroDivisionError: by zero"),
        ("stranger", "raises KeyError: 'nobody'"),
        ("nothing", "answers None, which was not offered"),
        ("apart", "answers Pick(prefill='p0', decode='p0'), which was not offered"),
    ],
)
def test_requests_of_a_broken_policy_are_weighed(
    package: Path, name: str, failed: str, caplog: pytest.LogCaptureFixture
) -> None:
    brain, weighing = mesh(name), mesh("round_robin")
    weighing.state.scheduling.chooser._policy = KvCache()
    with caplog.at_level(logging.ERROR):
        answers = [brain.placed() for _ in range(3)]
    assert [r.getMessage() for r in caplog.records] == [
        f"policy={name} {failed}; request r1 is weighed instead (1 so far)"
    ]
    assert answers == [weighing.placed() for _ in range(3)]
    assert brain.state.scheduling.chooser.failures == 3
    brain.now += LOGGED_EVERY_S
    with caplog.at_level(logging.ERROR):
        assert isinstance(brain.placed(), Placed)
    assert caplog.records[-1].getMessage().endswith("(4 so far)")


def test_the_simulator_is_told_by_its_name_too(package: Path) -> None:
    """In a process of its own, as `kvmesh sim run --policy` is."""
    code = """if True:
        from kvmesh.cli.sim import build
        from tests.cli.sim.test_run import options
        print(build.config_of(options(policy="longest_cached")).conductor.policy)
        print(build.config_of(options(policy="longest-cached")).conductor.policy)
    """
    env_path = [str(package), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {env_path!r}\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (["longest_cached"] * 2, "")


def test_built_in_policies_load_and_never_fail() -> None:
    for one in registry.BUILT_IN:
        assert isinstance(registry.make(one), PlacementPolicy)
        brain = mesh(one)
        for _ in range(5):
            brain.placed(session="s")
        assert brain.state.scheduling.chooser.failures == 0, one
