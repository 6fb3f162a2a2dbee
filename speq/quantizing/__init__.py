"""Makes a GPTQ copy of a model, layer by layer, within a memory budget."""
