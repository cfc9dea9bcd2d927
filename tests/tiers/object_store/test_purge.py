"""What goes from object storage, and what never does, against a real S3 server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import obstore
import pytest
from typer.testing import CliRunner

from kvmesh.cli.app import app
from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.tiers.object_store import ObjectConfig, ObjectTier, purge
from kvmesh.tiers.object_store.client import open_store
from kvmesh.tiers.object_store.purge import Folder, chosen
from tests.support.s3_server import S3, s3_server

OLD, NEW = "a" * 16, "b" * 16
DIMS = "float32 2x2x2x16x8 L0 H0 rank 0/1 rank 0/1"
IDENTITIES = (f"4096 {OLD} {DIMS}", f"4096 {NEW} {DIMS}", f"4096 {NEW}+7 {DIMS}", "0 bytes rank 0/1")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def url(s3: S3) -> str:
    """Two blocks of each identity, and strangers."""
    made = f"s3://{s3.bucket()}/some/prefix"
    for identity in IDENTITIES:
        with ObjectTier(ObjectConfig(url=made, identity=identity)) as tier:
            assert all(future.result(30) for future in tier.put_many([(bytes([n]) * 16, b"x" * 100) for n in range(2)]))
    for name in ("readme", "photos/cat", f"{'c' * 32}/{'00' * 16}"):  # the last: of a version that did not say whose
        obstore.put(open_store(made), name, b"y" * 10)
    return made


def test_folders_say_whose_they_are(url: str) -> None:
    found = {one.identity: one for one in purge.folders(url)}
    assert set(found) == {*IDENTITIES, ""}
    assert [found[one].weights for one in IDENTITIES] == [(OLD, 0), (NEW, 0), (NEW, 7), None]
    assert all(one.objects == 3 and one.nbytes > 200 for name, one in found.items() if name)
    assert (found[""].name, found[""].objects, found[""].weights) == ("c" * 32, 1, None)


def test_what_goes() -> None:
    now = datetime(2026, 6, 30, tzinfo=UTC)
    found = [
        Folder(f"{n:032x}", identity, 1, 1, now - timedelta(days=10)) for n, identity in enumerate((*IDENTITIES, ""))
    ]
    names = [one.name for one in found]
    week, month = timedelta(days=7), timedelta(days=30)
    assert chosen(found, [], None, [], now) == []
    assert chosen(found, [], month, [], now) == []
    assert chosen(found, [], week, [], now) == found[:3], "neither data of clients nor what is not known goes by age"
    assert chosen(found, [], week, [(NEW, 0)], now) == [found[0], found[2]], "what is served stays"
    assert chosen(found, [names[4]], None, [(NEW, 0)], now) == [found[4]]
    for name, why in ((names[1], "serves its weights"), (names[3], "no KV of a model"), ("f" * 32, "none of this")):
        with pytest.raises(InvalidRequest, match=why) as caught:
            chosen(found, [name], None, [(NEW, 0)], now)
        assert caught.value.field == "folder"


def test_a_folder_goes_whole_and_others_stay(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(purge, "DELETE_KEYS", 2)
    old = next(one for one in purge.folders(url) if one.weights == (OLD, 0))
    told: list[int] = []
    assert purge.remove(url, old.name, told.append) == 3 and told[-1] == 3
    assert {one.identity for one in purge.folders(url)} == {*IDENTITIES[1:], ""}
    with ObjectTier(ObjectConfig(url=url, identity=IDENTITIES[0])) as tier:
        assert tier.keys() == []
    for wrong in ("", "..", "photos", old.name + "/x"):
        with pytest.raises(InvalidRequest):
            purge.remove(url, wrong)
    with pytest.raises(ConfigError):
        purge.folders("s3://there-is-no-such-bucket/x")


def test_the_verb_removes_nothing_without_yes(url: str) -> None:
    def said(*args: str) -> list[dict[str, object]]:
        done = CliRunner().invoke(app, ["store", "purge", url, "--json", *args], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found: list[dict[str, object]] = json.loads(done.stdout)
        return found

    assert not any(one["goes"] for one in said())
    asked = ("--older-than", "0", "--no-mesh")
    assert sum(bool(one["goes"]) for one in said(*asked)) == 3
    assert len(said()) == 5
    table = CliRunner().invoke(app, ["store", "purge", url, *asked]).output
    assert table.count("would go") == 4 and f"{NEW}+7 float32" in table and "3 of 5 would go" in table
    assert sum(int(str(one["removed_objects"])) for one in said(*asked, "--yes")) == 9
    assert {one["identity"] for one in said()} == {IDENTITIES[3], ""}
    refused = CliRunner().invoke(app, ["store", "purge", url, "--older-than", "0", "--conductor", "127.0.0.1:1"])
    assert refused.exit_code == 1 and "what is served is not known" in refused.output
