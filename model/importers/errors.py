"""The one error of an import."""

from dragoman.model.errors import InputError


class ForeignError(InputError):
    """A checkpoint of another library that cannot be imported; the message names the file and the cause, on one line."""

    def __init__(self, message: object) -> None:
        """Take what is to be said; the line breaks of a library's message become spaces."""
        super().__init__(" ".join(str(message).split()))
