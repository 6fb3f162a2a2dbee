"""Files as they are read and written: safetensors, ranges, whole-or-nothing replacement."""
