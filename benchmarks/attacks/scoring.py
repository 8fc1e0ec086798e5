"""Long pairs to score, from ever more callers, beside one who reads a stream."""

from collections.abc import Iterator

from benchmarks.attacks.attack import Attack, Figure, Scene
from benchmarks.attacks.others import Crowd, Pace, Reader
from benchmarks.harness.apart import Apart
from dragoman.v1 import generation_pb2

CALLERS = (1, 4, 16)
SECONDS = 8.0
# A pair of some thousand tokens: two for each of these, nearly.
PAIR = generation_pb2.ScoreRequest(text="dog " * 500, target="Hund " * 240)


def run(scene: Scene) -> Iterator[Figure]:
    """Score while a neighbour reads."""
    with scene.serve() as server, Apart(Reader, server.address) as neighbour:
        neighbour.call("read", 2.0)
        alone: Pace = neighbour.call("read", SECONDS)
        yield Figure("a neighbour's tokens/s alone", f"{alone.tokens_per_second:.0f}")
        yield Figure("its longest gap alone, ms", f"{alone.longest_ms:.0f}")
        for num_callers in CALLERS:
            with Apart(Crowd, server.address, num_callers, "Score", pair()) as crowd:
                neighbour.call("read", 1.0)
                pace: Pace = neighbour.call("read", SECONDS)
                codes = crowd.call("stop")
            share = f"{pace.tokens_per_second:.0f} ({pace.tokens_per_second / alone.tokens_per_second:.0%})"
            yield Figure(f"tokens/s beside {num_callers}", share)
            yield Figure(f"longest gap beside {num_callers}, ms", f"{pace.longest_ms:.0f}")
            yield Figure(f"pairs scored by {num_callers}", str(codes.get("OK", 0)))


def pair() -> bytes:
    """Return the request, as bytes."""
    return bytes(PAIR.SerializeToString())


ATTACK = Attack("scoring", "pairs of about 1,000 tokens beside a stream", run)
