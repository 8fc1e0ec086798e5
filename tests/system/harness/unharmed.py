"""A server that must be as it was before, whatever was done to it meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

from dragoman.client.sync import Client
from tests.system.harness.callers import connection, generate, outcome
from tests.system.harness.server import Server, footprint, growth, processes, wait_until

KNOWN = {"text": "a dog runs over the grass", "num_beams": 4, "num_return_sequences": 4, "return_log_probs": True}


@contextmanager
def unharmed(server: Server, *, max_bytes: int = 64 * 2**20) -> Iterator[None]:
    """Look before and after that the server is ready and idle, answers a known request alike, and holds no more than it did.

    Its processes must be the same ones, and its log has no errors. What grows once, such as pools of threads, arenas and caches,
    is to have grown before. Allocators may keep `max_bytes` of what was in use.
    """

    def answer() -> object:
        with connection(server) as channel:
            return outcome(generate(channel, 20, **KNOWN).result())

    right = answer()
    server.wait_until_idle()
    everything = processes(server)
    before = footprint(everything)
    yield
    server.wait_until_idle()
    with Client(server.address) as client:
        assert client.is_ready() and client.is_ready("liveness")
    assert answer() == right, "a known request has another answer"
    assert processes(server) == everything, "processes have ended or come"
    wait_until(lambda: not growth(before, max_bytes), f"processes hold what they did: {growth(before, max_bytes)}")
    assert server.problems() == []
