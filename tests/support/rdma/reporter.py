"""A pytest plugin for the guest: each report goes to the host at once, so that what ends the guest does not take them
along. `pytest -p tests.support.rdma.reporter` with the file's name in the environment."""

from __future__ import annotations

import json
import os

import pytest

REPORTS = "RDMA_GUEST_REPORTS"  # the file that reports go to


class Reporter:
    """Appends every report, a line of JSON each."""

    def __init__(self, config: pytest.Config, path: str) -> None:
        self._config, self._path = config, path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with open(self._path, "a") as out:
            out.write(json.dumps(data, default=str) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """When the host waits for reports."""
    path = os.environ.get(REPORTS)
    if path:
        config.pluginmanager.register(Reporter(config, path), "rdma-reports")
