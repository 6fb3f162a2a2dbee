"""The one exception users see: a sentence with what was given, what was wanted, what to do."""


class SpeqError(ValueError):
    """Bad input, or a machine that cannot do what was asked. The message is for the user."""
