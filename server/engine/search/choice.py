"""Which search a request gets; plain greedy requests get none, since the engine chooses for all of them at once.

A forced prefix and the length in a score leave a request plain: the models of many languages have them in every request.
"""

from msgspec import structs

from dragoman.server.engine.messages import GREEDY, Request, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.separate import SeparateSearch
from dragoman.server.engine.search.target import TargetSide


def search_for(request: Request, target: TargetSide) -> Search | None:
    """Return a request's search, or None for plain greedy search."""
    if is_plain(request.search):
        return None
    if request.search.num_beams > 1:
        return BeamSearch(request, target)
    return SeparateSearch(request, target)


def is_plain(options: SearchOptions) -> bool:
    """Tell whether a row goes on with what it is forced to, then with its likeliest token, and nothing else is wanted."""
    if options is GREEDY:
        return True
    score = {"length_penalty": GREEDY.length_penalty, "num_forced": 0, "forced_prefix": []}
    return structs.replace(options, **score) == GREEDY
