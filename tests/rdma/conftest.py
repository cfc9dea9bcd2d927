"""Tests that need RDMA verbs: written in ``inside/``, started on the host, run in the guest, reported here one by one.

On the host a file of ``inside/`` is not imported (there may be no pyverbs): its tests are found by reading it, and all
that were selected run in one guest, whose pytest writes its reports to a file as it goes. They become the reports of
this session, each with its own outcome, time, output and traceback. A test of which the guest said nothing has failed,
with what the guest said last. A file may ask for another guest by a literal::

    GUEST = {"rails": 3, "ipv6_only": True, "memory_mb": 4096, "timeout_s": 300}

or for tests that stand elsewhere: those of `files` that take one of the fixtures `taking`, but for those that are
marked `over(...)` without one of `over`; with `env` added to the guest's environment.

Where no guest can be made every such test is skipped with the reason. Reading finds the functions and classes of a file
and the ``test...`` names it imports; parameters are known only in the guest, so a test is selected with all of them.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.rdma.guest import (
    GRACE,
    INSIDE,
    REPOSITORY,
    CompletedGuest,
    GuestUnavailable,
    prepare_for_tests,
    run_in_guest,
)
from tests.support.rdma.reporter import REPORTS

DIED = "Fatal Python error"
TIMEOUT = 300.0  # seconds for the tests of one file
SETTINGS = {"rails", "ipv6_only", "memory_mb", "timeout_s", "env"}
SELECTION = {"files", "taking", "over"}
Report = dict[str, Any]  # as pytest serializes it


def test_names(tree: ast.Module) -> Iterator[str]:
    """What of a test file can be selected: ``test_x``, ``TestY::test_z``, or a whole ``TestY`` where it inherits."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for node in tree.body:
        if isinstance(node, functions) and node.name.startswith("test"):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            names = (alias.asname or alias.name for alias in node.names)
            yield from (name for name in names if name.startswith(("test", "Test")))
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            if node.bases:
                yield node.name
            else:
                methods = (m.name for m in node.body if isinstance(m, functions) and m.name.startswith("test"))
                yield from (f"{node.name}::{method}" for method in methods)


def guest_settings(tree: ast.Module) -> dict[str, Any]:
    """The file's ``GUEST``. Raises ValueError when it is no literal or has unknown names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "GUEST" for t in node.targets):
            settings = dict(ast.literal_eval(node.value))
            if unknown := set(settings) - SETTINGS - SELECTION:
                raise ValueError(f"GUEST has {sorted(unknown)}; it may have {sorted(SETTINGS | SELECTION)}")
            return settings
    return {}


def tests_taking(tree: ast.Module, fixtures: Iterable[str], over: Iterable[str]) -> Iterator[str]:
    """Names of the test functions that take one of the fixtures and are not about other transports than `over`."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test"):
            continue
        marks = [
            {argument.value for argument in mark.args if isinstance(argument, ast.Constant)}
            for mark in node.decorator_list
            if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "over"
        ]
        if {argument.arg for argument in node.args.args} & set(fixtures) and all(mark & set(over) for mark in marks):
            yield node.name


@dataclass
class GuestRun:
    """One file's tests in one guest: what was reported, and what the guest left."""

    completed: CompletedGuest
    reports: list[Report] = field(default_factory=list)

    def of(self, file: str, name: str) -> list[Report]:
        """The reports of one name; empty unless each of its tests was reported to its end."""
        found = []
        for report in self.reports:
            where, _, test = report["nodeid"].partition("[")[0].partition("::")
            if where.endswith(file) and (test == name or test.startswith(name + "::")):
                found.append(report)
        ended = {report["nodeid"] for report in found if report["when"] == "teardown"}
        return found if {report["nodeid"] for report in found} == ended else []

    def silence(self, name: str) -> str:
        """What to say of a test that the guest did not report."""
        said, console = self.completed.output, self.completed.console[-2000:]
        died = said.rfind(DIED)  # which thread it was stands first, and what all others did after it
        said = said[died : died + 12_000] if died >= 0 else said[-6000:]
        return f"{name}: the guest (exit status {self.completed.rc}) did not report it\n{said}\n-- console:\n{console}"


class GuestFile(pytest.File):
    """A test file of ``inside/`` as the host sees it."""

    def collect(self) -> Iterator[pytest.Item]:
        self.outcome: GuestRun | None = None
        tree = ast.parse(self.path.read_text(), str(self.path))
        try:
            settings = guest_settings(tree)
        except ValueError as error:
            raise self.CollectError(f"{self.path}: {error}") from None
        self.options = {"timeout_s": TIMEOUT} | {key: value for key, value in settings.items() if key in SETTINGS}
        for file, name in self._selected(tree, settings):
            shown = name if file == self.path else f"{file.name}:{name}"
            item: pytest.Item = GuestItem.from_parent(self, name=shown, file=file, test=name)
            # The first one runs them all; in the guest each has its own limit.
            item.add_marker(pytest.mark.timeout(self.options["timeout_s"] + 2 * GRACE + 90))
            item.add_marker(pytest.mark.slow)  # a guest boots for it
            yield item

    def _selected(self, tree: ast.Module, settings: dict[str, Any]) -> Iterator[tuple[Path, str]]:
        yield from ((self.path, name) for name in test_names(tree))
        for file in settings.get("files", ()):
            path = REPOSITORY / file
            other = ast.parse(path.read_text(), str(path))
            yield from ((path, name) for name in tests_taking(other, settings["taking"], settings["over"]))

    def run(self) -> GuestRun:
        """Runs this file's selected tests in a guest, once. Raises GuestUnavailable."""
        if self.outcome is None:
            items = [item for item in self.session.items if isinstance(item, GuestItem) and item.parent is self]
            self.outcome = self._run([f"{item.file}::{item.test}" for item in items])
        return self.outcome

    def _run(self, tests: list[str]) -> GuestRun:
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "tests.support.rdma.reporter",
            f"--rootdir={self.config.rootpath}",
            *tests,
        ]
        if self.config.inipath:
            argv += ["-c", str(self.config.inipath)]
        with tempfile.TemporaryDirectory(prefix="kvmesh-reports-") as folder:
            reports = Path(folder, "reports.jsonl")
            options = dict(self.options)
            env = options.pop("env", {}) | {REPORTS: str(reports)}
            completed = run_in_guest(argv, out_dir=Path(folder), env=env, **options)
            lines = reports.read_text().splitlines(keepends=True) if reports.exists() else []
        return GuestRun(completed, [json.loads(line) for line in lines if line.endswith("\n")])


class GuestItem(pytest.Item):
    """One test function of ``inside/``, or of a file that one names, with all its parameters."""

    def __init__(self, *, file: Path, test: str, **options: Any) -> None:
        super().__init__(**options)
        self.file, self.test = file, test

    def reports(self) -> list[Report]:
        """What the guest reported of it. Raises GuestUnavailable."""
        assert isinstance(self.parent, GuestFile)
        prepare_for_tests()
        return self.parent.run().of(self.file.name, self.test)

    def runtest(self) -> None:
        """Comes to be called only where there are no reports to pass on."""
        assert isinstance(self.parent, GuestFile)
        try:
            prepare_for_tests()
        except GuestUnavailable as unavailable:
            pytest.skip(f"no RDMA guest: {unavailable}")
        try:
            run = self.parent.run()
        except GuestUnavailable as unavailable:
            pytest.fail(str(unavailable), pytrace=False)
        pytest.fail(run.silence(self.name), pytrace=False)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """On the host, files of ``inside/`` are for the guest."""
    if module_path.parent.name != "inside" or os.environ.get(INSIDE):
        return None
    collector: pytest.Collector = GuestFile.from_parent(parent, path=module_path)
    return collector


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Passes the guest's reports on as this session's own; without any, the item is run as items are."""
    if not isinstance(item, GuestItem):
        return None
    try:
        reports = item.reports()
    except GuestUnavailable:
        return None
    if not reports:
        return None
    hook = item.config.hook
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        whole = hook.pytest_report_from_serializable(config=item.config, data=report)
        if isinstance(whole.longrepr, list):  # where a skip came from: a tuple before it was JSON
            whole.longrepr = tuple(whole.longrepr)
        item.ihook.pytest_runtest_logreport(report=whole)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what an item that was run before left set up for this one
    return True
