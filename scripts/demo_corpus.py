"""Synthetic text for the demo checkpoint: facts, questions on them, and whole chats.

Everything here is a pure function of its seed, so that the training script, the tests and
the benchmarks of other folders see the same text. A fact ties a value to a name under one of
five relations; each (name, relation) pair occurs once in a context, so the answer is in one
place of the KV cache only. One eighth of all (relation, name, value) combinations is never
used in training: :func:`facts` draws from it with ``held_out=True``, and :func:`heldout`
builds whole evaluation chats from it.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

Message = dict[str, str]


def _words(text: str) -> list[str]:
    """Split a list that is written as text, one short word after the other."""
    return text.split()


NAMES = _words("""
Ada Agnes Albert Alma Anna Anton Arno Astrid Axel Bela Berta Bianca Boris Bruno Carla Carlo Cora Cyril Dana
Daria David Dora Edgar Edith Elena Elias Elsa Emil Emma Enzo Erik Eva Felix Fiona Flora Frank Frida Greta
Gustav Hanna Hector Heidi Helga Henri Hugo Ida Igor Ilse Ines Irma Ivan Jakob Jana Jonas Julia Karl Kira
Klara Lars Lena Leo Lina Lola Lucas Luisa Magda Maja Marco Maria Mira Nadia Nils Nina Nora Olga Omar Oskar
Otto Paula Pavel Petra Rafael Rita Robin Rosa Ruben Sara Simon Sofia Stella Tara Theo Tilda Ursula Vera
Viktor Wanda Yuri Zelda
""")

TOWNS = _words("""
Aachen Bergen Berlin Bern Bilbao Bologna Bonn Boston Bremen Bristol Bruges Calais Cardiff Cologne Cork Cusco
Dallas Dover Dresden Dublin Essen Exeter Faro Florence Geneva Genoa Ghent Glasgow Graz Hamburg Hanoi Havana
Houston Jaipur Kiel Kyoto Leeds Leiden Lille Lima Linz Lisbon Lugano Luxor Malmo Milan Munich Nantes Naples
Narvik Nice Odense Oporto Oslo Oxford Palermo Paris Perth Pisa Prague Reims Riga Rome Rouen Salem Seoul
Seville Siena Split Sydney Tokyo Trieste Turin Ulm Utrecht Venice Vienna Warsaw Zagreb Zurich
""")

PLACES = _words("""
attic bakery balcony barn basement bathroom bedroom cabin canteen cellar chapel closet corridor cottage
courtyard den dormitory drawer dungeon foyer gallery garage garden gazebo greenhouse hallway hangar hut kennel
kitchen laboratory larder laundry library lobby loft mill museum nursery office orchard pantry parlour
pavilion porch quarry sauna shed stable storeroom studio study tavern temple tent terrace theatre tower trunk
tunnel vault wardrobe warehouse workshop
""")

PETS = _words("""
bat beaver bison buffalo camel canary cat cobra cow coyote crab crane cricket deer dingo dolphin donkey duck
falcon ferret finch fox frog gecko gibbon giraffe goat goose gorilla hare hedgehog heron horse jackal jaguar
kitten koala lamb lemur leopard lion lizard lynx magpie marmot mole monkey mouse mule newt panda panther
parrot pheasant pig pigeon pony puffin puma puppy quail raven salmon seal shark sheep skunk sloth snail
sparrow spider squid swan tiger toad tortoise trout turkey turtle viper vulture walrus weasel wolf wombat
zebra
""")

DISHES = _words("""
almonds bacon bananas beans beets berries biscuits bread broccoli cabbage cake celery cereal cherries
chocolate coconut cookies corn couscous crackers cream curry fennel figs fudge ginger grapes ham hazelnuts
honey jam jelly kiwis leeks lemons lettuce mangos melons millet mustard nougat nuts oats olives onions
pancakes papayas parsley pasta peaches pears peas pepper pesto pickles pies pizza porridge potatoes pretzels
pudding pumpkin quinoa radishes raisins salad sauce sausages sorbet soup spinach squash tacos tomatoes
truffles turnips waffles walnuts yogurt
""")

COLOURS = _words("amber beige black blue brown gold green grey ivory orange pink purple red silver violet white")

OBJECTS = _words("""
anchor axe bag ball basket bell book boot bottle bowl box brush bucket candle chair clock coat coin comb
compass crown cup drum fan flag flute hammer hat jar kettle key kite ladder lamp lantern map mask medal mirror
mug needle pencil pillow plate ring rope scarf shield spoon stamp statue sword ticket umbrella vase violin
""")

FILLERS = (
    "The rain stopped before noon.", "Nothing else was written on that page.", "It was a quiet week.",
    "The clerk closed the window.", "Some of the ink has faded.", "The meeting ended early.",
    "The train was late again.", "This list is checked every month.", "The wind came from the north.",
    "All of this was noted by hand.", "The next entry is from the same day.", "The lights went out at ten.",
)  # fmt: skip

SYSTEMS = (
    "You are a careful clerk.", "You are a helpful assistant.", "Answer in one short sentence.",
    "You answer questions about the notes of the user.", "Be brief and exact.",
)  # fmt: skip

INTROS = (
    "", "Here are my notes.", "Read these notes.", "Please remember the following.", "Some facts first.",
    "These are the facts:", "Notes of the day:",
)  # fmt: skip

GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hello, who are you?", "Good morning!", "Who are you?", "Help")
GREETING_REPLY = "Hello! Tell me some facts and I will answer questions about them."
NOTED_REPLY = "Noted."
THANKS = ("Thanks.", "Thank you.", "Thanks!", "Thank you!")
THANKS_REPLY = "You are welcome."


class _Relation(NamedTuple):
    """How one relation is told, asked and answered; ``{n}`` name, ``{t}`` thing, ``{v}`` value."""

    told: tuple[str, ...]
    asked: tuple[str, ...]
    answered: str
    values: list[str]


# The name (or the thing) stands two or three tokens before the value, in every wording: a model this
# small learns to look a value up by what stands there within minutes, and by looser forms far slower.
RELATIONS: dict[str, _Relation] = {
    "code": _Relation(
        ("The code of {n} is {v}.", "And the code of {n} is {v}.", "The secret code of {n} is {v}."),
        ("What is the code of {n}?", "Which code does {n} have?", "Tell me the code of {n}."),
        "The code of {n} is {v}.",
        [],
    ),
    "thing": _Relation(
        ("{n} keeps the {t} in the {v}.", "{n} left the {t} in the {v}.", "{n} put the {t} in the {v}."),
        ("Where does {n} keep the {t}?", "Where is the {t} of {n}?", "In which place does {n} keep the {t}?"),
        "{n} keeps the {t} in the {v}.",
        PLACES,
    ),
    "home": _Relation(
        ("{n} lives in {v}.", "The family of {n} lives in {v}.", "We know that {n} lives in {v}."),
        ("Where does {n} live?", "In which town does {n} live?", "Where is the home of {n}?"),
        "{n} lives in {v}.",
        TOWNS,
    ),
    "pet": _Relation(
        ("The pet of {n} is a {v}.", "{n} has a {v}.", "{n} owns a {v}."),
        ("What is the pet of {n}?", "Which pet does {n} have?", "What animal does {n} own?"),
        "The pet of {n} is a {v}.",
        PETS,
    ),
    "dish": _Relation(
        ("{n} likes {v} best.", "{n} loves {v}.", "The favourite food of {n} is {v}."),
        ("What does {n} like best?", "What is the favourite food of {n}?", "What does {n} love to eat?"),
        "{n} likes {v} best.",
        DISHES,
    ),
}


@dataclass(frozen=True)
class Fact:
    """One fact: under ``relation``, ``name`` (and ``thing``, where it has one) has ``value``."""

    relation: str
    name: str
    thing: str
    value: str
    told_as: int = 0

    def _fill(self, template: str) -> str:
        return template.format(n=self.name, t=self.thing, v=self.value)

    @property
    def text(self) -> str:
        """The sentence that states the fact in a context."""
        return self._fill(RELATIONS[self.relation].told[self.told_as])

    @property
    def answer(self) -> str:
        """The one right answer to any question on the fact."""
        return self._fill(RELATIONS[self.relation].answered)


class HeldOut(NamedTuple):
    """One evaluation item: the chat to send, the exact answer, and the sentence it rests on."""

    messages: list[Message]
    expected_answer: str
    fact_text: str


def is_held_out(relation: str, name: str, value: str) -> bool:
    """Tell whether a combination is kept out of training (one eighth of them are)."""
    return zlib.crc32(f"{relation}/{name}/{value}".encode()) % 8 == 0


def _draw(rng: random.Random, relation: str, held_out: bool, taken: set[tuple[str, str]]) -> Fact:
    """Draw one fact whose (relation, name) and (relation, value) are not in ``taken`` yet."""
    spec = RELATIONS[relation]
    while True:
        name = rng.choice(NAMES)
        value = rng.choice(spec.values) if spec.values else f"{rng.randrange(10000):04d}"
        if is_held_out(relation, name, value) is not held_out:
            continue
        if (relation, "n:" + name) in taken or (relation, "v:" + value) in taken:
            continue
        taken.update({(relation, "n:" + name), (relation, "v:" + value)})
        thing = f"{rng.choice(COLOURS)} {rng.choice(OBJECTS)}" if relation == "thing" else ""
        return Fact(relation, name, thing, value, rng.randrange(len(spec.told)))


def facts(seed: int, n: int, *, held_out: bool = False) -> list[Fact]:
    """Return ``n`` facts (at most 150) in which every name and value occurs once per relation."""
    if not 0 <= n <= 150:
        raise ValueError(f"n must be within 0 and 150, got {n}: ask for fewer facts")
    rng = random.Random(f"facts/{seed}/{n}/{held_out}")
    taken: set[tuple[str, str]] = set()
    return [_draw(rng, rng.choice(tuple(RELATIONS)), held_out, taken) for _ in range(n)]


def question(fact: Fact, variant: int = 0) -> str:
    """Return a question on ``fact``; ``variant`` picks one of its three wordings."""
    asked = RELATIONS[fact.relation].asked
    return asked[variant % len(asked)].format(n=fact.name, t=fact.thing)


def _context(rng: random.Random, known: list[Fact], fillers: int) -> str:
    """Lay the facts out as one text, with some sentences between them that state nothing."""
    lines = [fact.text for fact in known]
    for _ in range(fillers):
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(FILLERS))
    intro = rng.choice(INTROS)
    separator = rng.choice((" ", " ", "\n"))
    return separator.join(([intro] if intro else []) + lines)


def heldout(seed: int, count: int, *, n_facts: int | None = None, fillers: int | None = None) -> list[HeldOut]:
    """Return ``count`` evaluation chats on combinations that training never saw.

    A context has 26 to 40 facts (about 200 to 430 tokens) unless ``n_facts`` sets the number, and up to
    4 sentences that state nothing unless ``fillers`` does.
    A third of the chats has a system message, and a third asks in a second turn.
    """
    items = []
    for index in range(count):
        rng = random.Random(f"heldout/{seed}/{index}")
        known = facts(rng.randrange(1 << 30), n_facts or rng.randint(26, 40), held_out=True)
        asked, earlier = rng.sample(known, 2) if len(known) > 1 else (known[0], known[0])
        few = rng.randint(0, 4)
        text = _context(rng, known, few if fillers is None else fillers)
        messages: list[Message] = []
        if rng.random() < 1 / 3:
            messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
        ask = question(asked, rng.randrange(3))
        if rng.random() < 1 / 3:
            first = question(earlier, rng.randrange(3))
            messages.append({"role": "user", "content": f"{text}\n{first}"})
            messages.append({"role": "assistant", "content": earlier.answer})
            messages.append({"role": "user", "content": ask})
        else:
            messages.append({"role": "user", "content": f"{text}\n{ask}"})
        items.append(HeldOut(messages, asked.answer, asked.text))
    return items


def training_chat(seed: int, n_facts: int, n_questions: int, *, fillers: int | None = None) -> list[Message]:
    """Return one training chat: a context of about ``n_facts`` facts, then many questions on it.

    ``fillers`` is how many sentences that state nothing (7.5 tokens each on average) lie between the facts:
    by default a few.

    Facts come in the first user turn, in the system message, or partly in a later turn, so
    that the model learns to read them wherever they stand.
    """
    rng = random.Random(f"train/{seed}")
    known = facts(rng.randrange(1 << 30), n_facts)
    late = [known.pop() for _ in range(rng.randint(1, 3))] if n_facts > 8 and rng.random() < 0.15 else []
    few = rng.randint(0, 1 + n_facts // 8)
    text = _context(rng, known, few if fillers is None else fillers)
    messages: list[Message] = []
    prefix = ""
    style = rng.random()
    if style < 0.08:
        messages.append({"role": "system", "content": text})
    else:
        if style < 0.36:
            messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
        if rng.random() < 0.05:
            messages.append({"role": "user", "content": rng.choice(GREETINGS)})
            messages.append({"role": "assistant", "content": GREETING_REPLY})
        if rng.random() < 0.1:
            messages.append({"role": "user", "content": text})
            messages.append({"role": "assistant", "content": NOTED_REPLY})
        else:
            prefix = text + rng.choice(("\n", "\n", " "))
    pool: list[Fact] = []
    for turn in range(n_questions):
        if late and turn == n_questions // 2:
            prefix = " ".join(fact.text for fact in late) + rng.choice(("\n", " "))
            known, pool, late = known + late, pool + late, []
        if not pool:
            pool = list(known)
        # Mostly each fact is asked once, so that the answer is not in an earlier answer; but
        # sometimes again, so that the model does not learn that asked facts are spent.
        fact = rng.choice(known) if rng.random() < 0.15 else pool.pop(rng.randrange(len(pool)))
        messages.append({"role": "user", "content": prefix + question(fact, rng.randrange(3))})
        messages.append({"role": "assistant", "content": fact.answer})
        prefix = ""
    if rng.random() < 0.05:
        messages.append({"role": "user", "content": rng.choice(THANKS)})
        messages.append({"role": "assistant", "content": THANKS_REPLY})
    return messages


def content_words() -> set[str]:
    """Return the words that facts are made of: names, things, values and the halves of codes."""
    halves = {f"{number:02d}" for number in range(100)}
    return halves.union(NAMES, TOWNS, PLACES, PETS, DISHES, COLOURS, OBJECTS)


def tokenizer_text(seed: int) -> Iterator[str]:
    """Yield the text that the tokenizer is trained on: every word, then whole chats.

    Each word is repeated, with and without a leading space, so that it becomes one token.
    """
    words = NAMES + TOWNS + PLACES + PETS + DISHES + COLOURS + OBJECTS
    for _ in range(20):
        yield from (f"the {word}" for word in words)
    for _ in range(20):
        yield from NAMES
        yield from (f" {number:02d}{other:02d}" for number in range(100) for other in (number, 99 - number))
    for index in range(400):
        yield from (message["content"] for message in training_chat(seed + index, 30, 8))
