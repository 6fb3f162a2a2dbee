"""The live page: a server on this machine that shows a generation while it runs."""
