"""Quantization of a model by GPTQ, layer by layer, within a memory budget."""
