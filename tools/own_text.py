"""Text that a model writes by itself, to calibrate its quantised draft on.

It needs no data set, has no author's rights but the model's, and is of the kind that a draft will
be asked for. After Williams et al., arXiv:2410.17170.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines to write")
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write(options.model, options.out, options.texts, options.tokens, options.seed)


def write(folder: Path, out: Path, texts: int, tokens: int, seed: int) -> None:
    """Draw texts at temperature 1 from nothing but a beginning of text."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with out.open("w", encoding="utf-8") as file:
        for start in range(0, texts, BATCH):
            ids = torch.full((min(BATCH, texts - start), 1), tokenizer.bos_token_id)
            drawn = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=tokenizer.pad_token_id,
            )
            for row in drawn:
                text = tokenizer.decode(row, skip_special_tokens=True)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
