"""How to hold a model's experts in a budget."""
