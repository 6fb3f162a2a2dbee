"""Where INT4 copies of experts come from: GPTQ checkpoints, packs, rounding."""
