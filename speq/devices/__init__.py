"""What computes: the processor, or a device with memory and streams of its own."""
