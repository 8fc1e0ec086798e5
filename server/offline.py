"""Offline translation with an in-process engine, for evaluation of a bundle and benchmarks of the bare loop."""

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from dragoman.export.bundle import Bundle, Manifest
from dragoman.model.errors import InputError
from dragoman.server.engine.loading import load_engine
from dragoman.server.engine.messages import GREEDY, Finished, Request, SearchOptions
from dragoman.server.engine.settings import DeviceSettings, Limits
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.languages import PromptTemplate, PromptTemplates, decode_after
from dragoman.server.service.requests import GenerateRequest, default_max_new_tokens, has_special_tokens, search_options
from dragoman.server.service.validation import check_max_new_tokens
from dragoman.server.system import available_cores

ANYTHING = GenerateRequest()


class OfflineTranslator:
    """Translates lists of texts with a bundle, in the calling thread."""

    def __init__(
        self,
        directory: Path,
        max_slots: int = 64,
        num_threads: int = 0,
        *,
        weights_cache: str = "",
        is_warmed_up: bool = False,
    ) -> None:
        """Load a bundle, or raise `BundleError`; `num_threads` 0 means one thread per core."""
        self.bundle = Bundle.open(directory)
        self.tokenizers = self.bundle.tokenizers()
        self.templates = PromptTemplates(self.bundle.manifest)
        self._max_slots = max_slots
        limits = Limits(max_slots, prefill_tokens_per_step=4096)
        device = DeviceSettings(weights_cache=weights_cache)
        self.engine = load_engine(self.bundle, limits, num_threads or available_cores(), is_warmed_up=is_warmed_up, device=device)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.manifest.name

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle."""
        return self.bundle.manifest

    def translate(
        self,
        texts: Sequence[str],
        max_new_tokens: int | None = None,
        search: SearchOptions | None = None,
        wanted: GenerateRequest = ANYTHING,
    ) -> list[str]:
        """Return the best translation of each text, with languages and options from `wanted`, or from `search` if given.

        Raises:
            InputError: As `run`, or if `wanted` is not supported by the model.
        """
        try:
            template = self.templates.find(wanted.source_language, wanted.target_language)
            request = structs.replace(wanted, max_new_tokens=max_new_tokens)
            limit = check_max_new_tokens(request, self.manifest, 0, template)
            search = (
                search_options(request, self.manifest, self._max_slots, limit, [], template.search)
                if search is None
                else _with_prefix(search, template)
            )
            has_special = has_special_tokens(request, self.manifest, self.tokenizers)
        except InvalidRequest as error:
            raise InputError(error.message) from error
        texts = [template.task + text for text in texts] if template.task else texts
        tokenizers = self.tokenizers
        rows = [*map(tokenizers.encode_with_special_tokens, texts)] if has_special else tokenizers.source.encode_batch(texts)
        sources = [template.surround(ids) for ids in rows]
        limits = [limit] * len(sources)
        if template.has_prompts and max_new_tokens is None:
            limits = [min(limit, self._room(source, search)) for source, _ in sources]
        requests = [
            Request(i, source, most, time.monotonic(), search=search, decoder_start_id=first)
            for i, ((source, first), most) in enumerate(zip(sources, limits, strict=True))
        ]
        return [
            decode_after(self.tokenizers.target, template.before(request), end.answers[0].token_ids)
            for request, end in zip(requests, self._run(requests), strict=True)
        ]

    def run(
        self,
        sources: Sequence[list[int]],
        max_new_tokens: int | None = None,
        search: SearchOptions = GREEDY,
        decoder_start_id: int | None = None,
    ) -> list[Finished]:
        """Decode sources with end-of-sequence, or prompts without their last token, all submitted at once.

        Raises:
            InputError: If a source or an answer may exceed the model's limits, or the search needs too many slots.
            RuntimeError: If a step raised; the log has the error.
        """
        limit = default_max_new_tokens(self.manifest) if max_new_tokens is None else max_new_tokens
        now = time.monotonic()
        return self._run(
            [Request(i, source, limit, now, search=search, decoder_start_id=decoder_start_id) for i, source in enumerate(sources)]
        )

    def _run(self, requests: Sequence[Request]) -> list[Finished]:
        """Run requests numbered from 0, all submitted at once; raises as `run`."""
        for request in requests:
            self._check(request)
        for request in requests:
            self.engine.submit(request)
        finished: dict[int, Finished] = {}
        while self.engine.has_work:
            self.engine.step()
            finished |= {end.id: end for end in self.engine.take_report().finished}
        if any(end.reason not in ("eos", "length") for end in finished.values()):
            raise RuntimeError("a step raised")
        return [finished[i] for i in range(len(requests))]

    def _check(self, request: Request) -> None:
        """Raise `InputError` if the model or this engine cannot run a request."""
        manifest, search, source, limit = self.manifest, request.search, request.source_ids, request.max_new_tokens
        if len(source) + manifest.has_prompts > manifest.max_source_tokens:
            count = len(source) + manifest.has_prompts
            raise InputError(f"text {request.id + 1}: {count} tokens, but model {manifest.name} takes {manifest.max_source_tokens}")
        num_left = self._room(source, search)
        if not 1 <= limit <= num_left:
            if num_left < (least := max(limit, 1)) <= self._room([], search):
                count, room = len(source) + manifest.has_prompts, manifest.max_target_tokens
                raise InputError(
                    f"text {request.id + 1}: a prompt of {count} tokens leaves {max(num_left, 0)} to generate, not {least}; "
                    f"max_target_tokens of model {manifest.name} is {room}"
                )
            raise InputError(f"max_new_tokens: {limit} is not in 1 to {num_left}")
        max_slots = self.engine.limits.max_slots
        if search.num_slots > max_slots:
            raise InputError(f"{search.num_slots} hypotheses need more than the {max_slots} slots there are")

    def _room(self, source: Sequence[int], search: SearchOptions) -> int:
        return self.manifest.max_target_tokens - len(search.forced_prefix) - (len(source) if self.manifest.has_prompts else 0)


def _with_prefix(search: SearchOptions, template: PromptTemplate) -> SearchOptions:
    if not template.target_prefix:
        return search
    prefix = [*template.target_prefix, *search.forced_prefix]
    return structs.replace(search, forced_prefix=prefix, num_forced=len(template.target_prefix))
