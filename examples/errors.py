"""Errors that the command line reports in one line."""


class UsageError(Exception):
    """What the user asked for can't be done; the message says what to do instead."""
