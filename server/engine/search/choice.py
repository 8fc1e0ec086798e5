"""Which search a request gets; plain greedy requests get none, since the engine chooses for all of them at once.

A forced prefix, a forced end and the length in a score leave a request plain: imported models have them in every request. Only the
end itself is found by a search, which goes on from what there is before it.
"""

from msgspec import structs

from dragoman.server.engine.messages import GREEDY, Request, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.hypothesis import Hypothesis
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.separate import SeparateSearch
from dragoman.server.engine.search.target import TargetSide


def search_for(request: Request, target: TargetSide) -> Search | None:
    """Return a request's search, or None for plain greedy search."""
    if is_plain(request.search, request.max_new_tokens):
        return None
    if request.search.num_beams > 1:
        return BeamSearch(request, target)
    return SeparateSearch(request, target)


def search_from(request: Request, target: TargetSide, hypothesis: Hypothesis) -> Search:
    """Return the search that goes on with what a plain request has, all its forced prefix and something generated."""
    search = SeparateSearch(request, target)
    search.go_on_from(hypothesis)
    return search


def is_plain(options: SearchOptions, max_new_tokens: int) -> bool:
    """Tell whether an answer goes on with what it is forced to, then with its likeliest tokens, and nothing else is wanted."""
    if options is GREEDY:
        return True
    if options.is_end_forced and max_new_tokens == 1:
        return False
    unlike = {"length_penalty": 1.0, "num_forced": 0, "forced_prefix": [], "is_end_forced": False}
    return structs.replace(options, **unlike) == GREEDY
