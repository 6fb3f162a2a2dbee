"""What the machine gives: kernels, passes, transfers, prompts, codecs."""
