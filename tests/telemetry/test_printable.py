"""Text of others in logs and on terminals (finding 18)."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from kvmesh.cli.console import console
from kvmesh.telemetry.printable import printable
from kvmesh.telemetry.setup import LineFormatter

ATTACK = "a\x1b[2Jb\x1b]0;title\x07c\rd\x9b31me\u202ef\x00\x7f"


def line(message: str, **more: object) -> str:
    record = logging.makeLogRecord({"msg": "%s", "args": (message,), "levelname": "INFO", **more})
    return LineFormatter("gateway", "").format(record)


@given(st.text())
def test_a_log_line_is_one_line_of_printable_text(text: str) -> None:
    found = line(text, request_id=text)
    assert len(found.splitlines()) == 1
    assert not [char for char in found if (ord(char) < 32 and char != "\t") or 0x7F <= ord(char) < 0xA0]
    found.encode()


def test_an_attack_is_shown() -> None:
    found = line(ATTACK)
    assert "a\\x1b[2Jb" in found and "\\x07c\\rd\\x9b31m" in found and "\\u202e" in found
    assert line("two\nlines").endswith("two ⏎ lines")


def test_an_exception_is_escaped_too() -> None:
    err = ValueError(ATTACK)
    found = line("failed", exc_info=(type(err), err, None))
    assert "\x1b" not in found and "\\x1b[2J" in found


@pytest.mark.parametrize("terminal", [False, True])
def test_a_terminal_is_not_commanded(terminal: bool) -> None:
    out = console()
    out.file = written = io.StringIO()
    out._force_terminal = terminal
    table = Table("name")
    table.add_row(ATTACK)
    out.print(table)
    out.print(ATTACK, "[bold]ours[/]", soft_wrap=True)
    text = written.getvalue()
    for command in ("\x1b[2J", "\x1b]0;", "\x07", "\x9b", "\u202e", "\x00"):
        assert command not in text
    assert "\\x1b" in text and "ours" in text


@given(st.text())
def test_what_is_printable_stays(text: str) -> None:
    assert printable(printable(text)) == printable(text)
    if text.isprintable():
        assert printable(text) == text
