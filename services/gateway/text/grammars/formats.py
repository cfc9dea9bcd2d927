"""Formats of strings that are enforced: by llguidance, or by an expression of ours where its own accepts too much."""

from __future__ import annotations

ENFORCED = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""llguidance's own expressions: JSON Schema's suite finds no invalid instance that they accept."""

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"

PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
"""RFC 3339 with leap years (llguidance allows 30 February's neighbour, the 29th, in every year) and without leap
seconds (it allows second 60 in every minute). Fractions have at most nine digits, so that a time has a last one."""
