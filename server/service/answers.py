"""Protocol-independent answers, built from engine events, and the mapping of failed outcomes to errors."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct

from dragoman.model.text.tokenizer import Tokenizer
from dragoman.server.engine import messages
from dragoman.server.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmet,
    QueueFull,
    ServiceError,
    StepFailed,
    Unavailable,
)
from dragoman.server.service.callers import RETRY_SECONDS, Caller
from dragoman.server.service.context import Call
from dragoman.server.service.languages import PromptTemplate, decode_after
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.sentences import has_several

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest
    from dragoman.server.models.loaded import LoadedModel

SEVERAL_SENTENCES = "text: has several sentences; this model knows one at a time and may leave some out"


class TokenLogProb(NamedTuple):
    """A token and its log-probability (natural); a tuple because an answer may have thousands.

    `piece` is UTF-8, possibly of a partial character, and empty for end-of-sequence.
    """

    token: int
    piece: bytes
    log_prob: float
    top: Sequence["TokenLogProb"] = ()


class Answer(Struct, frozen=True):
    """One generated sequence; `tokens` have the forced prefix and no end-of-sequence.

    `log_probs`, empty unless requested, are of each generated token including end-of-sequence, without the forced prefix.
    """

    text: str
    tokens: Sequence[int]
    finish_reason: Literal["eos", "length"]
    score: float
    log_probs: Collection[TokenLogProb] = ()


class Timings(Struct, frozen=True):
    """Durations of a request's phases."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


class Generated(Struct, frozen=True):
    """The whole answer to a request, the best sequence first; `warnings` are English sentences.

    Attributes:
        source_tokens: Tokens of the source, or of the whole prompt.
        generated_tokens: Tokens generated for all answers.
        seed: Seed of sampling; None for other searches.
        shortlist_tokens: Size of the shortlist; 0 for the whole vocabulary.
    """

    request_id: str
    model: str
    model_version: str
    answers: Sequence[Answer]
    is_truncated: bool
    source_tokens: int
    generated_tokens: int
    timings: Timings
    seed: int | None
    shortlist_tokens: int = 0
    warnings: Sequence[str] = ()

    @property
    def best(self) -> Answer:
        """The best answer."""
        return self.answers[0]


class Piece(Struct, frozen=True):
    """A part of a streamed answer: text without partial characters; the last piece has the whole answer as `result`."""

    text: str
    tokens: Sequence[int]
    result: Generated | None = None


def to_generated(
    request: GenerateRequest,
    call: Call,
    model: "LoadedModel",
    sequence: messages.Request,
    template: PromptTemplate,
    finished: messages.Finished,
    text: str | None = None,
    *,
    is_truncated: bool = False,
) -> Generated:
    """Return the answer to a request; `text` is the first answer's text, if already decoded."""
    assert finished.admitted is not None and finished.first_token is not None, "an answer was decoded"
    manifest, sampling, arrival = model.manifest, sequence.search.sampling, sequence.arrival
    tokenizer, before = model.tokenizers.target, template.before(sequence)
    texts = [decode_after(tokenizer, before, answer.token_ids) for answer in finished.answers[text is not None :]]
    if text is not None:
        texts.insert(0, text)
    one_sentence = manifest.one_sentence if model.traits.one_sentence is None else model.traits.one_sentence
    return Generated(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        answers=[
            Answer(
                text,
                answer.token_ids,
                answer.reason,
                answer.score,
                LogProbs(tokenizer, manifest.eos_id, sequence.search, answer) if request.has_log_probs else (),
            )
            for answer, text in zip(finished.answers, texts, strict=True)
        ],
        is_truncated=is_truncated,
        source_tokens=call.source_tokens,
        generated_tokens=finished.num_generated,
        timings=Timings(
            queue_seconds=finished.admitted - arrival,
            prefill_seconds=finished.prefill_seconds,
            decode_seconds=finished.ended - finished.first_token,
            time_to_first_token_seconds=finished.first_token - arrival,
            total_seconds=time.monotonic() - arrival,
        ),
        seed=None if sampling is None else sampling.seed,
        shortlist_tokens=shortlist_tokens(manifest),
        warnings=(SEVERAL_SENTENCES,) if one_sentence and has_several(request.text) else (),
    )


def shortlist_tokens(manifest: "Manifest") -> int:
    """Return the size of a model's shortlist; 0 if it uses the whole vocabulary."""
    return manifest.num_choices if manifest.num_choices < manifest.target_vocab_size else 0


class LogProbs(Collection[TokenLogProb]):
    """Log-probabilities of an answer's generated tokens; built lazily, since an answer may have hundreds of thousands."""

    def __init__(self, tokenizer: Tokenizer, eos_id: int, search: messages.SearchOptions, answer: messages.Answer) -> None:
        self._tokenizer, self._answer = tokenizer, answer
        generated = answer.token_ids[len(search.forced_prefix) :]
        self._ids = [*generated, eos_id] if answer.reason == "eos" else generated
        self._has_top = search.num_top_log_probs > 0

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, wanted: object) -> bool:
        return any(wanted == own for own in self)

    def __iter__(self) -> Iterator[TokenLogProb]:
        answer = self._answer
        plain = token_log_probs(self._tokenizer, self._ids, answer.log_probs)
        if not self._has_top:
            yield from plain
            return
        for (token, piece, log_prob, _), top_ids, top_log_probs in zip(plain, answer.top_ids, answer.top_log_probs, strict=True):
            yield TokenLogProb(token, piece, log_prob, tuple(token_log_probs(self._tokenizer, top_ids, top_log_probs)))


def token_log_probs(tokenizer: Tokenizer, ids: Sequence[int], log_probs: Sequence[float]) -> Iterator[TokenLogProb]:
    """Yield each token with its log-probability."""
    for token, log_prob in zip(ids, log_probs, strict=True):
        yield TokenLogProb(token, tokenizer.token_bytes(token), log_prob)


def error_of(outcome: messages.Finished | messages.Scored, call: Call) -> ServiceError:
    """Return the error for an outcome without an answer."""
    retry_after_seconds = outcome.retry_after_seconds
    # Name the server's own deadline.
    deadline = f"the server's deadline ({call.deadline_limit} seconds)" if call.deadline_limit else "the deadline"
    match outcome.reason:
        case "deadline" | "deadline_unmet" if isinstance(outcome, messages.Scored):
            return DeadlineExceeded(f"{deadline} passed before the pair was scored")
        case "deadline" if isinstance(outcome, messages.Finished):
            return DeadlineExceeded(f"{deadline} passed after {outcome.num_generated} tokens")
        case "deadline_unmet" if isinstance(outcome, messages.Finished):
            needed = f"about {outcome.needed_seconds:.3g} s are needed"
            return DeadlineUnmet(f"refused before any work: {needed}, more than {deadline} leaves")
        case "queue_full" if outcome.limit and call.caller is not None:
            return place_refused(call.caller, outcome.limit, retry_after_seconds)
        case "queue_full":
            waiting = "pairs are waiting to be scored" if isinstance(outcome, messages.Scored) else "requests are waiting"
            return QueueFull(f"too many {waiting}", retry_after_seconds, limit=outcome.limit)
        case "step_failed":
            work = "scoring" if isinstance(outcome, messages.Scored) else "generation"
            return StepFailed(f"{work} failed; quote incident {outcome.incident}")
        case "lost":
            return Unavailable("the engine that had the request ended", retry_after_seconds)
        case "not_loaded":
            return Unavailable("the model cannot score at the moment", retry_after_seconds)
        case "cancelled":
            return Cancelled("the request was cancelled")
        case "draining":
            return Unavailable("the model's engine is shutting down", retry_after_seconds=RETRY_SECONDS)
        case reason:
            raise AssertionError(f"{reason} is an answer")


def place_refused(caller: Caller, limit: str, retry_after_seconds: float | None) -> ServiceError:
    """Count a refusal by the caller's queue limit (`max_waiting` or `max_slots`) and return its error."""
    reason = "the request needs more slots" if limit == "max_slots" else "too many requests are waiting"
    return caller.limit_reached(limit, reason, RETRY_SECONDS if retry_after_seconds is None else retry_after_seconds)
