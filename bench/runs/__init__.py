"""How fast runs are, and how faithful drafts: whole generations, measured."""
