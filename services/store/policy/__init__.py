"""What the store master decides beyond the map. Pure: no I/O, and time and randomness are arguments."""
