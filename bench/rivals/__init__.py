"""Systems that run the same model under the same memory, each in a process of its own."""
