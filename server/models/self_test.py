"""Self-test of a running engine: it must reproduce the sample answers of its bundle, exactly or within a tolerance.

On the samples' platform all bits must agree: CPU answers depend neither on the batch nor on the number of threads. Elsewhere let
l be a sample's log-probability of a token, m the engine's, and t the tolerance, which covers the errors of both
(`dragoman.export.answering`): |m − l| ≤ t for each token after the same prefix. Where the sample chose a and the engine b,
l(a) ≥ l(b) and m(b) ≥ m(a); both may be right if |m(a) − l(a)| ≤ t and |m(b) − l(b)| ≤ t. Both report their top-k tokens; any
other token lies at or below the last of them. Later tokens have another prefix and are not compared. All scores are compared.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dragoman.export.bundle import Bundle, BundleError, Manifest
from dragoman.export.processor import Platform
from dragoman.export.samples import NUM_CANDIDATES, Candidate, Sample, Samples, ScoredSample, read_samples
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.dispatch.calls import Calls
from dragoman.server.engine.messages import Answer, Finished, Request, Scored, ScoreRequest, SearchOptions
from dragoman.server.errors import ServiceError


class ProofFailed(Exception):
    """An engine does not reproduce its bundle's answers; the message is a line with the sample and the difference."""


@dataclass(slots=True)
class Found:
    """Counts of a comparison."""

    num_answers: int = 0
    num_tokens: int = 0
    num_parted: int = 0  # answers that diverged from their samples at tokens of equal probability, within the tolerance
    num_pairs: int = 0  # compared scores
    max_difference: float = 0.0  # largest difference of a log-probability


class SampleComparison:
    """Compares answers and scores with samples; raises `ProofFailed` where they differ."""

    def __init__(self, eos_id: int, tolerance: float, is_exact: bool, are_scores_exact: bool) -> None:
        self._eos_id, self._tolerance = eos_id, tolerance
        self._is_exact, self._are_scores_exact = is_exact, are_scores_exact
        self.found = Found()

    def compare_answer(self, name: str, sample: Sample, answer: Answer) -> None:
        """Compare an answer with its sample; `name` is for messages."""
        ids = generated_ids(name, answer, sample.target_prefix, self._eos_id)
        self.found.num_answers += 1
        for place, (token, expected) in enumerate(zip(ids, sample.ids, strict=False)):
            listed = _listed(answer, place)
            at, log_prob, wanted = f"{name}, token {place + 1}", answer.log_probs[place], sample.log_probs[place]
            if self._is_exact and listed and listed[: len(sample.candidates[place])] != sample.candidates[place]:
                raise ProofFailed(f"{at}: {_shown(listed)} instead of {_shown(sample.candidates[place])}, bit for bit")
            if token != expected:
                self._check_parting(at, (token, log_prob), (expected, wanted), listed, sample.candidates[place])
                self.found.num_parted += 1
                return
            self._check(at, token, log_prob, wanted, self._is_exact)
            self.found.num_tokens += 1
        if len(ids) != len(sample.ids):
            raise ProofFailed(f"{name} has {len(ids)} tokens instead of {len(sample.ids)}")

    def compare_score(self, name: str, pair: ScoredSample, log_probs: Sequence[float]) -> None:
        """Compare the log-probabilities of a target; `name` is for messages."""
        check_finite(name, log_probs, len(pair.target))
        self.found.num_pairs += 1
        for place, row in enumerate(zip(pair.target, log_probs, pair.log_probs, strict=True)):
            self._check(f"{name}, token {place + 1}", *row, self._are_scores_exact)

    def _check(self, at: str, token: int, log_prob: float, wanted: float, is_exact: bool) -> None:
        difference = abs(log_prob - wanted)
        self.found.max_difference = max(self.found.max_difference, difference)
        if is_exact and log_prob != wanted:
            raise ProofFailed(f"{at}: {token} has {log_prob:.9g} instead of {wanted:.9g}, bit for bit")
        if difference > self._tolerance:
            raise ProofFailed(f"{at}: {token} has {log_prob:.6g} instead of {wanted:.6g}; the tolerance is {self._tolerance:.3g}")

    def _check_parting(
        self, at: str, found: Candidate, expected: Candidate, listed: Sequence[Candidate], candidates: Sequence[Candidate]
    ) -> None:
        """Reject a different token, unless both runs may be right."""
        off = f"{at}: {found[0]} ({found[1]:.6g}) instead of {expected[0]} ({expected[1]:.6g})"
        if self._is_exact:
            raise ProofFailed(f"{off}, bit for bit")
        here, there = dict(listed), dict(candidates)
        of_expected = here.get(expected[0], _lowest(listed))
        is_far = of_expected < expected[1] - self._tolerance
        is_far |= expected[0] in here and of_expected > expected[1] + self._tolerance
        of_found = there.get(found[0], _lowest(candidates))
        is_far |= found[1] > of_found + self._tolerance
        is_far |= found[0] in there and found[1] < of_found - self._tolerance
        if is_far:
            raise ProofFailed(f"{off}; the tolerance is {self._tolerance:.3g}")
        of_both = [(here[token], there[token]) for token in (found[0], expected[0]) if token in here and token in there]
        self.found.max_difference = max(self.found.max_difference, *(abs(a - b) for a, b in of_both), 0.0)


def generated_ids(name: str, answer: Answer, target_prefix: Sequence[int], eos_id: int) -> list[int]:
    """Return the tokens of an answer that have log-probabilities: without the forced prefix, with end-of-sequence."""
    number = len(target_prefix)
    if answer.token_ids[:number] != [*target_prefix]:
        raise ProofFailed(f"{name} does not begin with the forced prefix")
    ids = [*answer.token_ids[number:], *([eos_id] if answer.reason == "eos" else [])]
    check_finite(name, answer.log_probs, len(ids))
    return ids


def check_finite(name: str, log_probs: Sequence[float], number: int) -> None:
    """Raise `ProofFailed` unless there is one finite log-probability for each token."""
    if len(log_probs) != number:
        raise ProofFailed(f"{name} has {number} tokens with {len(log_probs)} log-probabilities")
    for place, value in enumerate(log_probs, 1):
        if not math.isfinite(value):
            raise ProofFailed(f"{name}, token {place}: the log-probability is {value}")


def _listed(answer: Answer, place: int) -> list[Candidate]:
    """Return the reported top-k tokens at a position that have a non-zero probability."""
    if place >= len(answer.top_ids) or place >= len(answer.top_log_probs):
        return []
    return [
        (token, value)
        for token, value in zip(answer.top_ids[place], answer.top_log_probs[place], strict=False)
        if value > -math.inf
    ]


def _lowest(candidates: Sequence[Candidate]) -> float:
    """Return the upper bound on tokens that are not among top-k candidates; -inf if there are no others."""
    if not candidates:
        return math.inf
    return candidates[-1][1] if len(candidates) >= NUM_CANDIDATES else -math.inf


def _shown(candidates: Sequence[Candidate]) -> str:
    return " ".join(f"{token} ({value:.9g})" for token, value in candidates)


PROOF_SECONDS = 60.0
CPU = "cpu"
NUM_PROBE_TOKENS, NUM_PROBE_IDS = 8, 6

Ask = Callable[[], Awaitable[None]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a passed self-test."""

    is_proved: bool  # whether there were sample answers; otherwise only finite numbers were checked
    is_exact: bool  # whether all bits had to agree
    tolerance: float
    found: Found
    seconds: float


async def prove(
    bundle: Bundle,
    tokenizers: Tokenizers,
    engine: Calls,
    platform: Platform,
    device: str = CPU,
    *,
    seconds: float = PROOF_SECONDS,
) -> Proof:
    """Compare a running engine's answers with its bundle's samples, one alone and then all at once.

    Samples that the engine's queue rejects are retried once after the others, then skipped; at least one answer must be compared.
    The tokenizers must encode and decode the samples' texts as at export.

    Raises:
        ProofFailed: If an answer differs or is missing within `seconds`, or the samples cannot be read.
    """
    started = time.monotonic()
    try:
        samples = await asyncio.to_thread(_read, bundle, tokenizers)
    except BundleError as error:
        raise ProofFailed(str(error)) from error
    asking = _Asking(engine)
    try:
        async with asyncio.timeout(seconds):
            if samples is None:
                is_exact, tolerance, found = False, 0.0, await _probe(asking, bundle.manifest)
            else:
                is_exact, tolerance = device == CPU and platform.is_same_as(samples.platform), samples.tolerance
                are_scores_exact = is_exact and samples.are_scores_exact
                comparison = SampleComparison(bundle.manifest.eos_id, tolerance, is_exact, are_scores_exact)
                found = await _compare(asking, samples, bundle.manifest, comparison, is_exact)
    except TimeoutError:
        raise ProofFailed(f"{asking.first_waiting} is not answered within {seconds:g} s") from None
    except ServiceError as error:
        raise ProofFailed(f"{asking.first_waiting} is not answered: {error.message}") from error
    return Proof(samples is not None, is_exact, tolerance, found, time.monotonic() - started)


def _read(bundle: Bundle, tokenizers: Tokenizers) -> Samples | None:
    samples = read_samples(bundle.directory, bundle.manifest)
    if samples is not None:
        try:
            samples.check_texts(tokenizers)
        except ValueError as error:
            raise ProofFailed(str(error)) from None
    return samples


async def _compare(asking: "_Asking", samples: Samples, manifest: Manifest, comparison: SampleComparison, is_exact: bool) -> Found:
    """Compare the longest sample alone, then all together (without top-k if exact, as in most requests), then the scores."""
    num_told = min(NUM_CANDIDATES, manifest.num_choices)

    def of_sample(name: str, sample: Sample, num_told: int) -> Ask:
        async def ask() -> None:
            prefix, start = sample.target_prefix, sample.decoder_start_id
            answer = await asking.answer(name, sample.source, samples.max_new_tokens, num_told, prefix, start)
            comparison.compare_answer(name, sample, answer)

        return ask

    def of_pair(name: str, pair: ScoredSample) -> Ask:
        async def ask() -> None:
            log_probs = await asking.score(name, pair.source, pair.target, pair.decoder_start_id)
            comparison.compare_score(name, pair, log_probs)

        return ask

    named = [(f"sample {number}", sample) for number, sample in enumerate(samples.samples, 1)]
    longest = max(named, key=lambda row: len(row[1].source))
    await _ask_all([of_sample(f"{longest[0]} alone", longest[1], num_told)])
    await _ask_all([of_sample(name, sample, 0 if is_exact else num_told) for name, sample in named])
    await _ask_all([of_pair(f"pair {number}", pair) for number, pair in enumerate(samples.pairs, 1)])
    if not comparison.found.num_answers:
        raise ProofFailed("no sample finds a place in the engine's queue")
    return comparison.found


async def _probe(asking: "_Asking", manifest: Manifest) -> Found:
    ids = [token for token in range(manifest.source_vocab_size) if token not in (manifest.eos_id, manifest.pad_id)]
    sources = [[manifest.eos_id], [*ids[:: max(len(ids) // NUM_PROBE_IDS, 1)][:NUM_PROBE_IDS], manifest.eos_id]]
    sources = [source[-manifest.max_source_tokens :] for source in sources]
    room = manifest.max_target_tokens
    if manifest.has_prompts:  # prompt and answer share the target positions
        sources = [source[: room - 1] for source in sources]
        room -= max(map(len, sources))
    limit = min(NUM_PROBE_TOKENS, room)
    found = Found()

    def of_source(name: str, source: list[int]) -> Ask:
        async def ask() -> None:
            answer = await asking.answer(name, source, limit, 0)
            found.num_tokens += len(generated_ids(name, answer, [], manifest.eos_id))
            found.num_answers += 1

        return ask

    async def score() -> None:
        target = [manifest.eos_id]
        check_finite("the probe's pair", await asking.score("the probe's pair", sources[0], target, None), len(target))
        found.num_pairs += 1

    await _ask_all([of_source(f"probe {number}", source) for number, source in enumerate(sources, 1)])
    await _ask_all([score])
    if not found.num_answers:
        raise ProofFailed("no probe finds a place in the engine's queue")
    return found


class _NoPlaceError(Exception):
    """The engine's queue is full."""


async def _ask_all(asks: Sequence[Ask]) -> None:
    """Run all at once, then retry one by one those that the queue rejected; a failure cancels the others."""
    full: list[Ask] = []

    async def ask_once(ask: Ask) -> None:
        try:
            await ask()
        except _NoPlaceError:
            full.append(ask)

    tasks = [asyncio.ensure_future(ask_once(ask)) for ask in asks]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    again, full = full, []
    for ask in again:
        await ask_once(ask)


class _Asking:
    """Sends requests to an engine and tracks the unanswered ones."""

    def __init__(self, engine: Calls) -> None:
        self._engine = engine
        self._waiting: dict[int, str] = {}
        self._last = ""

    @property
    def first_waiting(self) -> str:
        """Name of the oldest unanswered request, or of the last request."""
        return next(iter(self._waiting.values()), self._last)

    async def answer(
        self, name: str, source: list[int], limit: int, num_told: int, prefix: Sequence[int] = (), start: int | None = None
    ) -> Answer:
        """Return the greedy answer to source ids with end-of-sequence, and `num_told` top-k tokens for each position."""
        search = SearchOptions(forced_prefix=[*prefix], num_forced=len(prefix), num_top_log_probs=num_told)
        number, now = self._engine.next_id(), time.monotonic()
        request = Request(number, source, limit, now, search=search, decoder_start_id=start)
        finished: Finished = await self._named(name, request.id, self._engine.generate(request))
        _check_end(name, finished)
        if len(finished.answers) != 1:
            raise ProofFailed(f"{name} has {len(finished.answers)} answers")
        return finished.answers[0]

    async def score(self, name: str, source: list[int], target: list[int], start: int | None) -> list[float]:
        request = ScoreRequest(self._engine.next_id(), source, target, time.monotonic(), decoder_start_id=start)
        scored: Scored = await self._named(name, request.id, self._engine.score(request))
        _check_end(name, scored)
        return scored.log_probs

    async def _named(self, name: str, number: int, answer: Awaitable[T]) -> T:
        """Wait for an answer; a request that fails stays in `_waiting`, for the message."""
        self._waiting[number] = self._last = name
        result = await answer
        del self._waiting[number]
        return result


def _check_end(name: str, end: Finished | Scored) -> None:
    """Raise unless the end is an answer."""
    if end.reason == "queue_full":
        raise _NoPlaceError
    if end.reason not in ("eos", "length"):
        incident = f", incident {end.incident}" if end.incident else ""
        raise ProofFailed(f"{name} ended as {end.reason}{incident}")
