"""Makes a GPTQ copy of a model's experts, layer by layer, within a memory budget."""
