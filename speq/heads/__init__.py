"""Draft heads: one small layer over the exact model's last hidden states, and its file."""
