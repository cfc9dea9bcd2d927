"""What tests/transfer claims of every transport, over rdma: the same tests, reported under their own names. The test's
own process is a host with two NICs, its peers another one.
"""

from __future__ import annotations

GUEST = {
    "rails": 2,
    "memory_mb": 3072,
    "timeout_s": 300,
    "files": [
        "tests/transfer/test_verify.py",
        "tests/transfer/test_engine.py",
        "tests/transfer/test_failures.py",
        "tests/transfer/transports/test_fault.py",
        "tests/transfer/test_fence.py",
        "tests/transfer/test_groups.py",
        "tests/transfer/test_soak.py",
    ],
    "taking": ["transport", "mesh"],
    "over": ["rdma"],
    "env": {"KVMESH_TEST_TRANSPORTS": "rdma", "KVMESH_TEST_RDMA_DEVICES": "rxa0,rxa1/rxb0,rxb1"},
}
