"""Answers as models of each family write them, after the formats' documentation, and what they say."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tests.gateway.answers.support import Answer


@dataclass(frozen=True)
class Transcript:
    name: str
    family: str
    text: str
    expected: Answer
    options: dict[str, Any] = field(default_factory=dict)


# As a model would write it: nested, escapes, braces and markup in strings, non-ASCII.
RICH = (
    '{"city": "K\\u00f6ln \\"am Rhein\\" 🌧️", "where": {"lat": 50.9, "tags": [["}", "]"], {}]}, '
    '"note": "</tool_call> {<tool_call> \\\\"}'
)
SHORT = '{"path":"a/b.txt","text":""}'
THINKS = 'I should ask <tool_call>{"name": "no"}</tool_call>.\n\nTwice {or} so.'


def two_calls(first: str = RICH, second: str = SHORT, ids: tuple[str, str] = ("call-0", "call-1")) -> Answer:
    return Answer("Let me look: 東京 & Köln.", THINKS, [(ids[0], "get_weather", first), (ids[1], "write_file", second)])


def hermes_like() -> list[Transcript]:
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {RICH}}}\n</tool_call>'
    second = f'<tool_call>\n{{"name": "write_file", "arguments": {SHORT}}}\n</tool_call>'
    whole = f"<think>\n{THINKS}\n</think>\n\nLet me look: 東京 & Köln.\n{call}\n{second}"
    found = []
    for family in ("qwen", "hermes"):
        found += [
            Transcript(f"{family}: reasoning, content, two calls", family, whole, two_calls()),
            Transcript(
                f"{family}: the prompt opens reasoning",
                family,
                whole.removeprefix("<think>"),
                two_calls(),
                {"tail": "<|im_start|>assistant\n<think>\n"},
            ),
        ]
    return [
        *found,
        Transcript("qwen: no tools", "qwen", f"Hi\n{call}\n", Answer(f"Hi\n{call}\n"), {"tools": ()}),
        Transcript(
            "qwen: reasoning stays in the content",
            "qwen",
            f"<think>\nhm\n</think>\n\nHi\n{call}",
            Answer("<think>\nhm\n</think>\n\nHi", "", [("call-0", "get_weather", RICH)]),
            {"reasoning": False},
        ),
        Transcript(
            "qwen: no thinking in the prompt",
            "qwen",
            "<think> is a tag",
            Answer("<think> is a tag"),
            {"tail": "<think>\n\n</think>\n\n"},
        ),
        Transcript("qwen: thinking cut off", "qwen", "<think>\na\n b \n", Answer("", "a\n b \n")),
        Transcript("qwen: a mark inside the text", "qwen", "say <think>x</think>", Answer("say <think>x</think>")),
        Transcript(
            "qwen: text after a call",
            "qwen",
            f"A \n{second}\n B\n{call} \n",
            Answer("A \n\n B", "", [("call-0", "write_file", SHORT), ("call-1", "get_weather", RICH)]),
        ),
        Transcript(
            "qwen: arguments before the name, other keys, a brace too many, unknown tool",
            "qwen",
            f'<tool_call>{{"arguments": {RICH}, "why": ["x", {{"y": null}}], "n": -1.5, "name": "nobody"}}}}'
            "</tool_call>",
            Answer("", "", [("call-0", "nobody", RICH)]),
        ),
        Transcript(
            "qwen: arguments as a string, no arguments, null",
            "qwen",
            f'<tool_call>{{"name": "write_file", "arguments": {json.dumps(RICH)}}}</tool_call>'
            '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b", "arguments": null}</tool_call>',
            Answer("", "", [("call-0", "write_file", RICH), ("call-1", "a", "{}"), ("call-2", "b", "{}")]),
        ),
        Transcript(
            "qwen: arguments cut off",
            "qwen",
            '<tool_call>\n{"name": "a", "arguments": {"b": "c \\',
            Answer("", "", [("call-0", "a", '{"b": "c \\')]),
        ),
        Transcript(
            "qwen: arguments not closed",
            "qwen",
            '<tool_call>\n{"name": "a", "arguments": {"b": [1, <2}\n</tool_call> then',
            Answer("then", "", [("call-0", "a", '{"b": [1, <2}\n')]),
        ),
        Transcript(
            "qwen: cut off before the arguments",
            "qwen",
            'Hi <tool_call>\n{"name": "a", "argum',
            Answer('Hi <tool_call>\n{"name": "a", "argum'),
        ),
        Transcript(
            "qwen: malformed, then well",
            "qwen",
            "<tool_call>oops</tool_call> <tool_call>{'name': 1} <tool_call>[] "
            '<tool_call>{"name": "x", "arguments": 3}'
            f" <tool_call {second} </tool_call>",
            Answer(
                "<tool_call>oops</tool_call> <tool_call>{'name': 1} <tool_call>[] "
                '<tool_call>{"name": "x", "arguments": 3} <tool_call  </tool_call>',
                "",
                [("call-0", "write_file", SHORT)],
            ),
        ),
        Transcript("qwen: a beginning of a marker at the end", "qwen", "a < b <tool_c", Answer("a < b <tool_c")),
        Transcript("qwen: only text", "qwen", " \n a <b>\n\n c \n", Answer(" \n a <b>\n\n c \n")),
        Transcript(
            "qwen: much space",
            "qwen",
            "a" + " " * 3000 + second,
            Answer("a" + " " * 2048, "", [("call-0", "write_file", SHORT)]),
        ),
    ]


def coder() -> list[Transcript]:
    text = '<a href="x">{1}</parameter> not the end\n\\n ü\n<parameter=x>\n</tool_call>'
    call = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=metric>\nTrue\n</parameter>\n<parameter=where>\n{"lat": [1.50, {"a": "}"}]}\n</parameter>\n'
        "<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>"
    )
    weather = '{"city": "Köln", "days": 3, "metric": true, "where": {"lat": [1.50, {"a": "}"}]}, "note": null}'
    write = (
        "<tool_call>\n<function=write_file>\n<parameter=path>\n\n a \n\n</parameter>\n"
        f"<parameter=text>\n{text}\n</parameter>\n"
        "<parameter=lines>\n['it', 2]\n</parameter>\n</function>\n</tool_call>"
    )
    written = '{"path": "\\n a \\n", "text": ' + json.dumps(text, ensure_ascii=False) + ', "lines": ["it", 2]}'
    return [
        Transcript(
            "qwen3-coder: reasoning, content, two calls",
            "qwen3-coder",
            f"<think>\n{THINKS}\n</think>\n\nLet me look: 東京 & Köln.\n\n{call}\n{write}\n",
            two_calls(weather, written),
        ),
        Transcript(
            "qwen3-coder: no outer tag, nothing given, two functions in one tag",
            "qwen3-coder",
            "<function=get_weather>\n</function>\n</tool_call>\n"
            "<tool_call><function=a></function><function=b><parameter=c>007</parameter><parameter=d>7</parameter></function></tool_call>",
            Answer(
                "",
                "",
                [("call-0", "get_weather", "{}"), ("call-1", "a", "{}"), ("call-2", "b", '{"c": "007", "d": 7}')],
            ),
        ),
        Transcript(
            "qwen3-coder: closing tags left out",
            "qwen3-coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n",
            Answer("", "", [("call-0", "get_weather", '{"city": "Bonn"}')]),
        ),
        Transcript(
            "qwen3-coder: cut off in a string",
            "qwen3-coder",
            '<tool_call>\n<function=get_weather>\n<parameter=city>\nBo"n\n</para',
            Answer("", "", [("call-0", "get_weather", '{"city": "Bo\\"n\\n</para')]),
        ),
        Transcript(
            "qwen3-coder: malformed",
            "qwen3-coder",
            "<tool_call>\n<func a <function=>x <function=\n>",
            Answer("<tool_call>\n<func a <function=>x <function=\n>"),
        ),
    ]


def glm() -> list[Transcript]:
    text = '</arg_value> is a tag, "x"\n<tool_call>'
    call = (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>3</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"lat": {}}</arg_value>\n</tool_call>'
    )
    write = (
        "<tool_call>write_file<arg_key>path</arg_key><arg_value> a\n</arg_value><arg_key>text</arg_key>"
        f"<arg_value>{text}</arg_value></tool_call>"
    )
    return [
        Transcript(
            "glm-4: reasoning, content, two calls",
            "glm-4",
            f"\n<think>{THINKS}</think>\nLet me look: 東京 & Köln.\n{call}\n{write}",
            two_calls(
                '{"city": "Köln", "days": 3, "where": {"lat": {}}}',
                '{"path": " a\\n", "text": ' + json.dumps(text, ensure_ascii=False) + "}",
            ),
        ),
        Transcript(
            "glm-4: no arguments, an empty string",
            "glm-4",
            "<tool_call>now</tool_call><tool_call>get_weather<arg_key>city</arg_key><arg_value></arg_value></tool_call>",
            Answer("", "", [("call-0", "now", "{}"), ("call-1", "get_weather", '{"city": ""}')]),
        ),
        Transcript(
            "glm-4: cut off in a number",
            "glm-4",
            "<tool_call>get_weather<arg_key>days</arg_key><arg_value>12",
            Answer("", "", [("call-0", "get_weather", '{"days": 12')]),
        ),
        Transcript(
            "glm-4: malformed",
            "glm-4",
            'a <tool_call>{"name": 1} <tool_call>two\nlines</tool_call>',
            Answer('a <tool_call>{"name": 1} <tool_call>two\nlines</tool_call>'),
        ),
    ]


def minimax() -> list[Transcript]:
    text = '<invoke name="x">\n<parameter name="y">\n</parameter>\nz'
    section = (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln "am" Rhein</parameter>\n'
        '<parameter name="days">3.0</parameter>\n</invoke>\n<invoke name="write_file">\n'
        f'<parameter name="path">a</parameter><parameter name="text">{text}</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    )
    return [
        Transcript(
            "minimax-m2: reasoning, content, two calls",
            "minimax-m2",
            f"{THINKS}\n</think>\n\nLet me look: 東京 & Köln.\n{section}",
            two_calls('{"city": "Köln \\"am\\" Rhein", "days": 3}', '{"path": "a", "text": ' + json.dumps(text) + "}"),
            {"tail": "]~b]ai\n<think>\n"},
        ),
        Transcript(
            "minimax-m2: malformed",
            "minimax-m2",
            "<minimax:tool_call>\n<tool_name>x</tool_name>",
            Answer("<minimax:tool_call>\n<tool_name>x</tool_name>"),
        ),
    ]


def llama() -> list[Transcript]:
    one = f'{{"name": "get_weather", "parameters": {RICH}}}'
    two = f'{{"type": "function", "name": "write_file", "parameters": {SHORT}}}'
    calls = [("call-0", "get_weather", RICH), ("call-1", "write_file", SHORT)]
    return [
        Transcript("llama3: two calls", "llama3", f"{one}; {two}", Answer("", "", calls)),
        Transcript("llama3: two calls after the mark", "llama3", f"<|python_tag|>{one}; {two}", Answer("", "", calls)),
        Transcript(
            "llama3: content, two marks",
            "llama3",
            f"Let me see.\n<|python_tag|>{one}\n<|python_tag|>{two}\n",
            Answer("Let me see.", "", calls),
        ),
        Transcript(
            "llama3: reasoning, a call, then text",
            "llama3",
            f"<think>{THINKS}</think>\n{one}; done {{x}}",
            Answer("; done {x}", THINKS, calls[:1]),
        ),
        Transcript(
            "llama3: JSON that is no call",
            "llama3",
            '{"name": "Bob", "age": {"name": 3}}; {"a": 1}',
            Answer('{"name": "Bob", "age": {"name": 3}}; {"a": 1}'),
        ),
        Transcript("llama3: a call in the text is text", "llama3", f"It is {one}", Answer(f"It is {one}")),
        Transcript(
            "llama3: a built-in tool",
            "llama3",
            'Hm <|python_tag|>brave_search.call(query="x")',
            Answer('Hm <|python_tag|>brave_search.call(query="x")'),
        ),
        Transcript("llama3: cut off", "llama3", ' {"name": "get_', Answer(' {"name": "get_')),
        Transcript(
            "llama3: cut off in the arguments",
            "llama3",
            '{"name": "get_weather", "parameters": {"city": "B',
            Answer("", "", [("call-0", "get_weather", '{"city": "B')]),
        ),
    ]


def mistral() -> list[Transcript]:
    listed = (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {RICH}}}, '
        f'{{"name": "write_file", "arguments": {SHORT}, "id": "abcdefghi"}}]'
    )
    named = f"[TOOL_CALLS]get_weather[ARGS]{RICH}[TOOL_CALLS]write_file[CALL_ID]abc123XYZ[ARGS]{SHORT}"
    return [
        Transcript(
            "mistral: reasoning, content, a list",
            "mistral",
            f"[THINK]{THINKS}[/THINK]Let me look: 東京 & Köln.{listed}",
            two_calls(),
        ),
        Transcript(
            "mistral: reasoning, content, names",
            "mistral",
            f"[THINK]{THINKS}[/THINK]Let me look: 東京 & Köln.{named}",
            two_calls(ids=("call-0", "abc123XYZ")),
        ),
        Transcript(
            "mistral: a call ends reasoning",
            "mistral",
            f"[THINK]hm [TOOL_CALLS]write_file{SHORT}",
            Answer("", "hm", [("call-0", "write_file", SHORT)]),
        ),
        Transcript(
            "mistral: malformed",
            "mistral",
            "a [1] [TOOL_CALLS] [1, 2] [TOOL_CALLS]what? [TOOL",
            Answer("a [1] [TOOL_CALLS] [1, 2] [TOOL_CALLS]what? [TOOL"),
        ),
        Transcript(
            "mistral: the second of a list is malformed",
            "mistral",
            f'[TOOL_CALLS][{{"name": "write_file", "arguments": {SHORT}}}, "x"]',
            Answer(', "x"]', "", [("call-0", "write_file", SHORT)]),
        ),
    ]


def deepseek() -> list[Transcript]:
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call, call_end, sep = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    fenced = (
        f"{begin}{call}function{sep}get_weather\n```json\n{RICH}\n```{call_end}\n"
        f"{call}function{sep}write_file\n```json\n{SHORT}\n```{call_end}{end}"
    )
    bare = f"{begin}{call}get_weather{sep}{RICH}{call_end}{call}write_file{sep}{SHORT}{call_end}{end}"
    content = "Let me look: 東京 & Köln."
    return [
        Transcript(
            "deepseek-v3: reasoning, content, two calls",
            "deepseek-v3",
            f"<think>\n{THINKS}\n</think>\n\n{content}{fenced}",
            two_calls(),
        ),
        Transcript("deepseek-r1: no opener", "deepseek-r1", f"{THINKS}\n</think>\n\n{content}\n{fenced}", two_calls()),
        Transcript(
            "deepseek-r1: an opener", "deepseek-r1", f"<think>\n{THINKS}\n</think>\n\n{content}{fenced}", two_calls()
        ),
        Transcript(
            "deepseek-v3.1: the prompt opens reasoning",
            "deepseek-v3.1",
            f"{THINKS}</think>{content}{bare}",
            two_calls(),
            {"tail": "<｜Assistant｜><think>"},
        ),
        Transcript(
            "deepseek-v3.1: no thinking",
            "deepseek-v3.1",
            f"{content}{bare}",
            Answer(content, "", two_calls().calls),
            {"tail": "<｜Assistant｜></think>"},
        ),
        Transcript(
            "deepseek-v3.1: a tool called function, not closed",
            "deepseek-v3.1",
            f'{begin}{call}function{sep}{{"a": <{call_end}{end} x',
            Answer("x", "", [("call-0", "function", '{"a": <')]),
        ),
        Transcript(
            "deepseek-v3.1: malformed",
            "deepseek-v3.1",
            f"{begin}x {call}\n {begin}{end}",
            Answer(f"{begin}x {call}\n {begin}{end}"),
        ),
    ]


def kimi() -> list[Transcript]:
    section = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{RICH}<|tool_call_end|><|tool_call_begin|>functions.write_file:1<|tool_call_argument_begin|>"
        f"{SHORT}<|tool_call_end|><|tool_calls_section_end|>"
    )
    ids = ("functions.get_weather:0", "functions.write_file:1")
    return [
        Transcript(
            "kimi-k2: reasoning, content, two calls",
            "kimi-k2",
            f"<think>{THINKS}</think>Let me look: 東京 & Köln. {section}",
            two_calls(ids=ids),
        ),
        Transcript(
            "kimi-k2: a call ends reasoning",
            "kimi-k2",
            f"{THINKS} {section}",
            Answer("", THINKS, two_calls(ids=ids).calls),
            {"tail": "<|im_middle|><think>"},
        ),
        Transcript(
            "kimi-k2: no number, no section",
            "kimi-k2",
            f"<|tool_call_begin|> functions.a.b <|tool_call_argument_begin|> {SHORT} <|tool_call_end|> x",
            Answer("x", "", [("call-0", "a.b", SHORT)]),
        ),
        Transcript(
            "kimi-k2: malformed",
            "kimi-k2",
            "<|tool_calls_section_begin|> <|tool_call_begin|>a b<|tool_call_end|><|tool",
            Answer("<|tool_calls_section_begin|> <|tool_call_begin|>a b<|tool_call_end|><|tool"),
        ),
    ]


def gpt_oss() -> list[Transcript]:
    tail = {"tail": "<|start|>user<|message|>hi<|end|><|start|>assistant"}
    first = (
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{RICH}<|call|>"
    )
    second = f"<|start|>assistant to=functions.write_file<|channel|>commentary json<|message|>{SHORT}<|call|>"
    analysis = f"<|channel|>analysis<|message|>{THINKS}<|end|>"
    preamble = "<|start|>assistant<|channel|>commentary<|message|>Let me look: 東京 & Köln.<|end|>"
    return [
        Transcript(
            "gpt-oss: reasoning, content, two calls", "gpt-oss", analysis + preamble + first + second, two_calls(), tail
        ),
        Transcript(
            "gpt-oss: an answer",
            "gpt-oss",
            f"{analysis}{preamble}<|start|>assistant<|channel|>final<|message|>It rains.<|return|>",
            Answer("Let me look: 東京 & Köln.\n\nIt rains.", THINKS),
            tail,
        ),
        Transcript(
            "gpt-oss: a recipient first",
            "gpt-oss",
            f" to=functions.write_file<|channel|>commentary <|constrain|>json<|message|>{SHORT}",
            Answer("", "", [("call-0", "write_file", SHORT)]),
            tail,
        ),
        Transcript(
            "gpt-oss: no tools",
            "gpt-oss",
            analysis + first,
            Answer(first, THINKS),
            tail | {"tools": ()},
        ),
        Transcript(
            "gpt-oss: reasoning stays in the content",
            "gpt-oss",
            f"{analysis}<|start|>assistant<|channel|>final<|message|>Yes",
            Answer(f"{THINKS}\n\nYes"),
            tail | {"reasoning": False},
        ),
        Transcript(
            "gpt-oss: the prompt begins the message",
            "gpt-oss",
            "es, it rains.",
            Answer("es, it rains."),
            {"tail": "<|end|><|start|>assistant<|channel|>final<|message|>"},
        ),
        Transcript(
            "gpt-oss: the prompt begins reasoning",
            "gpt-oss",
            "hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            Answer("Yes", "hm"),
            {"tail": "<|start|>assistant<|channel|>analysis<|message|>"},
        ),
        Transcript("gpt-oss: no markers", "gpt-oss", "Just text <|x", Answer("Just text <|x"), tail),
        Transcript(
            "gpt-oss: no arguments; code for a built-in tool",
            "gpt-oss",
            "<|channel|>commentary to=functions.now<|message|><|call|>"
            "<|start|>assistant<|channel|>analysis to=python code<|message|>print(1)<|call|>",
            Answer(
                "<|start|>assistant<|channel|>analysis to=python code<|message|>print(1)<|call|>",
                "",
                [("call-0", "now", "{}")],
            ),
            tail,
        ),
        Transcript(
            "gpt-oss: a header that is none", "gpt-oss", "<|channel|>fin<|end|>x", Answer("<|channel|>finx"), tail
        ),
    ]


def plain() -> list[Transcript]:
    text = f"<think>\nx</think> <tool_call>{RICH}</tool_call> \n"
    return [Transcript("plain", "plain", text, Answer(text))]


TRANSCRIPTS = [
    *hermes_like(),
    *coder(),
    *glm(),
    *minimax(),
    *llama(),
    *mistral(),
    *deepseek(),
    *kimi(),
    *gpt_oss(),
    *plain(),
]
