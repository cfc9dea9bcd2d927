"""Bounds of SamplingParams, the same at the gateway's doors and at the instances."""

from __future__ import annotations

MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MIN_REPETITION_PENALTY = 0.01  # as clients may say it; on the wire 0 is off
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0  # either sign
MAX_BIASED_TOKENS = 300
