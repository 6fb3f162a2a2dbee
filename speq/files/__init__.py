"""Reading and writing of files: safetensors, byte ranges, atomic replacement."""
