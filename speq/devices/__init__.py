"""Devices: the processor, or an accelerator with its own memory and streams."""
