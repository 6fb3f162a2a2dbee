"""How an option is declared: once, in a dataclass, for Python, the command line and docs."""
