"""The one error family for what a user hands to a command: a file, a setting, a line of text."""


class InputError(ValueError):
    """Something given cannot be used; the message names it and says why. The command line prints it and exits with 2."""
