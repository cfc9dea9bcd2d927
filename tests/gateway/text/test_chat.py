"""Chat templates: Hugging Face's conventions, the sandbox, and errors that are the client's to read."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.chat import Chat, ChatTemplates, TemplateMessage
from tests.support.gateway.tokenizers_made import CHAT_TEMPLATE

MESSAGES = [
    TemplateMessage("system", "Be <brief> & kind."),
    TemplateMessage("user", '  Hällo 🦊 "you"\n'),
    TemplateMessage("assistant", "Hi"),
    TemplateMessage("user", "Bye"),
]
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "blocks": """
{%- if messages[0]['role'] == 'system' %}
    {{ bos_token + messages[0].content | trim }}
    {% set messages = messages[1:] %}
{% endif %}
{% for message in messages %}
    {% if loop.index0 > 5 %}{% break %}{% endif %}
    [{{ message.role | upper }}] {{ message['content'] | tojson }} {{- eos_token }}
{% endfor %}
{% if tools is not none and tools %}tools{% endif %}
{% if add_generation_prompt %}{{ '[A]' }}{% endif %}
""",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': 'ü'} | tojson(sort_keys=true) }}",
}


def render(template: str, messages: list[TemplateMessage] = MESSAGES, **named: str) -> str:
    now = datetime.datetime(2026, 1, 2, 3, 4)
    return ChatTemplates({"default": template}, NAMED | named).render(
        Chat(tuple(messages)).as_template_sees_it(), lambda: now
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    seen: list[Any] = [message.as_template_sees_it() for message in MESSAGES]
    expected, _ = render_jinja_template(
        conversations=[seen], chat_template=TEMPLATES[name], add_generation_prompt=True, **NAMED
    )
    assert render(TEMPLATES[name]) == expected[0]


def test_time_comes_from_the_caller() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "02 Jan 2026"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (
            "{{ raise_exception('Conversation roles must alternate') }}",
            "refuses them: Conversation roles must alternate",
        ),
        ("{% for m in messages %}", "broken at line 1"),
        ("{{ messages.append(1) }}", "refuses them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses them"),
        ("{{ messages[99].content }}", "refuses them"),
        ("{{ 1 + messages }}", "fails on them: TypeError"),
        ("{% for i in range(10**9) %}x{% endfor %}", "fails on them: OverflowError"),
        ("{{ raise_exception('x' * 100000) }}", "xxx..."),
    ],
)
def test_what_a_template_cannot_do_is_the_requests_fault(template: str, why: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(template)
    assert why in caught.value.message
    assert caught.value.field == "messages"
    assert len(caught.value.message) < 500


def test_a_model_without_a_template() -> None:
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        ChatTemplates({}, {}).render(Chat(tuple(MESSAGES)).as_template_sees_it(), datetime.datetime.now)
