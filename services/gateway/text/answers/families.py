"""The families of models by how their answers are written: one table, chosen by a checkpoint's config.json and chat
template, or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvmesh.services.gateway.text.answers.harmony import HarmonyParser
from kvmesh.services.gateway.text.answers.json_calls import (
    DeepSeekParser,
    HermesParser,
    KimiParser,
    LlamaParser,
    MistralParser,
)
from kvmesh.services.gateway.text.answers.markup import MarkupParser, PlainParser
from kvmesh.services.gateway.text.answers.parsed import AnswerParser
from kvmesh.services.gateway.text.answers.tagged_calls import GlmParser, MiniMaxParser, Qwen3CoderParser
from kvmesh.services.gateway.text.answers.tools import ToolSpec


@dataclass(frozen=True, slots=True)
class AnswerFamily:
    """How one family of models writes its answers.

    `marks`: a chat template with all of these texts is of the family. `model_types` are those of config.json; a type of
    which models come in several formats stands at several families, and marks decide between them.
    """

    name: str
    what: str
    parser_class: type[MarkupParser] | type[HarmonyParser] | type[PlainParser]
    model_types: frozenset[str] = frozenset()
    marks: tuple[str, ...] = ()
    opens_reasoning: bool = False
    """Answers begin inside reasoning though the prompt does not open it."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts of special tokens that the family's parser must see."""
        return self.parser_class.markers

    def parser(
        self,
        *,
        tools: Sequence[ToolSpec],
        prompt_tail: str,
        reasoning: bool,
        new_id: Callable[[int], str],
    ) -> AnswerParser:
        """Returns a parser of one answer. `prompt_tail` is the end of the rendered prompt, which may open reasoning;
        `reasoning` False leaves thinking in the content; without `tools` the markup of calls stays content; `new_id`
        gives the id of a call by its index where the model gives none."""
        kind = self.parser_class
        if issubclass(kind, PlainParser):
            return kind()
        if issubclass(kind, HarmonyParser):
            return kind(tools=tools, prompt_tail=prompt_tail, reasoning=reasoning, new_id=new_id)
        return kind(
            tools=tools,
            prompt_tail=prompt_tail,
            reasoning=reasoning,
            new_id=new_id,
            opens_reasoning=self.opens_reasoning,
        )


PLAIN = AnswerFamily("plain", "content only", PlainParser)

# In the order in which marks are looked for: the most telling first.
_TABLE = (
    AnswerFamily(
        "gpt-oss",
        "harmony channels",
        HarmonyParser,
        frozenset(("gpt_oss",)),
        ("<|channel|>", "<|message|>"),
    ),
    AnswerFamily(
        "kimi-k2",
        "calls with ids in a section of JSON",
        KimiParser,
        frozenset(("kimi_k2", "kimi_k25")),
        ("<|tool_calls_section_begin|>",),
    ),
    AnswerFamily(
        "minimax-m2",
        "XML, several calls a section",
        MiniMaxParser,
        frozenset(("minimax", "minimax_m2")),
        ("<minimax:tool_call>",),
    ),
    AnswerFamily(
        "glm-4",
        "pairs of keys and values",
        GlmParser,
        frozenset(("glm4_moe", "glm4v_moe", "glm4_moe_lite", "glm_moe_dsa")),
        ("<arg_key>",),
    ),
    AnswerFamily(
        "qwen3-coder",
        "XML, one call a section",
        Qwen3CoderParser,
        frozenset(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_moe")),
        ("<function=", "<parameter="),
    ),
    AnswerFamily(
        "deepseek-r1",
        "JSON in a fence; answers begin inside reasoning",
        DeepSeekParser,
        frozenset(("deepseek_v3",)),
        ("<｜tool▁calls▁begin｜>", "```json", "</think>"),
        opens_reasoning=True,
    ),
    AnswerFamily(
        "deepseek-v3",
        "JSON in a fence",
        DeepSeekParser,
        frozenset(("deepseek_v3", "deepseek_v2")),
        ("<｜tool▁calls▁begin｜>", "```json"),
    ),
    AnswerFamily(
        "deepseek-v3.1",
        "JSON after the name",
        DeepSeekParser,
        frozenset(("deepseek_v3", "deepseek_v32")),
        ("<｜tool▁calls▁begin｜>",),
    ),
    AnswerFamily(
        "mistral",
        "a list of JSON objects, or name and JSON",
        MistralParser,
        frozenset(("mistral", "mistral3", "ministral", "ministral3", "mixtral", "pixtral", "voxtral")),
        ("[TOOL_CALLS]",),
    ),
    AnswerFamily(
        "llama3",
        "a JSON object, with or without a mark",
        LlamaParser,
        frozenset(("llama", "mllama")),
        ("<|python_tag|>",),
    ),
    AnswerFamily(
        "hermes",
        "JSON in tags",
        HermesParser,
        frozenset(),
        ("<tool_call>",),
    ),
    AnswerFamily(
        "qwen",
        "JSON in tags",
        HermesParser,
        frozenset(
            (
                "qwen2",
                "qwen2_moe",
                "qwen3",
                "qwen3_moe",
                "qwen3_next",
                "qwen2_vl",
                "qwen2_5_vl",
                "qwen3_vl",
                "qwen3_vl_moe",
            )
        ),
        ("<tool_call>",),
    ),
    PLAIN,
)

FAMILIES: Mapping[str, AnswerFamily] = MappingProxyType({family.name: family for family in _TABLE})
"""Families by the name that a configuration may give."""


def find_family(model_type: str, template: str) -> AnswerFamily:
    """Guesses the family of a checkpoint from the `model_type` of its config.json and its chat template.

    It is the first family of that model type whose marks the template has; else the first of any type whose marks it
    has (a model trained further with another format); else, for a template that shows no format of calls, the last
    family of the model type, which is its general one. `<think>` alone gives `hermes`, nothing at all `plain`.
    """
    marked = [family for family in _TABLE if family.marks and all(mark in template for mark in family.marks)]
    for family in marked:
        if model_type in family.model_types:
            return family
    if marked:
        return marked[0]
    for family in reversed(_TABLE):
        if model_type in family.model_types:
            return family
    return FAMILIES["hermes"] if "<think>" in template else PLAIN
