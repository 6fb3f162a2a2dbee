"""Sources of a draft's INT4 codes: GPTQ checkpoints, packs, rounding."""
