"""Two callers: one with more requests than the queue holds, the other with one a second."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.attacks.attack import Attack, Figure, Scene, percentile
from benchmarks.attacks.others import Crowd, Look, Prober
from benchmarks.harness.apart import Apart
from dragoman.v1 import generation_pb2

NUM_CALLERS = 400
MAX_WAITING = 256
SECONDS = 20.0


def run(scene: Scene) -> Iterator[Figure]:
    """Measure the second alone and beside the first."""
    request = generation_pb2.GenerateRequest(text="A dog runs.", max_new_tokens=64).SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        path.write_text("many:token-of-many\nfew:token-of-few\n")
        with scene.serve(f"--auth-tokens-file={path}", f"--max-waiting-requests={MAX_WAITING}") as server:
            yield from _figures("alone", _few(server.address))
            with Apart(Crowd, server.address, NUM_CALLERS, "Generate", request, "token-of-many", 0.1) as crowd:
                time.sleep(3.0)
                looks = _few(server.address)
                codes: dict[str, int] = crowd.call("stop")
            yield from _figures("beside a full queue", looks)
            yield Figure("answers that the first got meanwhile, a second", f"{codes.get('OK', 0) / (SECONDS + 3):.0f}")


def _few(address: str) -> list[Look]:
    """Return what one request a second came to."""
    with Apart(Prober, address, 1.0, "generate", "token-of-few") as prober:
        time.sleep(SECONDS)
        looks: list[Look] = prober.call("stop")
    return looks


def _figures(when: str, looks: list[Look]) -> Iterator[Figure]:
    answered = [look.took for look in looks if look.status == "OK"]
    yield Figure(f"the second's p95 {when}, ms", f"{percentile(answered, 95) * 1000:.0f}" if answered else "no answer")
    yield Figure(f"its requests that were refused {when}, %", f"{(len(looks) - len(answered)) / len(looks) * 100:.0f}")


ATTACK = Attack("fair", f"{NUM_CALLERS} callers of one token beside one request a second of another's", run)
