"""Ranks that share the tokens of contexts say what one rank says: threads of this process over a group in memory, and
real processes over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from kvmesh.engine.axes import Axes
from kvmesh.engine.batch import DecodeBatch
from kvmesh.engine.checkpoint import open_checkpoint
from kvmesh.engine.context import ContextShare
from kvmesh.engine.parallel import ALONE, RankMesh, check_shares
from kvmesh.engine.runner import DecodeInput, PrefillInput, SampleParams, shard_layout
from kvmesh.errors import ConfigError
from kvmesh.kvcache.groups import plan_group
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.rank_processes import run_ranks
from tests.support.engine.stepper import Stepper
from tests.support.engine.threaded_mesh import over_threads
from tests.support.reference import assert_matches_reference

PROMPTS = [[(7 * i * i + 5 * i) % 250 + 3 for i in range(n)] for n in (37, 5, 1, 66)]
TOKENS = 12
PAGE = 4  # tokens of a rank's page


def answers(path: Path, mesh: RankMesh) -> tuple[list[list[int]], torch.Tensor]:
    """Chunked prompts beside decode rows; a prompt whose prefix lies there already; then all of them decode."""
    axes, block = mesh.axes, PAGE * mesh.axes.turns
    stepper = Stepper(path, block_tokens=block, mesh=mesh)
    runner = stepper.runner
    pages = [stepper.take(len(prompt) + 2 * TOKENS) for prompt in PROMPTS]
    first = [0] * len(PROMPTS)
    first[0] = stepper.prefill(PROMPTS[0], pages[0], chunks=(16, 7, 1))
    row = DecodeInput(first[0], len(PROMPTS[0]), pages[0], SampleParams())
    rows = [row]
    kept = [[first[0]]]
    # The last two prompts in one step with a decode row, in two chunks the longest.
    items = [
        PrefillInput(PROMPTS[1], 0, pages[1], SampleParams()),
        PrefillInput(PROMPTS[2], 0, pages[2], SampleParams()),
        PrefillInput(PROMPTS[3][:30], 0, pages[3]),
    ]
    said, more = runner.step(items, DecodeBatch.of(rows))
    assert said[2] is None
    row.token_id, row.position = int(more.token_ids[0]), row.position + 1
    kept[0].append(row.token_id)
    for i in (1, 2):
        token = said[i - 1]
        assert token is not None
        kept.append([token.token_id])
        rows.append(DecodeInput(token.token_id, len(PROMPTS[i]), pages[i], SampleParams()))
    said, more = runner.step([PrefillInput(PROMPTS[3][30:], 30, pages[3], SampleParams())], DecodeBatch.of(rows))
    for own, entry, token in zip(kept, rows, more.token_ids.tolist(), strict=True):
        own.append(token)
        entry.token_id, entry.position = token, entry.position + 1
    assert said[0] is not None
    kept.append([said[0].token_id])
    rows.append(DecodeInput(said[0].token_id, len(PROMPTS[3]), pages[3], SampleParams()))
    for own, rest in zip(kept, stepper.decode(rows, TOKENS), strict=True):
        own += rest
    # A prefix that another request left: whole blocks of the longest prompt.
    shared = (len(PROMPTS[3]) - 1) // block
    more_pages = (*pages[3][:shared], *stepper.take(len(PROMPTS[3]) + TOKENS))
    again = stepper.prefill(PROMPTS[3], more_pages, start=shared * block)
    kept.append([again, *stepper.decode([DecodeInput(again, len(PROMPTS[3]), more_pages, SampleParams())], 5)[0]])
    ahead = runner.launch(DecodeBatch.of(rows)).result().token_ids.tolist()
    kept.append(ahead)
    share = ContextShare.of(axes, mesh.rank, PAGE)
    count = share.local_len(len(PROMPTS[3]))
    kv = stepper.pages[list(pages[3])].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:count]  # [tokens, layers, planes, K, D]
    assert (runner.layout.turn, runner.layout.turns) == (share.turn, axes.turns)
    return kept, kv.clone()


def rank_main(rank: int, axes: Axes, folder: Path, paths: Sequence[Path]) -> None:
    torch.set_num_threads(1)
    mesh = RankMesh(axes, rank, str(folder / "meet"), timeout_s=20)
    mesh.connect(60)
    torch.save([answers(path, mesh) for path in paths], folder / f"{rank}.pt")
    mesh.close()


def compare(path: Path, axes: Axes, said: Sequence[tuple[list[list[int]], torch.Tensor]]) -> None:
    alone, kv = answers(path, ALONE)
    for rank, (kept, mine) in enumerate(said):
        assert kept == said[0][0], rank
        share = ContextShare.of(axes, rank, PAGE)
        where = [share.position(local) for local in range(len(mine))]
        first = 0 if kv.shape[3] == mine.shape[3] else kv.shape[3] * axes.place(rank).tp // axes.tp
        torch.testing.assert_close(mine, kv[where][:, :, :, first : first + mine.shape[3]], atol=1e-4, rtol=1e-3)
    for prompt, own in zip(PROMPTS, said[0][0], strict=False):
        assert_matches_reference(path, prompt, own)
    assert said[0][0] == alone


def model(name: str, zoo: Callable[[str], Path], folder: Path) -> Path:
    """Latents; 8 heads over 1 or 2 KV heads; sinks in every layer, none with a window."""
    if name == "mla":
        return zoo("deepseek_v3")
    if name == "sinks":
        given = FAMILY_ZOO["gpt_oss"] | {"num_key_value_heads": 1}
        given["layer_types"] = ["full_attention"] * given["num_hidden_layers"]
        return make_checkpoint(folder / name, **given)
    kv = {"mqa": 1, "gqa": 2}[name]
    return make_checkpoint(folder / name, family="llama", num_attention_heads=8, num_key_value_heads=kv)


@pytest.mark.parametrize(
    ("axes", "name"),
    [
        ("tp=2,dcp=2", "mqa"),
        ("tp=2,dcp=2", "sinks"),
        ("tp=2,dcp=2,interleave=1", "mla"),
        ("tp=4,dcp=2,interleave=2", "gqa"),
        ("cp=2", "sinks"),
        ("cp=3", "gqa"),
        ("cp=2,tp=2,dcp=2", "mqa"),
    ],
)
def test_ranks_that_share_contexts_answer_as_one_does(
    axes: str, name: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    path, made = model(name, zoo, tmp_path), Axes.parse(axes)
    compare(path, made, over_threads(made, lambda mesh: answers(path, mesh)))


@pytest.mark.parametrize(("axes", "names"), [("cp=2,tp=2,dcp=2", ["mla"])])
@pytest.mark.slow
def test_over_gloo(axes: str, names: Sequence[str], zoo: Callable[[str], Path], tmp_path: Path) -> None:
    made = Axes.parse(axes)
    paths = [model(name, zoo, tmp_path) for name in names]
    run_ranks(rank_main, (made, tmp_path, paths), made.world)
    said = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(made.world)]
    for at, path in enumerate(paths):
        compare(path, made, [own[at] for own in said])


@pytest.mark.parametrize(
    ("writing", "reading", "name"),
    [
        ("cp=2", "tp=2,dcp=2", "mla"),
        ("tp=2,dcp=2", "", "mla"),
        ("cp=4,tp=2", "tp=4,dcp=2", "gqa"),
        ("", "cp=2", "gqa"),
    ],
)
def test_what_ranks_of_one_cut_computed_those_of_another_decode(
    writing: str, reading: str, name: str, zoo: Callable[[str], Path], tmp_path: Path
) -> None:
    """Blocks go from ranks to ranks as `plan_group` says, no byte twice."""
    path, prompt, block_tokens = model(name, zoo, tmp_path), PROMPTS[3], 4 * PAGE
    writers, readers = Axes.parse(writing), Axes.parse(reading)

    def start(mesh: RankMesh) -> tuple[Stepper, tuple[int, ...]]:
        stepper = Stepper(path, block_tokens=block_tokens, mesh=mesh)
        return stepper, stepper.take(len(prompt) + TOKENS)

    def prefill(mesh: RankMesh) -> tuple[Stepper, tuple[int, ...], int]:
        stepper, pages = start(mesh)
        return stepper, pages, stepper.prefill(prompt, pages, chunks=(29,))

    computed = over_threads(writers, prefill)
    [first] = {token for _, _, token in computed}

    def decode(mesh: RankMesh) -> list[int]:
        stepper, pages = start(mesh)
        layouts = [own.runner.layout for own, _, _ in computed], theirs[mesh.rank]
        plan = plan_group(tuple(layouts[0]), tuple(theirs))
        for block in range(-(-len(prompt) // block_tokens)):
            target = pages[block] * layouts[1].shard_bytes
            moved = 0
            for writer, (own, at, _) in enumerate(computed):
                for source, to, length in plan.runs(writer, mesh.rank, block):
                    begin = at[block] * own.layout.shard_bytes + source
                    stepper.memory[target + to : target + to + length] = own.memory[begin : begin + length]
                    moved += length
            assert moved == layouts[1].shard_bytes
        assert stepper.pages[list(pages[: -(-len(prompt) // block_tokens)])].isfinite().all(), "what is behind the end"
        assert stepper.runner.layout == layouts[1]
        row = DecodeInput(first, len(prompt), pages, SampleParams())
        return [first, *stepper.decode([row], TOKENS - 1)[0]]

    config = open_checkpoint(path).config
    theirs = [shard_layout(config, "float32", block_tokens, readers, rank) for rank in range(readers.world)]
    [said] = {tuple(own) for own in over_threads(readers, decode)}
    assert_matches_reference(path, prompt, said)


@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama4"])
def test_layers_that_see_a_part_of_a_context_are_refused(name: str, zoo: Callable[[str], Path]) -> None:
    config = open_checkpoint(zoo(name)).config
    with pytest.raises(ConfigError, match="cp=2: layers with a window or chunks are not shared"):
        check_shares(config, Axes(cp=2))


def test_a_workload_that_fits_with_dcp_2_and_not_without(zoo: Callable[[str], Path], tmp_path: Path) -> None:
    """Two prompts of 30 tokens take 16 pages of 4; ranks with 8 such pages each hold them together."""
    path = model("mqa", zoo, tmp_path)

    def serve(mesh: RankMesh) -> list[int]:
        stepper = Stepper(path, block_tokens=PAGE * mesh.axes.turns, num_pages=8, mesh=mesh)
        tables = [stepper.take(32) for _ in range(2)]
        first = [stepper.prefill(PROMPTS[3][at : at + 30], table) for at, table in enumerate(tables)]
        rows = [DecodeInput(token, 30, table, SampleParams()) for token, table in zip(first, tables, strict=True)]
        return [*first, *stepper.decode(rows, 2)[0]]

    first, second = over_threads(Axes(tp=2, dcp=2), serve)
    assert first == second
    with pytest.raises(AssertionError):  # no pages are left to take
        over_threads(Axes(tp=2), serve)
