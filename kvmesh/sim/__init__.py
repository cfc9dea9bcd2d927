"""Virtual time, traces, and what could have been reached: pure, imported by the CLI alone."""
