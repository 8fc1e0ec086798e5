"""An engine driven directly, without processes or sockets: evaluation of a bundle, and benchmarks of the bare loop."""

import time
from collections.abc import Sequence
from pathlib import Path

from export.bundle import Bundle
from model.errors import InputError
from server.cores import available_cores
from server.engine.engine import Engine
from server.engine.messages import Finished, Request
from server.engine.scheduler import Limits
from server.runtime.onnx import OnnxRunner

_ORIGIN = b"offline"


class OfflineTranslator:
    """A bundle that translates lists of texts in this thread."""

    def __init__(self, directory: Path, max_slots: int = 64, num_threads: int = 0) -> None:
        """Load a bundle; 0 threads means one a core.

        Raises:
            BundleError: If the bundle cannot be served.
        """
        self.bundle = Bundle.open(directory)
        self.tokenizer = self.bundle.tokenizer()
        manifest = self.bundle.manifest
        runner = OnnxRunner(self.bundle, max_slots, num_threads or available_cores())
        limits = Limits(max_slots, max_waiting_requests=2**31, max_waiting_tokens=2**62, prefill_tokens_per_step=4096)
        self.engine = Engine(
            runner,
            limits,
            eos_id=manifest.eos_id,
            decoder_start_id=manifest.decoder_start_id,
            max_target_tokens=manifest.max_target_tokens,
        )

    def translate(self, texts: Sequence[str], max_new_tokens: int | None = None) -> list[str]:
        """Translate greedily; answers come in the order of `texts`."""
        eos_id = self.bundle.manifest.eos_id
        sources = [[*ids, eos_id] for ids in self.tokenizer.encode_batch(texts)]
        return [self.tokenizer.decode(finished.token_ids) for finished in self.run(sources, max_new_tokens)]

    def run(self, sources: Sequence[list[int]], max_new_tokens: int | None = None) -> list[Finished]:
        """Decode sources, end-of-sequence included, all submitted at once.

        Raises:
            InputError: If a source or an answer may be longer than the model takes.
            RuntimeError: If a step raised; the log says why.
        """
        manifest = self.bundle.manifest
        limit = manifest.default_max_new_tokens if max_new_tokens is None else max_new_tokens
        if not 1 <= limit <= manifest.max_target_tokens:
            raise InputError(f"max_new_tokens: {limit} is not in 1 to {manifest.max_target_tokens}")
        for i, source in enumerate(sources, 1):
            if len(source) > manifest.max_source_tokens:
                raise InputError(f"text {i}: {len(source)} tokens, but model {manifest.name} takes {manifest.max_source_tokens}")
        now = time.monotonic()
        for i, source in enumerate(sources):
            self.engine.submit(_ORIGIN, Request(i, source, limit, now))
        finished: dict[int, Finished] = {}
        while self.engine.has_work:
            self.engine.step()
            for report in self.engine.take_reports().values():
                finished |= {end.id: end for end in report.finished}
        if any(end.reason not in ("eos", "length") for end in finished.values()):
            raise RuntimeError("a step raised")
        return [finished[i] for i in range(len(sources))]
