"""Which search a request gets; plain greedy requests get none, since the engine chooses for all of them at once."""

from dragoman.server.engine.messages import GREEDY, Request
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.search.separate import SeparateSearch
from dragoman.server.engine.search.target import TargetSide


def search_for(request: Request, target: TargetSide) -> Search | None:
    """Return a request's search, or None for plain greedy search."""
    if request.search == GREEDY:
        return None
    if request.search.num_beams > 1:
        return BeamSearch(request, target)
    return SeparateSearch(request, target)
