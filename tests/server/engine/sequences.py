"""Sequences, as tests of slots and costs need them."""

from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.sequence import Sequence


def sequence(number: int, num_tokens: int = 5, width: int = 1) -> Sequence:
    return Sequence(Request(number, [7] * num_tokens, 10, 0.0, search=SearchOptions(num_beams=width)))
