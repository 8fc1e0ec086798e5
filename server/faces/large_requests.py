"""Large requests: of a text that no model can use, only both ends are kept."""

from dragoman.server.service.in_flight import LARGE_BYTES as LARGE_BYTES


def both_ends(text: str, num_characters: int) -> str:
    """Return a text without its middle, if it is longer than twice so many characters.

    A source that is too long is cut at its end, and a prompt at its beginning. What is left is still too long where all of it was.
    """
    return text if len(text) <= 2 * num_characters else text[:num_characters] + text[-num_characters:]
