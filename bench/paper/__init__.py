"""Whether the papers are right here: systems at equal memory, beside their figures."""
