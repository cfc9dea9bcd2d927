"""Regular expressions: read once, bounded, and written in the dialect of llguidance (that of Rust's `regex`).

A schema's `pattern` is ECMA-262: `.` leaves out four line ends, `\\s` holds U+FEFF, `\\d` and `\\w` are ASCII. Whatever
the two dialects could read differently is either written out or refused, so that no text passes that the client's
validator would reject. A client's own regex (`regex`, `guided_regex`) is read by the same rules.
"""

from __future__ import annotations

import re

from kvmesh.errors import InvalidRequest
from kvmesh.services.gateway.text.grammars.bounds import (
    MAX_REGEX_BYTES,
    MAX_REGEX_COST,
    MAX_REGEX_DEPTH,
    QUANTIFIER_COST,
)

_SPACES = r"\t\n\x0B\x0C\r \u{A0}\u{1680}\u{2000}-\u{200A}\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACES}
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\x0C", "v": r"\x0B", "0": r"\x00"}
_ANY = r"[^\n\r\u{2028}\u{2029}]"
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")
_SPECIAL = frozenset("\\^$.|?*+()[]{}/-&~#\"' <>=!,:;@%`_")
_PROPERTIES = frozenset({
    "L", "Lu", "Ll", "Lt", "Lm", "Lo", "M", "Mn", "Mc", "Me", "N", "Nd", "Nl", "No", "P", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "S", "Sm", "Sc", "Sk", "So", "Z", "Zs", "Zl", "Zp",
})  # fmt: skip


def translated(pattern: object, field: str, *, anchored: bool) -> tuple[str, int]:
    """`pattern` for llguidance, and its cost (bounds.MAX_REGEX_COST). `anchored`: the expression must match the whole
    text, so that a leading `^` and a closing `$` are dropped; otherwise anchors stay, and it may match anywhere.

    Raises InvalidRequest for what is not supported (lookarounds, back references, word borders, flags) and for what
    is too long, too deep or repeats too often.
    """
    if not isinstance(pattern, str):
        raise InvalidRequest.of(field, pattern, "is a string")
    if len(pattern.encode("utf-8", "replace")) > MAX_REGEX_BYTES:
        raise InvalidRequest.of(field, pattern, f"is longer than {MAX_REGEX_BYTES} bytes")
    return _Reader(pattern, field, anchored).read()


class _Reader:
    def __init__(self, text: str, field: str, anchored: bool) -> None:
        self._text = text
        self._field = field
        self._anchored = anchored
        self._at = 0
        self._quantifiers = 0

    def read(self) -> tuple[str, int]:
        written, states = self._alternatives(0)
        if self._at < len(self._text):
            raise self._refused("a parenthesis closes that was not opened")
        cost = states + QUANTIFIER_COST * self._quantifiers
        if cost > MAX_REGEX_COST:
            raise self._refused(f"repeats too much (costs {cost}, at most {MAX_REGEX_COST})")
        return written, cost

    def _refused(self, why: str) -> InvalidRequest:
        return InvalidRequest.of(self._field, self._text, why)

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else ""

    def _alternatives(self, depth: int) -> tuple[str, int]:
        if depth > MAX_REGEX_DEPTH:
            raise self._refused(f"nests deeper than {MAX_REGEX_DEPTH} groups")
        branches: list[str] = []
        states = 0
        while True:
            written, cost = self._sequence(depth)
            branches.append(written)
            states += cost
            if self._peek() != "|":
                break
            self._at += 1
        if self._anchored and depth == 0 and len(branches) > 1:
            return "|".join(f"(?:{branch})" for branch in branches), states
        return "|".join(branches), states

    def _sequence(self, depth: int) -> tuple[str, int]:
        parts: list[str] = []
        states = 0
        while (char := self._peek()) and char not in "|)":
            if char in "^$":
                parts.append(self._anchor(char, depth, first=not parts))
                continue
            atom, cost = self._atom(char, depth)
            atom, cost = self._quantified(atom, cost)
            parts.append(atom)
            states += cost
            if states > MAX_REGEX_COST:
                raise self._refused(f"repeats too much (more than {MAX_REGEX_COST} characters)")
        return "".join(parts), states

    def _anchor(self, char: str, depth: int, *, first: bool) -> str:
        self._at += 1
        if self._peek() in set("*+?{") - {""}:
            raise self._refused(f"a quantifier follows {char}")
        if not self._anchored:
            return char
        after = self._peek()
        if depth == 0 and ((char == "^" and first) or (char == "$" and after in ("", "|"))):
            return ""
        raise self._refused(f"{char} stands inside of an expression that must match the whole answer")

    def _atom(self, char: str, depth: int) -> tuple[str, int]:
        self._at += 1
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class(), 1
        if char == ".":
            return _ANY, 1
        if char == "\\":
            written, is_set = self._escape(inside=False)
            return (f"[{written}]" if is_set else written), 1
        if char in "*+?":
            raise self._refused(f"nothing is before {char}")
        if char in "{}]":
            if char == "{" and _COUNT.match(self._text, self._at - 1):
                raise self._refused("nothing is before a counted repetition")
            return "\\" + char, 1
        return _literal(char), 1

    def _group(self, depth: int) -> tuple[str, int]:
        if self._peek() == "?":
            if self._text.startswith("?:", self._at):
                self._at += 2
            elif (name := re.compile(r"\?P?<[A-Za-z_]\w{0,63}>").match(self._text, self._at)) is not None:
                self._at = name.end()
            else:
                raise self._refused("lookarounds, flags and other (?...) groups are not supported")
        written, cost = self._alternatives(depth + 1)
        if self._peek() != ")":
            raise self._refused("a parenthesis is not closed")
        self._at += 1
        return f"(?:{written})", max(cost, 1)

    def _quantified(self, atom: str, cost: int) -> tuple[str, int]:
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            quantifier = char
            self._lazy()
        elif char == "{" and (count := _COUNT.match(self._text, self._at)) is not None:
            self._at = count.end()
            least = int(count[1])
            most = least if count[2] is None else int(count[3]) if count[3] else None
            if most is not None and most < least:
                raise self._refused(f"{count[0]} counts down")
            cost *= max(least, most or 0, 1)
            quantifier = count[0]
            self._lazy()
        else:
            return atom, cost
        if self._peek() in set("*+?") - {""} or _COUNT.match(self._text, self._at):
            raise self._refused("a quantifier follows a quantifier")
        self._quantifiers += 1
        return atom + quantifier, cost

    def _lazy(self) -> None:
        if self._peek() == "?":  # which match is found first does not change which texts match
            self._at += 1

    def _class(self) -> str:
        negated = self._peek() == "^"
        self._at += negated
        items: list[str] = []
        while (char := self._peek()) != "]":
            if not char:
                raise self._refused("a character class is not closed")
            low, is_set = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high, high_set = self._member()
                if is_set or high_set:
                    raise self._refused("a range in a character class ends in a set")
                items.append(f"{low}-{high}")
            else:
                items.append(low)
        self._at += 1
        if not items:
            raise self._refused("[] and [^] are not supported")
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _member(self) -> tuple[str, bool]:
        char = self._peek()
        self._at += 1
        if char == "\\":
            return self._escape(inside=True)
        if char == "[":
            if self._text.startswith(":", self._at):
                raise self._refused("[:name:] classes are not supported")
            return r"\[", False
        return _literal(char), False

    def _escape(self, *, inside: bool) -> tuple[str, bool]:
        """What follows a backslash, and whether it is a set of characters (written as members of a class)."""
        char = self._peek()
        self._at += 1
        if not char:
            raise self._refused("ends in a backslash")
        if char in _CLASSES:
            return _CLASSES[char], True
        if char in "DWS":
            if inside:
                return rf"[^{_CLASSES[char.lower()]}]", True
            return f"^{_CLASSES[char.lower()]}", True
        if char == "0" and self._peek().isdigit():
            raise self._refused("octal escapes are not supported")
        if char in _CONTROLS:
            return _CONTROLS[char], False
        if char == "x" and (digits := re.compile(r"[0-9A-Fa-f]{2}").match(self._text, self._at)):
            self._at = digits.end()
            return _literal(chr(int(digits[0], 16))), False
        if char == "u":
            return self._unicode(), False
        if char in "pP" and (name := re.compile(r"\{([A-Za-z]{1,2})\}").match(self._text, self._at)):
            if name[1] not in _PROPERTIES:
                raise self._refused(f"\\{char}{name[0]} is not supported")
            self._at = name.end()
            return f"\\{char}{name[0]}", True
        if inside and char == "b":
            return r"\x08", False
        if char in _SPECIAL:
            return _literal(char), False
        what = "back references are" if char.isdigit() or char == "k" else f"\\{char} is"
        raise self._refused(f"{what} not supported")

    def _unicode(self) -> str:
        braces = re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(self._text, self._at)
        four = re.compile(r"[0-9A-Fa-f]{4}").match(self._text, self._at)
        if braces is not None:
            code, self._at = int(braces[1], 16), braces.end()
        elif four is not None:
            code, self._at = int(four[0], 16), four.end()
            low = re.compile(r"\\u(D[C-F][0-9A-F]{2})", re.IGNORECASE).match(self._text, self._at)
            if 0xD800 <= code < 0xDC00 and low is not None:
                code = 0x10000 + ((code - 0xD800) << 10) + (int(low[1], 16) - 0xDC00)
                self._at = low.end()
        else:
            raise self._refused("\\u is followed by four hexadecimal digits")
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._refused(f"U+{code:04X} is no character")
        return _literal(chr(code))


def _literal(char: str) -> str:
    """`char` as itself, inside and outside of a class, in a lark grammar's `/.../` too."""
    if char.isascii() and (char.isalnum() or char == "_"):
        return char
    if " " <= char <= "~" and char not in "/\"' <>=!,:;@%`":
        return "\\" + char
    return char if char in " <>=!,:;@%`\"'" else rf"\u{{{ord(char):X}}}"
