"""The file of endpoints: what it may say, one clear error for what it may not, and what follows from a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.external.endpoints import (
    MAX_FILE_BYTES,
    EngineEndpoint,
    changes,
    of_file,
    of_told,
    of_urls,
)
from kvmesh.external.kv_event_reader import KvEventsAddress

A, B = EngineEndpoint("http://a:8000", "external-a:8000"), EngineEndpoint("https://b/x", "left", "m", 4)


def test_urls_and_objects() -> None:
    told = {
        "endpoints": ["http://a:8000/", {"url": "https://b/x", "name": "left", "engine_model": "m", "max_running": 4}]
    }
    assert of_told(told) == (A, B)
    assert of_urls("http://a:8000, https://b/x") == (A, EngineEndpoint("https://b/x", "external-b:443-x"))
    assert of_told({"endpoints": []}) == of_urls("") == ()
    reports = {"url": "http://a:8000", "kv_events": "tcp://a:5557"}
    [found] = of_told({"endpoints": [reports]})
    assert found.kv_events == KvEventsAddress("a", 5557)
    [found] = of_told({"endpoints": [reports | {"kv_replay": "tcp://b:5558"}]})
    assert found.kv_events == KvEventsAddress("a", 5557, "b", 5558)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ([], "must be an object with one key"),
        ({"endpoints": [], "more": 1}, "must be an object with one key"),
        ({"endpoints": "http://a"}, "must be an object with one key"),
        ({"endpoints": ["a:1"]}, r"endpoints\[0\]='a:1': must be http://HOST:PORT"),
        ({"endpoints": ["http://u:p@a"]}, r"endpoints\[0\].*no user, password"),
        ({"endpoints": ["http://a:99999"]}, r"endpoints\[0\].*[Pp]ort"),
        ({"endpoints": ["http://" + "a" * 300]}, "at most 256"),
        ({"endpoints": [3]}, r"endpoints\[0\]=3: must be a URL"),
        ({"endpoints": [{"name": "a"}]}, r"endpoints\[0\].url=None"),
        ({"endpoints": [{"url": "http://a", "nmae": "b"}]}, r"endpoints\[0\].nmae: is no key; there are url, name"),
        ({"endpoints": [{"url": "http://a", "name": "a b"}]}, r"endpoints\[0\].name='a b'"),
        ({"endpoints": [{"url": "http://a", "max_running": -1}]}, r"endpoints\[0\].max_running=-1"),
        ({"endpoints": [{"url": "http://a", "max_running": True}]}, r"endpoints\[0\].max_running=True"),
        ({"endpoints": [{"url": "http://a", "engine_model": 3}]}, r"endpoints\[0\].engine_model=3"),
        (
            {"endpoints": [{"url": "http://a", "kv_events": "tcp://*:5557"}]},
            r"kv_events='tcp://\*:5557': must be tcp://HOST",
        ),
        ({"endpoints": [{"url": "http://a", "kv_events": "ipc://x"}]}, r"endpoints\[0\].kv_events='ipc://x'"),
        ({"endpoints": [{"url": "http://a", "kv_events": "tcp://a"}]}, r"endpoints\[0\].kv_events='tcp://a'"),
        ({"endpoints": [{"url": "http://a", "kv_events": "tcp://a:99999"}]}, r"endpoints\[0\].kv_events"),
        ({"endpoints": [{"url": "http://a", "kv_events": 5557}]}, r"endpoints\[0\].kv_events=5557"),
        (
            {"endpoints": [{"url": "http://a", "kv_replay": "tcp://a:1"}]},
            r"kv_replay='tcp://a:1': is of no use",
        ),
        ({"endpoints": ["http://a", "http://a"]}, "two endpoints have the name 'external-a:80'"),
        ({"endpoints": ["http://a", {"url": "http://a", "name": "b"}]}, "two endpoints have the url"),
        ({"endpoints": [f"http://a:{n}" for n in range(1, 300)]}, "299 of them; at most 256"),
    ],
)
def test_bad_files_are_one_clear_error(told: Any, why: str, tmp_path: Path) -> None:
    file = tmp_path / "endpoints.json"
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=why) as error:
        of_file(str(file))
    assert error.value.message.startswith(f"endpoints_file={str(file)!r}: ") and "\n" not in error.value.message


def test_yaml_json_and_what_is_neither(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(
        "endpoints:\n- http://a:8000/\n- {url: 'https://b/x', name: left, engine_model: m, max_running: 4}\n"
    )
    assert of_file(str(file)) == (A, B)
    for name, content, why in (
        ("a.yaml", b"endpoints: [", "is not YAML"),
        ("a.json", b"{", "is not JSON"),
        ("b.json", b"[" * 100_000, "is not JSON"),
        ("c.json", b" " * (MAX_FILE_BYTES + 1), "has more than"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=why):
            of_file(str(tmp_path / name))
    with pytest.raises(ConfigError, match="No such file"):
        of_file(str(tmp_path / "none.json"))


def test_changes() -> None:
    moved = EngineEndpoint("http://c", "left")
    assert changes({}, [A, B]).join == (A, B)
    assert changes({"left": B, A.name: A}, [A, B]) == changes({}, [])
    gone = changes({"left": B, A.name: A}, [moved])
    assert (gone.join, gone.leave) == ((moved,), ("left", A.name))
