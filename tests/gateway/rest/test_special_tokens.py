"""What a tokenizer adds to a prompt: what tokenizer.json says, once, as transformers does. Its add_bos_token and
add_eos_token belong to tokenizers that are built from other files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers.processors import TemplateProcessing

from kvmesh.services.gateway.text.chat import Chat, ChatTemplates, TemplateMessage
from kvmesh.services.gateway.text.tokenizer import Tokenizer
from tests.support.gateway import tokenizers_made

# As Gemma's begins: the template writes the token itself.
CHAT = "{{ bos_token }}{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}{% endfor %}"
TEXT = "the fox"


def made(with_bos: bool) -> Inner:
    inner = tokenizers_made.byte_fallback()
    if with_bos:
        inner.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return inner


@pytest.mark.parametrize("in_tokenizer", [True, False])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
)
def test_prompts_get_what_transformers_adds(tmp_path: Path, in_tokenizer: bool, flags: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    names = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder = tokenizers_made.save(made(in_tokenizer), tmp_path, **names, **flags, chat_template=CHAT)
    ours = Tokenizer.load(folder)
    load: Any = AutoTokenizer
    theirs = load.from_pretrained(folder)
    ids = ours.encode(TEXT, add_special_tokens=True)
    assert ids == theirs(TEXT).input_ids
    assert ids.count(1) == int(in_tokenizer)

    rendered = ChatTemplates(ours.templates, ours.named_tokens).render(
        Chat((TemplateMessage("user", TEXT),)).as_template_sees_it(), datetime.datetime.now
    )
    ids = ours.encode(rendered, add_special_tokens=False)
    expected = theirs.apply_chat_template([{"role": "user", "content": TEXT}], add_generation_prompt=True)
    assert ids == expected["input_ids"] and ids.count(1) == 1
