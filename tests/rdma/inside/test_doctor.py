"""`kvmesh doctor` where there is RDMA: every pair of devices between two processes, and what it says of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvmesh.cli.doctor import network as network
from kvmesh.transfer.host import look
from tests.cli.doctor.test_peer import listening

GUEST = {"rails": 2}
ROOT = Path("/")


def test_every_pair_of_devices_over_rdma() -> None:
    with listening("10.90.0.2", (), "--nics", "rxb0,rxb1") as other:
        words = ("--transports", "rdma", "--nics", "rxa0,rxa1", "--timeout-s", "30")
        code, shown = other.call(*words, "--json")
        assert code == 0, shown
        (rdma,) = json.loads(shown)["transports"]
        assert {("rxa0", "rxb0"), ("rxa1", "rxb1")} <= {(cell["local"], cell["remote"]) for cell in rdma["cells"]}
        assert all(cell["write"]["gb_per_s"] > 0 and cell["read"]["gb_per_s"] > 0 for cell in rdma["cells"])
        code, shown = other.call(*words)
        assert code == 0, shown
        assert re.search(r"^rxa0 +\d+\.\d\d", shown, re.M), shown


def test_devices_and_versions() -> None:
    found = {one.what: one for one in (network.verbs(ROOT), *network.rdma_devices(ROOT, look(ROOT)))}
    assert found["pyverbs"].level == "ok", found["pyverbs"]
    assert found["rxa0"].level == "ok"
    assert "GIDs: RoCE v2 IPv4" in found["rxa0"].found
    assert "nica0 MTU 9000: RDMA MTU 4096" in found["rxa0"].found
    rdma, auto = network.transports(("rdma",))
    assert (auto.level, auto.found) == ("ok", "rdma, shm, tcp")
    assert (rdma.level, "rxa0" in rdma.found) == ("ok", True)
