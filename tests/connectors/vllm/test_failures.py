"""What fails again and again is said now and then, with how often."""

from __future__ import annotations

import pytest

from kvmesh.connectors.vllm.failures import AGAIN_S, FailureLog


def test_each_kind_is_told_at_once_and_then_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog()
    for now in (0.0, 1.0, AGAIN_S - 0.1):
        failures.tell("saves fail", f"first at {now}", now)
    failures.tell("loads fail", "first at 2.0", 2.0)
    failures.tell("saves fail", "again", AGAIN_S)
    failures.tell("saves fail", "and again", 2 * AGAIN_S)
    assert [one.getMessage() for one in caplog.records] == [
        "KvmeshConnector: saves fail: first at 0.0",
        "KvmeshConnector: loads fail: first at 2.0",
        "KvmeshConnector: saves fail: again (2 more since the last time this was said)",
        "KvmeshConnector: saves fail: and again",
    ]
    assert {one.levelname for one in caplog.records} == {"WARNING"}
