"""Real ranks that verify drafts while they share contexts, layers or experts: every answer is that of its request
alone, while others decode beside it, one with penalties, and prompts come in chunks between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvmesh.engine.axes import Axes
from kvmesh.errors import ConfigError
from kvmesh.kvcache.keys import pack_tokens
from kvmesh.ranks import protocol as m
from kvmesh.ranks.speculation import check_speculation
from kvmesh.testing.local_engine import GenerateParams, LocalEngine
from tests.ranks.test_data_parallel import groups
from tests.support.checkpoints import FAMILY_ZOO, make_checkpoint
from tests.support.engine.qwen3_next import make_qwen3_next
from tests.support.rank_driver import BLOCK, AllRanks, ranks

TOKENS, PAGES = 32, 48
GREEDY = GenerateParams(TOKENS)
SAMPLED = GenerateParams(TOKENS, temperature=0.9, seed=5, presence_penalty=0.5, repetition_penalty=1.25)
REPEATS, OTHER = [11, 12, 13, 14] * 7 + [11, 12, 13], [(7 * i * i + 3 * i) % 250 + 3 for i in range(21)]


@dataclass
class Asked:
    """One request: it comes once the others have made `after` tokens."""

    prompt: list[int]
    params: GenerateParams
    after: int = 0
    made: list[int] = field(default_factory=list)
    pages: tuple[int, ...] = ()

    @property
    def history(self) -> m.TokenHistory:
        return m.TokenHistory(pack_tokens(self.prompt), pack_tokens(self.made))

    @property
    def penalised(self) -> m.TokenHistory | None:
        return self.history if self.params.repetition_penalty != 1 else None

    @property
    def sampling(self) -> m.Sampling:
        p = self.params
        return m.Sampling(
            p.temperature,
            p.top_p,
            p.top_k,
            p.seed,
            presence_penalty=p.presence_penalty,
            repetition_penalty=p.repetition_penalty,
        )


@dataclass
class Served:
    """Counts what came of the drafts of some requests, and the steps with drafts that computed prompts, too."""

    drafted: int = 0
    kept: int = 0
    beside: int = 0


async def serve(group: AllRanks, requests: Sequence[Asked], first_handle: int = 1) -> Served:
    """Has all requests answered, each prompt in two chunks."""
    served, waiting, done = Served(), dict(enumerate(requests, first_handle)), 0
    known: dict[int, Asked] = {}
    first_page = 0
    for request in requests:
        need = -(-(len(request.prompt) + TOKENS) // BLOCK)
        request.pages, first_page = tuple(range(first_page, first_page + need)), first_page + need
    while waiting or any(len(request.made) < TOKENS for request in known.values()):
        for handle in [handle for handle, request in waiting.items() if done >= request.after]:
            known[handle] = request = waiting.pop(handle)
            cut, prompt = len(request.prompt) // 2, tuple(request.prompt)
            group.send(
                m.PrefillStep(10 * handle, (m.PrefillItem(handle, prompt[:cut], 0, request.pages, None, False),))
            )
            item = m.PrefillItem(
                handle, prompt[cut:], cut, request.pages, request.sampling, False, history=request.penalised
            )
            group.send(m.PrefillStep(10 * handle + 1, (item,)))
        match await group.take((m.PrefillStepDone, m.DecodeStepDone, m.RankError)):
            case m.PrefillStepDone(sampled=sampled):
                for first in sampled:
                    request = known[first.handle]
                    request.made.append(first.token_id)
                    group.send(
                        m.Join(
                            first.handle,
                            request.pages,
                            len(request.prompt),
                            first.token_id,
                            0,
                            TOKENS,
                            0,
                            (),
                            request.sampling,
                            request.penalised,
                            said=request.history,
                        )
                    )
            case m.DecodeStepDone() as step:
                for token in step.tokens:
                    assert token.token_index == len(known[token.handle].made)
                    known[token.handle].made.append(token.token_id)
                done += len(step.tokens)
                served.drafted += sum(count for _, count, _ in step.drafts)
                served.kept += sum(count for _, _, count in step.drafts)
                served.beside += bool(step.drafts and step.prefill_tokens)
            case other:
                raise AssertionError(f"unexpected {other}")
    return served


def requests() -> list[Asked]:
    """Two at once, one of them penalised; two more whose prompts come between steps with drafts."""
    return [Asked(REPEATS, GREEDY), Asked(REPEATS, SAMPLED), Asked(REPEATS, GREEDY, 30), Asked(OTHER, GREEDY, 60)]


def answers(path: Path, asked: Sequence[Asked]) -> list[list[int]]:
    alone = LocalEngine(path, block_tokens=BLOCK)
    return [alone.generate([one.prompt], one.params)[0].token_ids for one in asked]


DRAFTS: dict[str, Any] = {"speculate": "suffix", "max_draft_tokens": 7}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v3": FAMILY_ZOO["deepseek_v3"],
    "llama": {"family": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2},
    "gemma2": FAMILY_ZOO["gemma2"] | {"num_hidden_layers": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "name"), [("tp=2,dcp=2", "deepseek_v3"), ("cp=2", "llama"), ("pp=2", "gemma2")])
async def test_answers_are_those_of_a_request_alone(mesh: str, name: str, tmp_path: Path) -> None:
    path, asked = make_checkpoint(tmp_path / name, **MODELS[name]), requests()
    expected = answers(path, asked)
    async with ranks("two", path, 2, tmp_path, mesh=mesh, pages=PAGES, **DRAFTS) as both:
        served = await serve(both, asked)
        assert [one.made for one in asked] == expected
        assert served.drafted >= served.kept > 0
        again = [Asked(REPEATS, GREEDY), Asked(OTHER, GREEDY)]  # what was answered before is drafted
        more = await serve(both, again, 9)
        assert [one.made for one in again] == expected[2:] and more.kept > TOKENS / 4
        assert not any(driver.lost for driver in both.drivers)
        await asyncio.gather(*(driver.client.close() for driver in both.drivers))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2,pp=2,ep=dp"])
async def test_places_that_share_experts_draft_for_their_own_rows(mesh: str, tmp_path: Path) -> None:
    """One place has rows with drafts while the other has prompts, rows without, or nothing."""
    path = make_checkpoint(tmp_path / "moe", **FAMILY_ZOO["qwen3_moe"] | {"mlp_only_layers": [0, 1]})
    here, there = requests(), [Asked(OTHER, SAMPLED), Asked(REPEATS, GREEDY, 20)]
    expected = answers(path, [*here, *there])
    async with groups(mesh, path, tmp_path, num_pages=PAGES, num_extents=PAGES, **DRAFTS) as (one, other):
        await asyncio.gather(serve(one, here), serve(other, there))
        assert [asked.made for asked in (*here, *there)] == expected
        alone = [Asked(REPEATS, GREEDY)]
        more = await serve(other, alone, 9)
        assert alone[0].made == expected[0] and more.kept > TOKENS / 4
        assert not any(driver.lost for group in (one, other) for driver in group.drivers)


@pytest.mark.parametrize("axes", ["pp=2", "cp=2", "tp=2,dcp=2"])
def test_a_head_that_needs_what_a_rank_has_not_is_refused(axes: str) -> None:
    with pytest.raises(ConfigError, match=r"speculate='mtp' with .*=2: "):
        check_speculation("mtp", Axes.parse(axes))
    for kind in ("ngram", "suffix", "off"):
        check_speculation(kind, Axes.parse(axes))
    check_speculation("mtp+ngram", Axes.parse("dp=2,tp=2"))


async def test_stages_of_a_model_with_states_refuse(tmp_path: Path) -> None:
    path = make_qwen3_next(tmp_path)
    with pytest.raises(ConfigError, match="speculate='suffix' with pp=2: an earlier stage hears too late"):
        async with ranks("two", path, 2, tmp_path, mesh="pp=2", cache_groups=True, **DRAFTS):
            pass
