"""Write a Mixture-of-Experts checkpoint with random weights of real layer shapes.

For measurements of speed only: it says nothing. The tokenizer is the bundled model's.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

BUNDLED = Path(__file__).parent.parent / "models" / "tiny-moe"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--expert-width", type=int, default=1408)
    parser.add_argument("--shared-width", type=int, default=5632)
    parser.add_argument("--num-experts", type=int, default=60)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--num-layers", type=int, default=4)
    options = parser.parse_args()
    heads = options.hidden_size // 128
    config = Qwen2MoeConfig(
        vocab_size=4096,
        hidden_size=options.hidden_size,
        intermediate_size=options.shared_width,
        moe_intermediate_size=options.expert_width,
        shared_expert_intermediate_size=options.shared_width,
        num_experts=options.num_experts,
        num_experts_per_tok=options.top_k,
        num_hidden_layers=options.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen2MoeForCausalLM(config).save_pretrained(options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / name, options.out)


if __name__ == "__main__":
    main()
