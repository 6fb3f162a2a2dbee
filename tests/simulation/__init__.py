"""A whole system under a simulated disk, clock and interrupts: `python -m tests.simulation`."""
