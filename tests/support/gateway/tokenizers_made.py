"""Small tokenizers made on the spot: byte-level BPE, and a sentencepiece-like one with byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Tell me a story about the sea.",
    "Ein Fuchs springt über den faulen Hund; größer, schöner, später.",
    "Быстрая лиса прыгает через ленивую собаку. 素早い狐は犬を飛び越える。",
    "🦊🐶 def main(): return [x for x in range(10)] \n\n  indented\ttabs",
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(vocab_size: int = 400) -> Tokenizer:
    """As Qwen and Llama 3 have it, with an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think now>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: ▁ for spaces, bytes for what the vocabulary lacks, a leading space taken away."""
    words = ["▁", "▁the", "▁fox", "the", "fox", "▁über", "o", "e", "t", "h", "x", "f", "ü", "b", "r", "é", "狐"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    scores = [0.0] * 3 + [-20.0] * 256 + [-float(10 - len(word)) for word in words]
    tokenizer = Tokenizer(models.Unigram(list(zip(pieces, scores, strict=True)), unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """A decoder that is no table of bytes: spaces depend on neighbours."""
    words = ["[UNK]", "[CLS]", "the", "fox", "##es", "jump", "##ed", ",", ".", "über", "##ß"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """Write a checkpoint folder's tokenizer files."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {"eos_token": "<|im_end|>", "bos_token": None, "chat_template": CHAT_TEMPLATE} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder
