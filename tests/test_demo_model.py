"""The demo checkpoint answers from its context, and fails as soon as its KV cache is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from scripts.demo_corpus import HeldOut, Message, heldout, is_held_out, training_chat  # noqa: E402
from tests.support.paths import ROOT  # noqa: E402

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples" / "demo-model"
BLOCK = 64
SEED = 20_001
Cache = Any
Damage = Callable[[Cache, int], None]


class Loaded(NamedTuple):
    """The model of the folder and its tokenizer."""

    model: Any
    tokenizer: Any


@pytest.fixture(scope="module")
def demo() -> Loaded:
    """Load the checkpoint once, upcast to float32."""
    return load("float32")


def load(dtype: str) -> Loaded:
    """Load the checkpoint with transformers in the given dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=getattr(torch, dtype))
    return Loaded(model.eval(), transformers.AutoTokenizer.from_pretrained(FOLDER))


def zero(cache: Cache, block: int) -> None:
    """Zero one block of every layer, as if its pages had never arrived."""
    for layer in cache.layers:
        for kv in (layer.keys, layer.values):
            kv[:, :, block * BLOCK : (block + 1) * BLOCK] = 0


def shift(cache: Cache, block: int) -> None:
    """Replace one block by its neighbour, as if a block table were off by one."""
    here, there = block * BLOCK, (block - 1 if block else 1) * BLOCK
    for layer in cache.layers:
        for kv in (layer.keys, layer.values):
            width = min(BLOCK, kv.shape[2] - max(here, there))  # the last block may be partial
            kv[:, :, here : here + width] = kv[:, :, there : there + width].clone()


def prompt_of(demo: Loaded, messages: list[Message]) -> str:
    """Render a chat up to the point where the assistant speaks."""
    text = demo.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(text)


def answered(demo: Loaded, item: HeldOut, damage: Damage | None = None) -> bool:
    """Tell whether greedy decoding gives exactly the expected answer, then ``<|im_end|>``.

    The whole answer is fed at once behind the prefilled cache. Greedy decoding gives it if and
    only if each of its tokens is the likeliest one after those before it, so one pass tells.
    The cache holds all but the last token of the prompt, as it does when a decode worker takes over.
    So the question was read with the facts whole, and damage counts for what is decoded after it.
    """
    tokenizer = demo.tokenizer
    text = prompt_of(demo, item.messages)
    ids = tokenizer(text)["input_ids"]
    answer = tokenizer(item.expected_answer)["input_ids"] + [tokenizer.eos_token_id]
    with torch.inference_mode():
        cut = len(ids) - 1
        cache = demo.model(torch.tensor([ids[:cut]]), use_cache=True).past_key_values
        if damage is not None:
            damage(cache, value_block(demo, text, item))
        rest = torch.tensor([ids[cut:] + answer[:-1]])
        logits = demo.model(rest, None, None, cache).logits[0]  # by place: its name differs between releases
    return bool(logits.argmax(-1).tolist()[-len(answer) :] == answer)


def value_block(demo: Loaded, text: str, item: HeldOut) -> int:
    """Return the block of the cache in which the value of the asked fact begins."""
    assert text.count(item.fact_text) == 1
    end = text.index(item.fact_text) + len(item.fact_text)
    value = end - 1 - len(item.fact_text[:-1].split()[-1])
    offsets = demo.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return next(i for i, (_, stop) in enumerate(offsets) if stop > value) // BLOCK


def recall(demo: Loaded, items: list[HeldOut], damage: Damage | None = None) -> float:
    """Return the share of items that are answered exactly."""
    return sum(answered(demo, item, damage) for item in items) / len(items)


def test_recall_on_held_out_facts(demo: Loaded) -> None:
    assert recall(demo, heldout(SEED, 150)) >= 0.95


def test_recall_in_bfloat16() -> None:
    assert recall(load("bfloat16"), heldout(SEED, 100)) >= 0.95


@pytest.mark.parametrize("damage", [zero, shift])
def test_one_wrong_block_shows_as_wrong_answers(demo: Loaded, damage: Damage) -> None:
    assert recall(demo, heldout(SEED, 100), damage) < 0.30


def test_contexts_span_several_blocks(demo: Loaded) -> None:
    lengths = [len(demo.tokenizer(prompt_of(demo, item.messages))["input_ids"]) for item in heldout(SEED, 100)]
    assert min(lengths) >= 3 * BLOCK


def test_generate_stops_by_itself(demo: Loaded) -> None:
    """The real decoding loop of transformers agrees with the one-pass check above."""
    for item in heldout(SEED, 5):
        ids = demo.tokenizer(prompt_of(demo, item.messages), return_tensors="pt")
        out = demo.model.generate(**ids, do_sample=False, max_new_tokens=32)[0, ids["input_ids"].shape[1] :]
        exact = demo.tokenizer.decode(out) == item.expected_answer + "<|im_end|>"
        assert exact == answered(demo, item)


def test_demo_prompt_is_answered(demo: Loaded) -> None:
    prompt = json.loads((FOLDER / "demo_prompt.json").read_text(encoding="utf-8"))
    ids = demo.tokenizer(prompt_of(demo, prompt["messages"]), return_tensors="pt")
    assert ids["input_ids"].shape[1] > 2 * BLOCK
    out = demo.model.generate(**ids, do_sample=False, max_new_tokens=32)[0, ids["input_ids"].shape[1] :]
    assert demo.tokenizer.decode(out, skip_special_tokens=True) == prompt["expected"]


def test_held_out_combinations_are_not_trained_on() -> None:
    told = {m["content"] for seed in range(50) for m in training_chat(seed, 20, 10)}
    for item in heldout(SEED, 50):
        assert not any(item.fact_text in text for text in told)
    assert any(is_held_out("home", "Mira", str(value)) for value in range(100))


def test_chat_template_writes_chatml(demo: Loaded) -> None:
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A"},
    ]
    chat = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_of(demo, messages[:2]) == chat
    whole = demo.tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == chat + "A<|im_end|>\n"


@pytest.mark.parametrize(
    "text",
    [
        "The code of Mira is 4821.",
        "  two  spaces, a\ttab\r\nand lines\n\n",
        "Grüße, naïve café, Ελληνικά, кириллица, 漢字かな, עברית, 한국어",
        "emoji 🦊👩‍🚀🏳️‍🌈 and controls \x00\x01\x7f\u200b\ufeff",
        "e\u0301 stays apart from \u00e9; 12345678901; ½ ٣",
        "".join(chr(code) for code in range(0x20, 0x3000, 7)),
    ],
)
def test_tokenizer_round_trips_any_text(demo: Loaded, text: str) -> None:
    ids = demo.tokenizer(text)["input_ids"]
    assert demo.tokenizer.decode(ids) == text


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 8 * 1024 * 1024


def test_architecture(demo: Loaded) -> None:
    config = demo.model.config
    assert type(demo.model).__name__ == "Qwen3ForCausalLM"
    assert config.tie_word_embeddings
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert config.max_position_embeddings >= 2048
    assert demo.tokenizer.eos_token == "<|im_end|>"
