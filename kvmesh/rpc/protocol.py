"""What both sides of the wire agree on: the protocol version that this build speaks (registrations and Hellos carry the
peer's), the size of a message, and the bounds of SamplingParams at the gateway and at the instances.
"""

from __future__ import annotations

from kvmesh.errors import ProtocolMismatch
from kvmesh.rpc.pb import common_pb2

PROTOCOL_VERSION = common_pb2.PROTOCOL_VERSION_1
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


def check(version: int, who: str) -> None:
    """Raises `ProtocolMismatch` unless the peer named `who` speaks this build's protocol version."""
    if version != PROTOCOL_VERSION:
        spoken = f"protocol version {version}" if version else "no protocol version"
        raise ProtocolMismatch(
            f"protocol_version={version}: {who} speaks {spoken}, this build speaks {PROTOCOL_VERSION}; "
            "run the same kvmesh on both sides",
            field="protocol_version",
        )


# Bounds of SamplingParams.

MAX_TOP_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 4 << 20  # of one prompt: tokens x (1 + alternatives), 8 bytes each in a message
MAX_PENALTY = 2.0  # of presence and frequency, either sign
MIN_REPETITION_PENALTY = 0.01  # as clients may say it; on the wire 0 is off
MAX_REPETITION_PENALTY = 10.0
MAX_BIAS = 100.0  # either sign
MAX_BIASED_TOKENS = 300
MAX_GRAMMAR_BYTES = 1 << 20  # as UTF-8
