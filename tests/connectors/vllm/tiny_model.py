"""Writes a small random checkpoint of Qwen3's shape: PYTHON tiny_model.py FOLDER SEED [JSON of config fields]."""

import json
import sys


def main() -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(int(sys.argv[2]))
    fields = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": None,
        **(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}),
    }
    Qwen3ForCausalLM(Qwen3Config(**fields)).save_pretrained(sys.argv[1])


if __name__ == "__main__":
    main()
