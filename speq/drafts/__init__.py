"""Where a draft's INT4 codes come from: GPTQ checkpoints, packs, rounding."""
