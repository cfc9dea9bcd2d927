"""`kvmesh explain`: why the conductor placed a request where it did, and what came of it."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from kvmesh.cli import runs
from kvmesh.cli.console import RunDir, console, one_line_errors, wide_enough
from kvmesh.cli.instances import axes_text
from kvmesh.errors import ConfigError, InvalidRequest

_ROLES = (("ROLE_PREFILL", "prefill"), ("ROLE_DECODE", "decode"))
_ALWAYS = ("queue_ms", "prefill_ms", "pull_ms", "tbt_ms")
_HEADINGS = {"pull_ms": "pulling", "load_ms": "loading"}
_TIERS = {"TIER_SSD": "SSD", "TIER_OBJECT": "object storage"}
_OTHER_WAY = "ttft_other_way_ms"
_PAIR = "pair"
_KIND_TERMS = ("ttft_ms", "rows", "stall_ms", "line_ms", "answer_ms", "handoff_ms", "far_ms", "room_ms")
_ENOUGH = 8  # requests that tell how sure a prediction is
_AS_GOOD = "as good: "
_TOOK_ANOTHER = " took another"  # after "the policy NAME"
_NOTHING = 1e-6
_NO_BLOCKS = "none of the prompt's blocks"


@one_line_errors
def explain(
    request_id: Annotated[str, typer.Argument(help="Request or response id (cmpl-..., chatcmpl-...).")],
    run_dir: RunDir = None,
    conductor: Annotated[
        str | None,
        typer.Option(help="Conductors of a mesh that was not started here.", metavar="HOST:PORT[,...]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The conductor's answer, as JSON.")] = False,
) -> None:
    """Show why a recent request went where it went: every candidate, its terms, the choice, and what came of it.

    Examples:

        kvmesh explain chatcmpl-3f2a9c

        kvmesh explain 3f2a9c --conductor 10.0.0.5:7001 --json
    """
    from kvmesh.cli.collect import explained

    run = None if conductor else runs.find_running(run_dir)
    runs.secure(run)
    addresses = conductor or (runs.conductors(run) if run else "")
    bare = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
    if not bare:
        raise ConfigError(f"request_id={request_id!r}: names no request", field="request_id")
    told = asyncio.run(explained(addresses, bare))
    if told is None:
        raise InvalidRequest.of("request_id", request_id, "no conductor knows it, or it was forgotten")
    out = console()
    if as_json:
        out.out(json.dumps(told, indent=2), highlight=False)
    else:
        out.print(screen(told, wide_enough(out)))


def screen(told: dict[str, Any], width: int = 80) -> RenderableType:
    """Everything, for people."""
    cached = told["best_prefix_blocks"]
    asked = f"{told['prompt_tokens']:,} tokens, {blocks(told['prompt_blocks'])}; the first {cached} lay in the mesh"
    if short := told.get("short_groups"):
        asked += f" (a longer prefix lacks {', '.join(short)})"
    head = f"[bold]{escape(told['request_id'])}[/]  {escape(told['model'])}, attempt {told['attempt'] + 1}"
    parts: list[RenderableType] = [head, f"[dim]{asked}[/]", ""]
    for role, word in _ROLES:
        candidates = [one for one in told["candidates"] if one["role"] == role]
        if candidates:
            parts += [_table(word, candidates, width), ""]
    if more := told.get("screened", 0):
        parts += [
            f"[dim]{more:,} more instances were not weighed: none could have been the best, or they get no work[/]",
            "",
        ]
    kinds = _kinds(told)
    if kinds:
        parts += [_kind_table(kinds, width), ""]
    parts.append(f"[dim]{_legend(told['candidates'], kinds)}[/]\n")
    parts.append("\n".join(escape(line) for line in sentences(told)))
    return Group(*parts)


def _table(word: str, candidates: list[dict[str, Any]], width: int) -> Table:
    names = _terms(candidates)
    below = ["loads", "from"] if any(_tier(one) for one in candidates) else []
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width >= 100 else 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column(word, no_wrap=True)
    for name in ("holds", "pulls", *below):
        table.add_column(name, justify="left" if name == "from" else "right", no_wrap=True)
    for name in names:
        table.add_column(escape(_heading(name)), justify="right", min_width=max(map(len, _heading(name).split())))
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("verdict")
    for one in sorted(candidates, key=lambda one: (not one["chosen"], not one["terms"], one["score_ms"])):
        terms = {term["name"]: term["value"] for term in one["terms"]}
        table.add_row(
            "→" if one["chosen"] else "",
            escape(" ".join(filter(None, (one["instance"]["instance_id"], axes_text(one))))),
            str(one["local_blocks"]),
            str(one["pulled_blocks"]),
            *([str(one["loaded_blocks"]), _tier(one)] if below else []),
            *(number(terms[name]) if name in terms else "" for name in names),
            number(one["score_ms"]) if terms else "",
            escape(one["verdict"]),
            style="bold green" if one["chosen"] else "" if terms else "dim",
        )
    return table


def _kinds(told: dict[str, Any]) -> list[dict[str, Any]]:
    """What the request could have become, the chosen kind first; none where nothing but a pair was possible."""
    found: list[dict[str, Any]] = told.get("kinds") or []
    if all(one["kind"] == _PAIR for one in found):
        return []
    return sorted(found, key=lambda one: (not one["chosen"], not one["terms"], one["cost_ms"]))


def _kind_table(kinds: list[dict[str, Any]], width: int) -> Table:
    names = [name for name in _KIND_TERMS if any(_term(one, name) for one in kinds)]
    table = Table(box=None, pad_edge=False, padding=(0, 2 if width >= 100 else 1, 0, 0), header_style="dim")
    for name in ("", "kind"):
        table.add_column(name, no_wrap=True)
    table.add_column("on")
    for name in names:
        table.add_column(_heading(name), justify="right", no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    table.add_column("verdict")
    for one in kinds:
        table.add_row(
            "→" if one["chosen"] else "",
            one["kind"],
            escape(_where(one)),
            *(number(_term(one, name)) if one["terms"] else "" for name in names),
            number(one["cost_ms"]) if one["terms"] else "",
            escape(one["verdict"]),
            style="bold green" if one["chosen"] else "" if one["terms"] else "dim",
        )
    return table


def _term(one: dict[str, Any], name: str) -> float:
    return float(next((term["value"] for term in one["terms"] if term["name"] == name), 0.0))


def _where(kind: dict[str, Any]) -> str:
    prefill, decode = kind["prefill"]["instance_id"], kind["decode"]["instance_id"]
    return f"{prefill} + {decode}" if kind["kind"] == _PAIR else str(decode)


def _why_kind(kinds: list[dict[str, Any]]) -> list[str]:
    """Why it became what it did."""
    chosen = next((one for one in kinds if one["chosen"]), None)
    if chosen is None:
        return []
    others = [one for one in kinds if not one["chosen"]]
    weighed = [one for one in others if one["terms"]]
    if not others:
        return [f"kind: {chosen['kind']} on {_where(chosen)} was all that could be."]
    if not weighed:
        rest = "; ".join(f"{one['kind']} on {_where(one)} {one['verdict']}" for one in others)
        return [f"kind: {chosen['kind']} on {_where(chosen)} was all that could be ({rest})."]
    second = weighed[0]
    mine, theirs = _burden(chosen), _burden(second)
    return [
        f"kind: {chosen['kind']} on {_where(chosen)} costs {number(chosen['cost_ms'])} ms ({mine}); "
        f"{second['kind']} on {_where(second)} {number(second['cost_ms'])} ms ({theirs}; {second['verdict']})."
    ]


def _burden(one: dict[str, Any]) -> str:
    said = [f"TTFT {number(_term(one, 'ttft_ms'))} ms"]
    if rows := _term(one, "rows"):
        said.append(f"{rows:.0f} row{'' if rows == 1 else 's'} held up for {number(_term(one, 'stall_ms'))} ms in all")
    return ", ".join(said)


def _tier(one: dict[str, Any]) -> str:
    """The slowest that any of its blocks come from; "": memory."""
    return _TIERS.get(one.get("tier", ""), "")


def _terms(candidates: list[dict[str, Any]]) -> list[str]:
    """Names of the terms that tell something: not 0 for all, and not the score once more."""
    found: dict[str, bool] = {}
    for one in candidates:
        for term in one["terms"]:
            tells = abs(term["value"]) >= _NOTHING and abs(term["value"] - one["score_ms"]) >= _NOTHING
            found[term["name"]] = found.get(term["name"], False) or tells
    return [name for name, tells in found.items() if tells or name in _ALWAYS]


def _heading(name: str) -> str:
    """Returns the heading of a term's column, which breaks between words and not in them."""
    return _HEADINGS.get(name, name.removesuffix("_ms").replace("_", " "))


def _legend(candidates: list[dict[str, Any]], kinds: list[dict[str, Any]]) -> str:
    text = (
        "holds, pulls: blocks, from the prompt's start; the rest is in ms; the least score wins" if candidates else ""
    )
    names = {term["name"] for one in (*candidates, *kinds) for term in one["terms"] if term["value"]}
    if names & {"stall_ms", "line_ms"}:
        text += "; score of prefill: ttft, what the rows beside the prompt lose (stall)"
        text += " and others in the queue (line)" if "line_ms" in names else ""
        text += ", without landing wait: that is the same for all" if "landing_wait_ms" in names else ""
    if "lately_ms" in names:
        text += "; lately: it was given more work than another that is hardly worse, so the work is evened out"
    if kinds:
        text += (
            f"{'; ' if text else ''}cost: ttft + stall (of the rows beside the prompt, together) + answer (its first"
        )
        text += f" tokens) + handoff{' + line' if 'line_ms' in names else ''}; the kind of the least cost wins"
    if any(_tier(one) for one in candidates):
        text += (
            "; loads: blocks out of a lower tier of its own; from: the slowest tier that any block comes from, own or a"
        )
        text += " holder's; loading: what that takes, before a holder sends, or beside it"
    if any(term["name"] == _OTHER_WAY for one in candidates for term in one["terms"]):
        text += f"; {_heading(_OTHER_WAY)}: had it computed what it would pull, or pulled what it would compute"
    return text


def number(value: float) -> str:
    """12,345; 123; 12.3; 0.04; 0."""
    if not value:
        return "0"
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 1 else f"{value:.2f}"


def blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def sentences(told: dict[str, Any]) -> list[str]:
    """Why, in words: one sentence for each choice or for the refusal, and one for what came afterwards."""
    lines = []
    if told["outcome"] != "placed":
        lines.append(f"Refused ({told['outcome']}): {told['message'] or 'no reason was told'}.")
    for role, word in _ROLES:
        candidates = [one for one in told["candidates"] if one["role"] == role]
        why = _why(candidates, told["prompt_blocks"], word)
        if why:
            lines.append(why)
    return lines + _why_kind(_kinds(told)) + _afterwards(told)


def _why(candidates: list[dict[str, Any]], prompt_blocks: int, word: str) -> str:
    chosen = next((one for one in candidates if one["chosen"]), None)
    if chosen is None:
        return ""
    name, prefill = chosen["instance"]["instance_id"], word == "prefill"
    others = sorted((o for o in candidates if not o["chosen"] and o.get("terms")), key=lambda one: one["score_ms"])
    if not others:
        reasons = {o["instance"]["instance_id"]: o["verdict"] for o in candidates if not o["chosen"]}
        mine = _has(chosen, prompt_blocks, prefill)
        passed_over = [one for one, why in reasons.items() if why.endswith(_TOOK_ANOTHER)]
        if passed_over:
            policy = reasons[passed_over[0]].removesuffix(_TOOK_ANOTHER)
            return f"{word}: {policy} took {name}, not {', '.join(passed_over)}: it {mine}."
        rest = f" ({'; '.join(f'{one} {why}' for one, why in reasons.items())})" if reasons else ""
        return f"{word}: {name} was the only one that could take it{rest}: it {mine}."
    second = others[0]
    lead = second["score_ms"] - chosen["score_ms"]
    said = second["verdict"].removeprefix(_AS_GOOD) if second["verdict"].startswith(_AS_GOOD) else ""
    if lead == 0 if "crowd" not in second else "drawn" in said:
        wins = f"{name} and {second['instance']['instance_id']} were as good, and {name} was drawn"
    elif said:
        wins = f"{name} and {second['instance']['instance_id']} were as good, and {name} was taken"
        wins += f" ({second['instance']['instance_id']}: {said})"
    elif lead > 0:
        wins = f"{name} wins by {number(lead)} ms"
    else:
        less = f"{number(-lead)} ms less" if lead else "as much"
        wins = f"{name} was chosen though {second['instance']['instance_id']} scores {less}"
        wins += f" ({second['verdict']})"
    mine, theirs = _has(chosen, prompt_blocks, prefill), _has(second, prompt_blocks, prefill)
    return f"{word}: {wins}: it {mine}; {second['instance']['instance_id']} {theirs}."


def _has(one: dict[str, Any], prompt_blocks: int, prefill: bool) -> str:
    """What one candidate had and would have had to do."""
    terms = {term["name"]: term["value"] for term in one["terms"]}
    said = []
    if prompt_blocks and (prefill or one["local_blocks"]):
        held = f"{one['local_blocks']} of {blocks(prompt_blocks)}" if one["local_blocks"] else _NO_BLOCKS
        said.append(f"holds {held}")
    if one["pulled_blocks"]:
        took = f" ({number(terms['pull_ms'])} ms)" if terms.get("pull_ms") else ""
        below = f" out of {_tier(one)}" if _tier(one) and not one["loaded_blocks"] else ""
        said.append(f"{'pulls' if one['chosen'] else 'would pull'} {one['pulled_blocks']}{below}{took}")
    if _tier(one):
        took = f"{number(terms.get('load_ms', 0))} ms"
        loads = f"{'loads' if one['chosen'] else 'would load'} {one['loaded_blocks']} out of its {_tier(one)} ({took})"
        said.append(loads if one["loaded_blocks"] else f"waits {took} for that to be read")
    if prefill:
        queue = terms.get("queue_ms", 0)
        said.append(f"has {number(queue)} ms queued" if queue >= 0.5 else "has nothing queued")
        if "prefill_ms" in terms:
            said.append(f"needs {number(terms['prefill_ms'])} ms of prefill")
    else:
        said.append(f"is expected at {number(one['score_ms'])} ms")
    return ", ".join(said)


def _afterwards(told: dict[str, Any]) -> list[str]:
    if told["outcome"] != "placed":
        return []
    placed = told.get("placement") or {}
    ttft = _expected(told.get("ttft"), placed.get("predicted_ttft_ms", 0))
    tbt = _expected(told.get("tbt"), placed.get("predicted_tbt_ms", 0))
    expected = f"Expected: TTFT {ttft}, TBT {tbt}, {placed.get('predicted_cached_tokens', 0):,} cached tokens"
    life = placed.get("life", {})
    answer = life.get("output_tokens", 0)
    lines = [f"{expected}, {tokens(answer)} of answer." if answer else f"{expected}.", *_laid_out(life)]
    if not told["reported"]:
        lines.append("Afterwards: prefill has not reported on it (yet).")
    else:
        lines.append(
            f"Afterwards: prefill took {told['prefill_ms']:,} ms and found {told['cached_tokens']:,} of "
            f"{told['prompt_tokens']:,} prompt tokens cached."
        )
    return [*lines, *_ended(told.get("ended"), told.get("ttft"), told.get("tbt"))]


def _expected(foretold: dict[str, Any] | None, ms: float) -> str:
    """ "16.0 to 31.0 ms (8 of 10 like it)". `ms`: what was predicted, where nothing more is told."""
    if foretold is None:
        return f"{ms:,} ms"
    if foretold["samples"] < _ENOUGH:
        return f"{number(foretold['expected_ms'])} ms (how sure is not known yet)"
    return f"{number(foretold['low_ms'])} to {number(foretold['high_ms'])} ms (8 of 10 like it)"


def _within(foretold: dict[str, Any] | None, ms: float) -> str:
    """ ", as expected", or what else; "" where nobody knew."""
    if foretold is None or foretold["samples"] < _ENOUGH or not foretold["expected_ms"]:
        return ""
    if ms < foretold["low_ms"]:
        return ", less than expected"
    return ", more than expected" if ms > foretold["high_ms"] else ", as expected"


def _laid_out(life: dict[str, Any]) -> list[str]:
    """What was to happen when, in ms from the decision."""
    if not life.get("prefill_end_ms"):
        return []
    said = []
    if life["fetched_ms"]:
        begins = f"from {life['pull_start_ms']:,} ms" if life["pull_start_ms"] else "at once"
        said.append(f"blocks are fetched {begins}, until {life['fetched_ms']:,} ms")
    said.append(f"prefill computes from {life['prefill_start_ms']:,} to {life['prefill_end_ms']:,} ms")
    said.append(f"first token at {life['first_token_ms']:,} ms")
    if life["output_tokens"]:
        said.append(f"the last at {life['end_ms']:,} ms")
    return [f"Laid out: {'; '.join(said)}."]


def tokens(count: int) -> str:
    """1 token; 1,234 tokens."""
    return f"{count:,} token{'' if count == 1 else 's'}"


_ENDS = {
    "OUTCOME_DONE": "done",
    "OUTCOME_CANCELLED": "cancelled",
    "OUTCOME_FAILED": "failed",
    "OUTCOME_REFUSED": "refused",
}


def _ended(
    ended: dict[str, Any] | None, ttft: dict[str, Any] | None = None, tbt: dict[str, Any] | None = None
) -> list[str]:
    """How it went, as decode told it, beside what was expected; nothing until it has."""
    if not ended:
        return []
    how = _ENDS.get(ended["outcome"], "ended")
    why = f" ({ended['error']}{', by ' + ended['blamed'] if ended['blamed'] else ''})" if ended["error"] else ""
    if not ended["ttft_us"]:
        return [f"In the end: {how}{why}, without a token, after {number(ended['duration_us'] / 1000)} ms."]
    ttft_ms, tbt_ms = ended["ttft_us"] / 1000, ended["tbt_us"] / 1000
    between = f", TBT {number(tbt_ms)} ms (its slowest tenth{_within(tbt, tbt_ms)})" if tbt_ms else ""
    first = _within(ttft, ttft_ms).removeprefix(", ")
    return [
        f"In the end: {how}{why}: TTFT {number(ttft_ms)} ms{f' ({first})' if first else ''}{between}, "
        f"{tokens(ended['output_tokens'])} in {number(ended['duration_us'] / 1000)} ms."
    ]
