"""Shard layouts as protos, and the pairs of ranks that a handoff between two layouts needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields

from kvmesh.errors import ConfigError, InvalidRequest
from kvmesh.kvcache.groups import plan_group
from kvmesh.kvcache.layout import ShardLayout
from kvmesh.rpc.pb import common_pb2 as pb

MAX_RANKS = 1024
FIELDS = tuple(field.name for field in fields(ShardLayout) if field.name != "turns")


def to_wire(layouts: Iterable[ShardLayout]) -> list[pb.ShardLayout]:
    """Returns one message for each rank."""
    return [
        pb.ShardLayout(
            **{name: getattr(layout, name) for name in FIELDS}, turns=layout.turns if layout.turns > 1 else 0
        )
        for layout in layouts
    ]


def from_wire(messages: Sequence[pb.ShardLayout], field: str) -> tuple[ShardLayout, ...]:
    """Returns the layouts of messages. Raises InvalidRequest naming `field`."""
    if len(messages) > MAX_RANKS:
        raise InvalidRequest.of(field, f"{len(messages)} ranks", f"at most {MAX_RANKS}")
    try:
        return tuple(
            ShardLayout(**{name: getattr(message, name) for name in FIELDS}, turns=message.turns or 1)
            for message in messages
        )
    except ConfigError as error:
        raise InvalidRequest(f"{field}: {error.message}", field=field) from None


def writers_of(
    names: Sequence[str], writers: Sequence[ShardLayout], readers: Sequence[ShardLayout]
) -> tuple[tuple[int, str], ...]:
    """Returns every pair (reader rank, name of a writer that sends to it) of a handoff. `names` are the transfer
    engines of the writers, who cut the model as `writers` say (empty: as the readers do). Raises InvalidRequest when
    the two do not fit."""
    writers = writers or readers
    if len(names) != len(writers):
        raise InvalidRequest.of("layouts", f"{len(writers)} layouts", f"one for each of {len(names)} writers")
    try:
        plan = plan_group(tuple(writers), tuple(readers))
    except ConfigError as error:
        raise InvalidRequest(f"layouts: {error.message}", field="layouts") from None
    return tuple((reader, names[writer]) for reader in range(len(readers)) for writer in sorted(plan.marks(reader)))


# ── models of several cache groups ───────────────────────────────────────────────────────────────────


def by_group(layouts: Sequence[ShardLayout], ranks: int) -> tuple[tuple[ShardLayout, ...], ...]:
    """Returns, for each cache group, how `ranks` ranks cut it, of layouts as a Hello has them: rank by rank, within a
    rank by group number. Raises InvalidRequest unless each rank has every group."""
    count, rest = divmod(len(layouts), ranks) if ranks else (0, len(layouts))
    numbers = [layout.group for layout in layouts]
    if rest or not count or numbers != [*range(count)] * ranks:
        raise InvalidRequest.of("group_layouts", f"groups {numbers}", f"every group at each of {ranks} ranks, in order")
    return tuple(tuple(layouts[group::count]) for group in range(count))


def grouped_writers_of(
    names: Sequence[str], writers: Sequence[ShardLayout], readers: Sequence[ShardLayout], ranks: int
) -> tuple[tuple[int, str], ...]:
    """Returns what `writers_of` does, of a model of several cache groups and `ranks` readers: a pair for each writer
    that sends something of any group, whatever one handoff's landing names. Layouts are as `by_group` takes them."""
    cuts, wanted = by_group(writers, len(names)), by_group(readers, ranks)
    if len(cuts) != len(wanted):
        raise InvalidRequest.of("group_layouts", f"{len(wanted)} groups", f"{len(cuts)}, as the other side has")
    pairs = {pair for own, theirs in zip(cuts, wanted, strict=True) for pair in writers_of(names, own, theirs)}
    return tuple(sorted(pairs))
