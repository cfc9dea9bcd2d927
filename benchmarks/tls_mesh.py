"""What TLS costs a mesh: TTFT, throughput and CPU of a mesh whose KV and RPCs go over TLS, of one whose RPCs alone do,
and of one without.

All KV goes by tcp (as between hosts), from one prefill to one decode instance. See `benchmarks/sides.py` for how they
take turns.

    python -m benchmarks.tls_mesh --json benchmarks/results/tls-mesh.json
    python -m benchmarks.tls_mesh --model bench --prompt-tokens 512 --requests 4 --concurrency 1 --rounds 11

`--model bench`: weights of Qwen3-0.6B's shape (112 KiB of KV a token in bfloat16, written to the cache folder of kvmesh
once).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from benchmarks import sides
from benchmarks.peers.qwen_shape import QWEN3_06B

BASE = "plain"
SIDES: dict[str, dict[str, Any]] = {
    BASE: {},
    "TLS, KV plain": {"tls": True, "transfer_network": "trusted"},
    "TLS": {"tls": True},
}


def with_tokenizer(checkpoint: Path) -> str:
    """Returns the folder of the checkpoint, which is given the demo model's tokenizer: prompts are token ids here."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (checkpoint / name).exists():
            shutil.copy(sides.DEMO / name, checkpoint / name)
    return str(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides.add_load_arguments(parser)
    parser.add_argument("--model", default=str(sides.DEMO), help="a checkpoint, or `bench`")
    args = parser.parse_args()
    more: dict[str, Any] = {"transports": "tcp"}
    if args.model == "bench":
        more |= {"model": with_tokenizer(QWEN3_06B.checkpoint()), "dtype": "bfloat16"}
    elif args.model != str(sides.DEMO):
        more["model"] = args.model
    found = sides.compare(sides.rounds_of({name: {**more, **side} for name, side in SIDES.items()}, args), BASE)
    sides.show(found)
    if args.json:
        told = {**vars(args), "json": "", "model": Path(args.model).name}
        meta = {"machine": platform.machine(), "cpus": os.cpu_count(), "args": told}
        Path(args.json).write_text(json.dumps({**meta, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
