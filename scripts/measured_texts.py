"""Texts to measure speculation on, made from a seed: chats about code, small talk, and rollouts of sums.

The three kinds differ in how much of an answer its past tells. An answer of code repeats names and whole lines of the
request and of itself; one of small talk is sentences of parts that are drawn freely; a rollout works a sum out step by
step in one form, so that the form can be told and the numbers have to be computed. Chats of even seeds are trained on,
those of odd seeds are held out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping

from scripts.demo_corpus import Message

CLASSES = ("Order", "User", "Ticket", "Sensor", "Route", "Invoice", "Player", "Recipe", "Device", "Account", "Report",
           "Job", "Parcel", "Lesson", "Market", "Window")  # fmt: skip
FIELDS = ("name", "total", "city", "price", "count", "state", "owner", "color", "size", "level", "email", "score",
          "weight", "limit", "speed", "title", "start", "end", "rate", "code")  # fmt: skip
VERBS = ("load", "find", "make", "check", "send", "merge", "count", "sort", "keep", "update")
NUMBERS = ("0", "1", "2", "5", "10", "100")

TOPICS = ("a garden", "a long walk", "an old bicycle", "fresh bread", "a small boat", "a noisy engine", "a new school",
          "the night train", "a cold winter", "a quiet library", "green tea", "a stone bridge")  # fmt: skip
OPENINGS = ("That is a good question.", "Many people ask this.", "Let me think about it.", "It depends a little.",
            "There are several ways.", "In short, yes.", "I would be careful here.")  # fmt: skip
SUBJECTS = ("you", "most people", "my neighbour", "a friend of mine", "the experts", "some of us", "everyone")
ADVICE = ("should take more time for", "often forget about", "can learn a lot from", "rarely talk about",
          "would start with", "pay too much for", "need a better plan for", "still believe in")  # fmt: skip
THINGS = ("the weather", "good tools", "warm clothes", "the first step", "a clear map", "fresh water", "the old rules",
          "a second opinion", "the morning light", "honest advice", "a bit of luck", "the price of wood")  # fmt: skip
REASONS = ("because it saves trouble later", "since nothing else works as well", "even if it costs a little more",
           "although it takes a few days", "so that nobody is surprised", "before the season is over",
           "while the days are long", "as long as the weather holds")  # fmt: skip
CLOSINGS = ("Good luck with it!", "Tell me how it goes.", "I hope that this helps.", "Ask again if it does not work.",
            "Enjoy every minute of it.")  # fmt: skip


def _code(rng: random.Random) -> list[Message]:
    return (_class, _rename, _functions)[rng.randrange(3)](rng)


def _class(rng: random.Random) -> list[Message]:
    name, fields = rng.choice(CLASSES), rng.sample(FIELDS, rng.randint(3, 6))
    ask = f"Write a class {name} with {', '.join(fields)}."
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": _class_text(name, fields)}]


def _class_text(name: str, fields: list[str]) -> str:
    lines = [f"class {name}:", f"    def __init__(self, {', '.join(fields)}):"]
    lines += [f"        self.{field} = {field}" for field in fields]
    lines += ["", "    def to_dict(self):", "        return {"]
    lines += [f'            "{field}": self.{field},' for field in fields]
    lines += ["        }", "", "    @classmethod", "    def from_dict(cls, data):", f"        return {name}("]
    lines += [f'            data["{field}"],' for field in fields]
    lines += ["        )"]
    for field in fields:
        lines += ["", f"    def set_{field}(self, {field}):", f"        self.{field} = {field}", "        return self"]
    return "\n".join(lines) + "\n"


def _rename(rng: random.Random) -> list[Message]:
    name, fields = rng.choice(CLASSES), rng.sample(FIELDS, rng.randint(3, 4))
    new = rng.choice([field for field in FIELDS if field not in fields])
    at = rng.randrange(len(fields))
    ask = f"Rename {fields[at]} to {new}:\n{_class_text(name, fields)}"
    fields[at] = new
    return [{"role": "user", "content": ask}, {"role": "assistant", "content": _class_text(name, fields)}]


def _functions(rng: random.Random) -> list[Message]:
    name, count = rng.choice(CLASSES).lower(), rng.randint(2, 4)
    fields, verbs = rng.sample(FIELDS, count), rng.sample(VERBS, count)
    ask = f"Write functions for a list of {name}s: " + ", ".join(
        f"{verb} by {field}" for verb, field in zip(verbs, fields, strict=True)
    )
    lines = []
    for verb, field in zip(verbs, fields, strict=True):
        lines += [
            f"def {verb}_by_{field}({name}s, {field}):",
            "    result = []",
            f"    for {name} in {name}s:",
            f"        if {name}.{field} {rng.choice(('==', '>', '<'))} {field}:",
            f"            result.append({name})",
            f"    if len(result) > {rng.choice(NUMBERS)}:",
            f'        print("{verb}", len(result), "{name}s by {field}")',
            "    return result",
            "",
        ]
    return [{"role": "user", "content": ask + "."}, {"role": "assistant", "content": "\n".join(lines)}]


def _chat(rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        topic = rng.choice(TOPICS)
        asks = (f"What do you think of {topic}?", f"Can you tell me about {topic}?", f"Do I need {topic}?")
        said = [rng.choice(OPENINGS)]
        for _ in range(rng.randint(3, 7)):
            subject = rng.choice(SUBJECTS)
            said.append(f"{subject[0].upper()}{subject[1:]} {rng.choice(ADVICE)} {_thing(rng, topic)} "
                        f"{rng.choice(REASONS)}.")  # fmt: skip
        said.append(rng.choice(CLOSINGS))
        messages.append({"role": "user", "content": rng.choice(asks)})
        messages.append({"role": "assistant", "content": " ".join(said)})
    return messages


def _thing(rng: random.Random, topic: str) -> str:
    return topic if rng.random() < 0.3 else rng.choice(THINGS)


def _rollout(rng: random.Random) -> list[Message]:
    start = value = rng.randrange(10, 50)
    terms, steps = [str(value)], []
    for step in range(1, rng.randint(4, 9)):
        number = rng.randrange(1, 20)
        plus = rng.random() < 0.5 or value < number
        result = value + number if plus else value - number
        sign = "+" if plus else "-"
        terms.append(f"{sign} {number}")
        steps.append(f"Step {step}: I take {value} and then {sign} {number}: {value} {sign} {number} = {result}.")
        value = result
    said = [f"I start with {start}.", *steps, f"I checked all {len(steps)} steps.", f"The answer is {value}."]
    return [
        {"role": "user", "content": f"How much is {' '.join(terms)}?"},
        {"role": "assistant", "content": "\n".join(said)},
    ]


KINDS: Mapping[str, Callable[[random.Random], list[Message]]] = {"code": _code, "chat": _chat, "rollout": _rollout}


def chat_of(kind: str, seed: int) -> list[Message]:
    """Returns one chat of that kind, the answers included."""
    return KINDS[kind](random.Random(f"{kind}/{seed}"))


def held_out(kind: str, count: int) -> list[list[Message]]:
    """Returns chats that nothing was trained on; what is measured is the last answer, from the messages before it."""
    return [chat_of(kind, 2 * index + 1) for index in range(count)]


def trained_on(rng: random.Random) -> list[Message]:
    """Returns a chat of any kind to train on."""
    return chat_of(rng.choice(tuple(KINDS)), 2 * rng.randrange(1 << 40))


def tokenizer_text(seed: int, count: int = 600) -> Iterator[str]:
    """Yields the texts that the tokenizer is trained on."""
    rng = random.Random(f"tokenizer/{seed}")
    for _ in range(count):
        yield from (message["content"] for message in trained_on(rng))
