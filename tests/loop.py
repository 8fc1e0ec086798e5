"""An engine without a server, for tests and benchmarks that drive its steps themselves."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_engine
from dragoman.server.engine.messages import GREEDY, Finished, Request, SearchOptions
from dragoman.server.engine.settings import DeviceSettings, Limits
from dragoman.server.system import available_cores


class Loop:
    """A bundle's engine in the calling thread; `num_threads` 0 means one for each core."""

    def __init__(
        self, directory: Path, max_slots: int = 64, num_threads: int = 1, *, weights_cache: str = "", is_warmed_up: bool = False
    ) -> None:
        bundle = Bundle.open(directory)
        self.manifest, self.tokenizers = bundle.manifest, bundle.tokenizers()
        device, limits = DeviceSettings(weights_cache=weights_cache), Limits(max_slots, prefill_tokens_per_step=4096)
        self.engine = load_engine(bundle, limits, num_threads or available_cores(), is_warmed_up=is_warmed_up, device=device)

    def source(self, text: str) -> list[int]:
        """Return the source of a text, with its end-of-sequence."""
        return [*self.tokenizers.source.encode(text), self.manifest.eos_id]

    def run(self, requests: Iterable[Request]) -> dict[int, Finished]:
        """Run requests that are submitted at once; return their ends by id."""
        for request in requests:
            self.engine.submit(request)
        finished: dict[int, Finished] = {}
        while self.engine.has_work:
            self.engine.step()
            finished |= {end.id: end for end in self.engine.take_report().finished}
        assert all(end.reason in ("eos", "length") for end in finished.values())
        return finished

    def decode(self, sources: Sequence[list[int]], max_new_tokens: int, search: SearchOptions = GREEDY) -> list[Finished]:
        """Run sources with their end-of-sequence; return their ends in order."""
        now = time.monotonic()
        ends = self.run(Request(i, source, max_new_tokens, now, search=search) for i, source in enumerate(sources))
        return [ends[i] for i in range(len(sources))]
