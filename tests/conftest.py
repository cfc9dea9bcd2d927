"""For all tests: threads of numeric libraries are capped, whole meshes come last, and there are two speeds.

`--quick` leaves out what is marked `slow`, `mesh` or `long` and lets hypothesis try a tenth of each property's
examples; `--rest` runs the other tests, meshes left out (scripts/run_tests.py gives them processes of their own), and
each property that `--quick` cut short once more, with a third of its examples; `--properties` runs the properties with
all of them. Without any of these everything that was named runs."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

_take_connection: Any = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]


async def _take_unless_closed(
    loop: Any,
    factory: Any,
    conn: socket.socket,
    extra: Any,
    tls: Any = None,
    server: Any = None,
    *more: Any,
    **named: Any,
) -> None:
    if server is not None and server._sockets is None:
        conn.close()
    else:
        await _take_connection(loop, factory, conn, extra, tls, server, *more, **named)


# asyncio leaves a connection unclosed that it takes in the turn in which its listener is closed, which failed whatever
# test ran then. Services run on uvloop.
BaseSelectorEventLoop._accept_connection2 = _take_unless_closed  # type: ignore[attr-defined]

# Modules are no garbage, and there are many: nobody looks them over while they are imported, nor between tests.
gc.disable()
# Before torch is imported anywhere, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# An example takes as long as the machine is busy: what bounds a test's time is pytest's timeout.
hypothesis.settings.register_profile("kvmesh", deadline=None)
hypothesis.settings.load_profile("kvmesh")

TESTS = Path(__file__).parent
STARTS_RANKS = {"blockservice", "decode", "membership", "pool", "prefill", "ranks", "storeclient"}
QUICK_PART, REST_PART = 10, 3  # one in so many of a property's examples ...
FEWEST = 5  # ... but at least so many


@pytest.fixture(scope="session", autouse=True)
def _warm_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where many ranks or meshes are started, they are forked from one process that has imported torch."""
    from tests.support.warm_processes import warm_ranks, warm_services

    items = request.session.items
    meshes = [item for item in items if _mesh(item)]
    ranks = [item for item in items if _folder(item) in STARTS_RANKS]
    with contextlib.ExitStack() as warm:
        if len(meshes) > 3:
            warm.enter_context(warm_services())
        elif len(ranks) > 10 and not any(map(_mesh, ranks)):
            warm.enter_context(warm_ranks())
        yield


@pytest.fixture
def cold_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started as in the product."""
    from kvmesh.ranks import client
    from tests.support.warm_processes import COLD

    monkeypatch.setattr(client, "start_process", COLD)


@pytest.fixture
def cold_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services of meshes are started as in the product."""
    from kvmesh.cli.up import mesh
    from tests.support.warm_processes import COLD_SERVICE

    monkeypatch.setattr(mesh, "start_service", COLD_SERVICE)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the qwen3 family, with random weights."""
    from tests.support.checkpoints import make_checkpoint  # torch: seconds that most runs need not spend

    path = tmp_path_factory.mktemp("ckpt") / "qwen3"
    make_checkpoint(path, family="qwen3")
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out tests marked slow or mesh; few examples a property"
    )
    parser.addoption("--rest", action="store_true", help="only what --quick leaves out or cuts short, and no meshes")
    parser.addoption("--properties", action="store_true", help="only properties, with all of their examples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What fails in milliseconds is told before meshes are started, and the one mesh that many share lives at the end
    only; the order is otherwise as written."""
    if config.getoption("--quick"):
        _keep(config, items, [item for item in items if not (_slow(item) or _mesh(item) or _long(item))])
        _cut_all_examples(items, QUICK_PART)
    elif config.getoption("--rest"):
        kept = [item for item in items if _slow(item) or _more_examples(item)]
        _keep(config, items, [item for item in kept if not (_mesh(item) or _long(item))])
        _cut_all_examples(items, REST_PART)
    elif config.getoption("--properties"):
        _keep(config, items, [item for item in items if _property_of(item) is not None and not _mesh(item)])

    def last(item: pytest.Item) -> tuple[bool, bool]:
        return item.get_closest_marker("mesh") is not None, "small_mesh" in getattr(item, "fixturenames", ())

    items.sort(key=last)


def _folder(item: pytest.Item) -> str:
    """That of tests/ in which it is; "" elsewhere."""
    return item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""


def _slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


def _mesh(item: pytest.Item) -> bool:
    return item.get_closest_marker("mesh") is not None


def _property_of(item: pytest.Item) -> Any:
    """The test function if hypothesis gives it examples, else None."""
    test = getattr(item, "obj", None)
    return getattr(test, "__func__", test) if hypothesis.is_hypothesis_test(test) else None


def _settings_place(test: Any, item: pytest.Item) -> tuple[Any, str]:
    """Returns where hypothesis keeps a test's settings: its own pytest plugin reads this attribute; a state machine's
    test case has them in its class."""
    if hasattr(test, "_hypothesis_state_machine_class"):
        return item.cls, "settings"  # type: ignore[attr-defined]
    return test, "_hypothesis_internal_use_settings"


def _cut(examples: int, part: int) -> int:
    return min(examples, max(FEWEST, examples // part))


def _more_examples(item: pytest.Item) -> bool:
    """Says whether it is a property of which `--rest` tries more examples than `--quick`."""
    if (test := _property_of(item)) is None:
        return False
    examples = getattr(*_settings_place(test, item)).max_examples
    return _cut(examples, REST_PART) > _cut(examples, QUICK_PART)


def _cut_all_examples(items: list[pytest.Item], part: int) -> None:
    # A function with parameters is many items and one object.
    for test, item in {_property_of(item): item for item in items if _property_of(item) is not None}.items():
        place, name = _settings_place(test, item)
        settings: hypothesis.settings = getattr(place, name)
        setattr(place, name, hypothesis.settings(settings, max_examples=_cut(settings.max_examples, part)))


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[pytest.Item]) -> None:
    chosen = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
