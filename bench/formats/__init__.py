"""One model in several published formats, and what a token takes in each."""
