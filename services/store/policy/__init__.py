"""These modules make the decisions of the store master beyond the map. Pure: no I/O, and time and randomness are
arguments."""
