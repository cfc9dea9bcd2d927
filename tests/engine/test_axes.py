"""Where ranks stand, and with whom they form groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.engine.axes import EXPERT_AXES, NAMES, Axes, RankPlace
from kvmesh.engine.parallel import MEETINGS, all_groups
from kvmesh.errors import ConfigError

sizes = st.integers(1, 4)


@st.composite
def axes(draw: st.DrawFn) -> Axes:
    tp = draw(st.sampled_from((1, 2, 4)))
    dcp = draw(st.sampled_from([one for one in (1, 2, 4) if tp % one == 0]))
    ep = tuple(axis for axis in EXPERT_AXES if draw(st.booleans()))
    return Axes(draw(sizes), draw(sizes), draw(sizes), tp, ep, dcp, draw(st.sampled_from((0, 1, 16))))


@given(axes())
def test_every_rank_has_one_place(made: Axes) -> None:
    places = [made.place(rank) for rank in range(made.world)]
    assert len(set(places)) == made.world == made.dp * made.pp * made.cp * made.tp
    assert [made.rank(place) for place in places] == list(range(made.world))
    assert places == sorted(places), "slowest first"


@given(axes(), st.sets(st.sampled_from((*NAMES, "dcp"))))
def test_groups_share_out_all_ranks(made: Axes, over: set[str]) -> None:
    groups = made.groups(over)
    assert sorted(rank for group in groups for rank in group) == list(range(made.world))
    size = 1
    for name in NAMES:
        size *= getattr(made, name) if name in over else 1
    size *= made.dcp if "dcp" in over and "tp" not in over else 1
    assert {len(group) for group in groups} == {size}
    for group in groups:
        for rank in group:
            assert made.peers(rank, over) == group


@given(axes())
def test_what_is_written_is_read(made: Axes) -> None:
    assert Axes.parse(str(made)) == made


def test_by_hand() -> None:
    made = Axes.parse("dp=2, tp=4,dcp=2,ep=dp+tp,interleave=1")
    assert made == Axes(dp=2, tp=4, dcp=2, ep=("dp", "tp"), interleave=1)
    assert (made.world, made.mlp, made.experts) == (8, 4, 8)
    assert made.place(6) == RankPlace(1, 0, 0, 2)
    assert made.peers(6, ["dcp"]) == (6, 7) and made.peers(5, ["dcp"]) == (4, 5)
    assert made.peers(6, ["dp"]) == (2, 6)
    assert Axes.parse("") == Axes() and str(Axes()) == ""
    assert len(all_groups(made)) == len(set(all_groups(made))) == 2 + 4 + 4 + 1  # tp, dcp, dp, all
    assert all_groups(Axes()) == () and set(NAMES) in [set(over) for over in MEETINGS]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp", "tp='' is not a number"),
        ("tp=0", "tp=0 must lie in 1..1024"),
        ("tp=-1", "tp='-1' is not a number"),
        ("tp=2,tp=2", "tp is named twice"),
        ("sp=2", "no axis is called 'sp'"),
        ("ep=pp", "ep=pp must join some of dp, cp, tp"),
        ("ep=dp+dp", "ep=dp\\+dp must join"),
        ("tp=4,dcp=3", "dcp=3 must divide tp=4"),
        ("dp=1024,tp=2", "2048 ranks, at most 1024"),
        ("interleave=x", "interleave='x'"),
    ],
)
def test_what_cannot_be_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Axes.parse(text)


def test_ranks_that_share_contexts_have_equal_parts_of_a_block() -> None:
    assert (Axes(cp=2, tp=4, dcp=2).turns, Axes(tp=4).turns) == (4, 1)
    Axes(cp=2, tp=4, dcp=2).check_blocks(16)
    with pytest.raises(ConfigError, match="cp=3 times dcp=2: must divide block_tokens=64"):
        Axes(cp=3, tp=2, dcp=2).check_blocks(64)
    with pytest.raises(ConfigError, match="mesh='cp=2,interleave=1': an instance keeps what a rank has"):
        Axes.of_settings("cp=2,interleave=1", 1, "mesh", "tensor_parallel")
