"""Requests out of traces and tables: keys that are equal exactly where prefixes are, times, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import ConfigError
from kvmesh.services.conductor.domain import Lane
from kvmesh.sim.workloads import csv_file as workload_csv
from kvmesh.sim.workloads import workload
from kvmesh.sim.workloads.workload import Reading, SimRequest


def write_trace(file: Path, lines: Sequence[tuple[float, int, int, list[int]]]) -> Path:
    """(ms, input, output, hash ids) a line."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, one, strict=True))) + "\n" for one in lines))
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(
        tmp_path / "t.jsonl",
        [(0, 1100, 5, [1, 2, 3]), (500, 1536, 0, [1, 2, 4]), (1500, 300, 9, [9]), (3000, 1024, 7, [1, 2])],
    )


def mooncake(path: Path, **reading: Any) -> list[SimRequest]:
    return list(workload.mooncake(path, Reading(**reading)))


def shared(one: SimRequest, other: SimRequest) -> int:
    """Blocks of the common prefix."""
    pairs = zip(one.keys, other.keys, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one.keys), len(other.keys)))


@pytest.mark.parametrize("block", [64, 128, 256, 512, 1024, 2048])
def test_full_blocks_have_keys_and_equal_prefixes_equal_ones(trace: Path, block: int) -> None:
    requests = mooncake(trace, block_tokens=block)
    for request in requests:
        assert len(request.keys) == request.input_tokens // block
        assert len(set(request.keys)) == len(request.keys) and {len(key) for key in request.keys} <= {16}
    first, second, third, fourth = requests
    common = 1024 // block
    assert shared(first, second) == min(common, len(first.keys))
    assert shared(first, fourth) == common
    assert shared(first, third) == 0


def test_the_papers_block_splits_an_id_in_two(trace: Path) -> None:
    keys = mooncake(trace, block_tokens=256)[0].keys
    assert keys == tuple(map(workload.key, (2, 3, 4, 5)))
    assert mooncake(trace, block_tokens=512)[0].keys == tuple(map(workload.key, (1, 2)))


def test_blocks_that_do_not_divide_are_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="block_tokens=300: must divide the trace's 512, or be a multiple"):
        mooncake(trace, block_tokens=300)


def test_times_lengths_and_limits(trace: Path) -> None:
    assert [one.at_s for one in mooncake(trace)] == [0, 0.5, 1.5, 3]
    assert [one.at_s for one in mooncake(trace, speed=2)] == [0, 0.25, 0.75, 1.5]
    assert [one.output_tokens for one in mooncake(trace)] == [5, 1, 9, 7]  # one token comes of prefill
    assert [one.output_tokens for one in mooncake(trace, max_output=6)] == [5, 1, 6, 6]
    middle = mooncake(trace, skip=1, limit=2)
    assert [(one.index, one.at_s, one.input_tokens) for one in middle] == [(0, 0, 1536), (1, 1.0, 300)]


@pytest.mark.parametrize(
    ("field", "value"), [("speed", 0), ("speed", float("inf")), ("limit", 0), ("skip", -1), ("max_output", 0)]
)
def test_a_reading_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value:g}") as caught:
        Reading(**{field: value})
    assert caught.value.field == field


def test_a_bad_line_is_met_when_it_is_read_and_not_before(trace: Path) -> None:
    with trace.open("a") as file:
        file.write('{"timestamp": 1}\n')
    requests = workload.mooncake(trace)
    assert [next(requests).index for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="trace line 5: input_length=None"):
        next(requests)


def test_keys_of_other_numbers_differ() -> None:
    keys = {workload.key(number) for number in [*range(10_000), *(1 << at for at in range(14, 128))]}
    assert len(keys) == 10_114


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def read(tmp_path: Path, text: str, **reading: Any) -> list[SimRequest]:
    file = tmp_path / "load.csv"
    file.write_text(text)
    return list(workload_csv.read(file, Reading(**{"block_tokens": 64, **reading})))


@pytest.mark.parametrize(
    ("header", "first", "second"),
    [
        ("time,input,output", "10,128,5", "10.5,64,6"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "10,x,128,5,1,y", "10.5,x,64,6,1,y"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.98000,128,5", "2023-11-16T18:17:04.48Z,64,6"),
        ("output_tokens,Input_Tokens,AT_MS", "5,128,10000", "6,64,10500"),
    ],
)  # fmt: skip
def test_headers_of_several_kinds(tmp_path: Path, header: str, first: str, second: str) -> None:
    one, other = read(tmp_path, f"{header}\n{first}\n\n{second}\n")
    assert (one.at_s, one.input_tokens, one.output_tokens, len(one.keys)) == (0, 128, 5, 2)
    assert (other.index, other.at_s, other.input_tokens, other.output_tokens) == (1, pytest.approx(0.5), 64, 6)
    assert not set(one.keys) & set(other.keys)


def test_all_that_may_be_told(tmp_path: Path) -> None:
    header = "time,input,output,session,origin,tenant,lane,priority,ttft_slo_s,tbt_slo_s"
    one, other = read(tmp_path, f"{header}\n0,64,1,s,o,t,batch,-2,1.5,0.1\n0,64,1,,,,,,,\n")
    assert (one.session, one.origin, one.tenant, one.lane, one.priority) == ("s", "o", "t", Lane.BATCH, -2)
    assert (one.ttft_slo_s, one.tbt_slo_s) == (1.5, 0.1)
    assert (other.session, other.lane, other.priority, other.ttft_slo_s) == ("", Lane.INTERACTIVE, 0, 0.0)


def test_a_prefix_is_shared_by_its_name_as_far_as_it_goes(tmp_path: Path) -> None:
    rows = ["0,256,1,chat-assistant,130", "0,192,1,chat-assistant,130", "0,256,1,chat-assistent,130", "0,64,1,,130"]
    a, b, other, none = read(tmp_path, "time,input,output,prefix,prefix_tokens\n" + "\n".join(rows) + "\n")
    assert (shared(a, b), shared(a, other), shared(a, none)) == (2, 0, 0)
    assert len({*a.keys, *b.keys}) == 4 + 3 - 2


def test_speed_limit_and_skip_hold_for_tables(tmp_path: Path) -> None:
    text = "time,input,output\n5,64,9\n6,64,9\n8,64,9\n9,64,9\n"
    assert [one.at_s for one in read(tmp_path, text, skip=1, limit=2, speed=2)] == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "csv line 1: header='': no column of time: name it one of at_s"),
        ("time,output\n", "no column of input: name it one of input_tokens"),
        ("time,input\n", "no column of output"),
        ("time,input,output\n1,x,1\n", "csv line 2: input='x': must be a whole number of at least 1"),
        ("time,input,output\n1,0,1\n", "csv line 2: input='0'"),
        ("time,input,output\n1,2.5,1\n", "csv line 2: input='2.5'"),
        ("time,input,output\n\n1,2\n", "csv line 3: output='1,2': the line is too short"),
        ("time,input,output\nnoon,2,1\n", "csv line 2: time='noon': is neither a number nor an ISO date"),
        ("time,input,output\nnan,2,1\n", "csv line 2: time='nan': must be finite"),
        ("time,input,output\n2,2,1\n1,2,1\n", "csv line 3: time='1': is earlier"),
        ("time,input,output,lane\n2,2,1,fast\n", "csv line 2: lane='fast': must be one of interactive, batch"),
        ("time,input,output,priority\n2,2,1,a\n", "csv line 2: priority='a'"),
        ("time,input,output,ttft_slo_s\n2,2,1,-1\n", "csv line 2: ttft_slo_s='-1'"),
        ('time,input,output\n1,"2,1\n', "csv line 2: unexpected end of data"),
    ],
)
def test_a_mistake_names_line_and_field(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert words in caught.value.message


def test_a_table_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"csv='.*gone': No such file"):
        next(workload_csv.read(tmp_path / "gone"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        next(workload_csv.read(tmp_path / "binary"))
