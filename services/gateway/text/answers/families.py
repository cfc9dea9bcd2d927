"""The families of models by how their answers are written: one table, chosen by a checkpoint's config.json and chat
template, or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.answers.grammar import (
    CallLayout,
    GrammarBuilder,
    add_calls,
    add_start,
    json_call,
    marked_call,
    tagged_call,
)
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
    layout: CallLayout | None = None
    """How calls are written where they are forced."""

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

    def call_grammar(
        self,
        tools: Sequence[ToolSpec],
        *,
        named: str | None,
        parallel: bool,
        required: bool,
        special: Mapping[str, int] = MappingProxyType({}),
        prompt_tail: str | None = None,
    ) -> str:
        """Returns a grammar in llguidance's Lark that forces calls of `tools` in this family's markup.

        `named`: calls of that tool only; `parallel`: several calls are allowed; not `required`: text without a call is
        allowed, too. `special` are the texts and ids of the tokenizer's special tokens: markers among them are forced
        as these tokens. `prompt_tail`: reasoning may come before, as this end of the prompt has it; None: it may not.
        Raises InvalidRequest when the family's calls, or a tool's schema in its markup, cannot be forced.
        """
        layout = self.layout
        if layout is None:
            raise InvalidRequest.of("tool_choice", named or "required", f"is not supported for {self.name} models")
        if self.parser_class is MistralParser and special and "[ARGS]" not in special:
            layout = _MISTRAL_LIST
        builder = GrammarBuilder(self.markers, special)
        add_calls(builder, layout, tools, named=named, parallel=parallel, required=required)
        self._add_start(builder, prompt_tail)
        return builder.finish()

    def grammar_after_reasoning(
        self, answer: str, *, prompt_tail: str | None, special: Mapping[str, int] = MappingProxyType({})
    ) -> str:
        """Returns a grammar of reasoning, as `prompt_tail` has it, and what `answer`, the body of a Lark rule, matches:
        for other structured output of models that reason. None: nothing comes before."""
        builder = GrammarBuilder(self.markers, special)
        builder.rule("answer", answer)
        self._add_start(builder, prompt_tail)
        return builder.finish()

    def reasons(self, template: str) -> bool:
        """Whether a model with this chat template may reason before it answers: the template knows the marks of it."""
        if issubclass(self.parser_class, MarkupParser):
            return self.opens_reasoning or any(mark in template for mark in self.parser_class.think)
        return self.parser_class is HarmonyParser

    def _add_start(self, builder: GrammarBuilder, prompt_tail: str | None) -> None:
        if self.parser_class is HarmonyParser and prompt_tail is not None:
            in_message = prompt_tail.endswith("<|message|>")
            add_start(
                builder,
                (("<|channel|>", "analysis", "<|message|>"), "<|end|>", ("<|start|>", "assistant")),
                opened=in_message and "analysis" in prompt_tail.rpartition("<|start|>")[2],
                may_open=not in_message,
            )
            return
        if prompt_tail is None or not issubclass(self.parser_class, MarkupParser):
            add_start(builder, None, opened=False, may_open=False)
            return
        think = self.parser_class.think
        tail = prompt_tail.rstrip()
        opened = tail.endswith(think[0]) or (self.opens_reasoning and not tail.endswith(think[1]))
        add_start(builder, (think[:1], think[1], ()), opened=opened, may_open=not tail.endswith(think[1]))


_TAGS = CallLayout(
    json_call('\n{"name": NAME, "arguments": ', "}\n"),
    begin=("<tool_call>",),
    between=("</tool_call>", "\n", "<tool_call>"),
    end=("</tool_call>",),
)
_FENCED = CallLayout(
    marked_call(
        ("<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>", "NAME\n```json\n"), ("\n```", "<｜tool▁call▁end｜>")
    ),
    begin=("<｜tool▁calls▁begin｜>",),
    between=("\n",),
    end=("<｜tool▁calls▁end｜>",),
)
_MISTRAL_LIST = CallLayout(
    json_call('{"name": NAME, "arguments": ', "}"), begin=("[TOOL_CALLS]", "["), between=(", ",), end=("]",)
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
        layout=CallLayout(
            marked_call(("commentary to=functions.NAME ", "<|constrain|>", "json", "<|message|>"), ()),
            begin=("<|channel|>",),
            text=("<|channel|>", "final", "<|message|>"),
            several=False,
        ),
    ),
    AnswerFamily(
        "kimi-k2",
        "calls with ids in a section of JSON",
        KimiParser,
        frozenset(("kimi_k2", "kimi_k25")),
        ("<|tool_calls_section_begin|>",),
        layout=CallLayout(
            marked_call(
                ("<|tool_call_begin|>", "functions.NAME:", "INDEX", "<|tool_call_argument_begin|>"),
                ("<|tool_call_end|>",),
            ),
            begin=("<|tool_calls_section_begin|>",),
            end=("<|tool_calls_section_end|>",),
        ),
    ),
    AnswerFamily(
        "minimax-m2",
        "XML, several calls a section",
        MiniMaxParser,
        frozenset(("minimax", "minimax_m2")),
        ("<minimax:tool_call>",),
        layout=CallLayout(
            tagged_call(
                ('\n<invoke name="NAME">\n',), ('<parameter name="KEY">',), "</parameter>", ("\n",), ("</invoke>\n",)
            ),
            begin=("<minimax:tool_call>",),
            end=("</minimax:tool_call>",),
        ),
    ),
    AnswerFamily(
        "glm-4",
        "pairs of keys and values",
        GlmParser,
        frozenset(("glm4_moe", "glm4v_moe", "glm4_moe_lite", "glm_moe_dsa")),
        ("<arg_key>",),
        layout=CallLayout(
            tagged_call(
                ("NAME\n",), ("<arg_key>", "KEY", "</arg_key>", "\n", "<arg_value>"), "</arg_value>", ("\n",), ()
            ),
            begin=("<tool_call>",),
            between=("</tool_call>", "\n", "<tool_call>"),
            end=("</tool_call>",),
        ),
    ),
    AnswerFamily(
        "qwen3-coder",
        "XML, one call a section",
        Qwen3CoderParser,
        frozenset(("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_moe")),
        ("<function=", "<parameter="),
        layout=CallLayout(
            tagged_call(
                ("\n<function=NAME>\n",),
                ("<parameter=KEY>\n",),
                "\n</parameter>",
                ("\n",),
                ("</function>\n",),
            ),
            begin=("<tool_call>",),
            between=("</tool_call>", "\n", "<tool_call>"),
            end=("</tool_call>",),
        ),
    ),
    AnswerFamily(
        "deepseek-r1",
        "JSON in a fence; answers begin inside reasoning",
        DeepSeekParser,
        frozenset(("deepseek_v3",)),
        ("<｜tool▁calls▁begin｜>", "```json", "</think>"),
        opens_reasoning=True,
        layout=_FENCED,
    ),
    AnswerFamily(
        "deepseek-v3",
        "JSON in a fence",
        DeepSeekParser,
        frozenset(("deepseek_v3", "deepseek_v2")),
        ("<｜tool▁calls▁begin｜>", "```json"),
        layout=_FENCED,
    ),
    AnswerFamily(
        "deepseek-v3.1",
        "JSON after the name",
        DeepSeekParser,
        frozenset(("deepseek_v3", "deepseek_v32")),
        ("<｜tool▁calls▁begin｜>",),
        layout=CallLayout(
            marked_call(("<｜tool▁call▁begin｜>", "NAME", "<｜tool▁sep｜>"), ("<｜tool▁call▁end｜>",)),
            begin=("<｜tool▁calls▁begin｜>",),
            end=("<｜tool▁calls▁end｜>",),
        ),
    ),
    AnswerFamily(
        "mistral",
        "a list of JSON objects, or name and JSON",
        MistralParser,
        frozenset(("mistral", "mistral3", "ministral", "ministral3", "mixtral", "pixtral", "voxtral")),
        ("[TOOL_CALLS]",),
        layout=CallLayout(marked_call(("NAME", "[ARGS]"), ()), begin=("[TOOL_CALLS]",), between=("[TOOL_CALLS]",)),
    ),
    AnswerFamily(
        "llama3",
        "a JSON object, with or without a mark",
        LlamaParser,
        frozenset(("llama", "mllama")),
        ("<|python_tag|>",),
        layout=CallLayout(json_call('{"name": NAME, "parameters": ', "}"), between=("; ",)),
    ),
    AnswerFamily(
        "hermes",
        "JSON in tags",
        HermesParser,
        frozenset(),
        ("<tool_call>",),
        layout=_TAGS,
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
        layout=_TAGS,
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
