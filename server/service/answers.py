"""Protocol-independent answers, built from engine events; upper bounds of their sizes; and the errors of failed outcomes."""

import time
from collections.abc import Collection, Iterator, Sequence
from heapq import nlargest
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from msgspec import Struct

from dragoman.model.text.tokenizer import Tokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine import messages
from dragoman.server.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmet,
    InvalidRequest,
    QueueFull,
    ServiceError,
    StepFailed,
    Unavailable,
)
from dragoman.server.service.alignment import Link, links
from dragoman.server.service.callers import RETRY_SECONDS, Caller
from dragoman.server.service.context import Call
from dragoman.server.service.languages import PromptTemplate, decode_after
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.sentences import has_several
from dragoman.server.service.terms import Match, unmet_terms

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest
    from dragoman.server.models.loaded import LoadedModel

SEVERAL_SENTENCES = "text: has several sentences; this model knows one at a time and may leave some out"
# More than a position's likeliest tokens can be.
MAX_COUNTED = 64


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

    `log_probs`, empty unless requested, are of each generated token including end-of-sequence, without the forced prefix. `links`,
    too, are empty unless requested.
    `unmet_terms` are the sources of terms that it should have and has not.
    """

    text: str
    tokens: Sequence[int]
    finish_reason: Literal["eos", "length"]
    score: float
    log_probs: Collection[TokenLogProb] = ()
    links: Sequence[Link] = ()
    unmet_terms: Sequence[str] = ()


class Timings(Struct, frozen=True):
    """Durations of a request's phases."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


class Segment(Struct, frozen=True):
    """A part of a text that was translated alone: its place, and its answer's, in characters (code points).

    `is_cut` says that a sentence too long for the model goes on in the next segment.
    """

    source_start: int
    source_end: int
    target_start: int
    target_end: int
    score: float
    is_cut: bool = False


class Generated(Struct, frozen=True):
    """The whole answer to a request, the best sequence first; `warnings` are English sentences.

    Attributes:
        source_tokens: Tokens of the source, or of the whole prompt.
        generated_tokens: Tokens generated for all answers.
        seed: Seed of sampling; None for other searches.
        shortlist_tokens: Size of the shortlist; 0 for the whole vocabulary.
        segments: Segments of a text that was divided, of its first answer. Tokens and durations are then of all of them, scores are
            their mean, the time to the first token is that of the first.
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
    segments: Sequence[Segment] = ()

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
    terms: Sequence[Match] = (),
) -> Generated:
    """Return the answer to a request; `text` is the first answer's text, if already decoded, `terms` are those of its source."""
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
                _links(request, model, sequence, answer, text),
                unmet_terms(terms, text) if terms else (),
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


def _links(
    request: GenerateRequest, model: "LoadedModel", sequence: messages.Request, answer: messages.Answer, text: str
) -> Sequence[Link]:
    """Return the links of an answer to its source; none unless requested."""
    if sequence.text_range is None:
        return ()
    ids = sequence.source_ids[slice(*sequence.text_range)]
    return links(model.tokenizers, ids, request.text, answer.token_ids, text, answer.alignment)


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


class AnswerShape(Struct, frozen=True):
    """Upper bounds of an answer; `num_tokens` include the forced prefix, text and pieces are in UTF-8 bytes.

    `num_told` tokens have log-probabilities and `num_top` likeliest tokens each, which are all different (`top_piece_bytes`).
    """

    num_answers: int
    num_tokens: int
    text_bytes: int
    max_token: int
    num_told: int = 0
    piece_bytes: int = 0
    num_top: int = 0
    top_piece_bytes: int = 0


class ScoresShape(Struct, frozen=True):
    """Upper bounds of scores with alignment weights."""

    num_source: int
    num_target: int
    source_bytes: int
    target_bytes: int
    max_token: int


class AnswerLimit(Protocol):
    """Answer size limit of a protocol adapter."""

    @property
    def max_bytes(self) -> int:
        """Largest answer in bytes; each protocol adapter has its own."""
        ...

    @property
    def name(self) -> str:
        """Name of the limiting setting."""
        ...

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return the most bytes of an answer of this shape."""
        ...

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Return the most bytes of scores of this shape."""
        ...


class TokenSizes(Struct, frozen=True):
    """Byte sizes of a tokeniser's tokens.

    `longest_text` is the most that one token can add (a partial character may become U+FFFD), `together` the cumulative bytes of
    the longest 0, 1, 2, … tokens.
    """

    longest_text: int
    together: Sequence[int]

    @classmethod
    def measured(cls, tokenizer: Tokenizer) -> "TokenSizes":
        """Return the sizes for a tokeniser; takes 0.1 s for a large vocabulary."""
        pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        texts = (len(piece) if piece.isascii() else len(piece.decode(errors="replace").encode()) for piece in pieces)
        longest = nlargest(MAX_COUNTED, map(len, pieces))
        return cls(max(texts), (0, *accumulate(longest)))

    @property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return self.together[1]

    def longest_together(self, count: int) -> int:
        """Return the most bytes that `count` different tokens can have."""
        return (
            self.together[count]
            if count < len(self.together)
            else self.together[-1] + (count + 1 - len(self.together)) * self.longest
        )


def check_answer(
    search: messages.SearchOptions, max_new_tokens: int, has_log_probs: bool, sizes: TokenSizes, vocabulary: int, limit: AnswerLimit
) -> None:
    """Check that the largest possible answer can be sent; raise `InvalidRequest`, naming the fields and the limit.

    Not for single answers without details, so that a server with a low limit still serves short ones.
    """
    num_tokens = len(search.forced_prefix) + max_new_tokens
    num_told, num_top = (max_new_tokens, search.num_top_log_probs) if has_log_probs else (0, 0)
    shape = AnswerShape(
        num_answers=search.num_answers,
        num_tokens=num_tokens,
        text_bytes=num_tokens * sizes.longest_text,
        max_token=max(0, vocabulary - 1),
        num_told=num_told,
        piece_bytes=sizes.longest,
        num_top=num_top,
        top_piece_bytes=sizes.longest_together(num_top),
    )
    size = limit.answer_bytes(shape)
    if size <= limit.max_bytes:
        return
    asked = f"num_return_sequences of {search.num_answers} and max_new_tokens of {max_new_tokens}"
    if num_top:
        field, asked = "top_log_probs", f"{num_top} with {asked}"
    elif has_log_probs:
        field, asked = "return_log_probs", f"with {asked}"
    else:
        field, asked = "num_return_sequences", f"{search.num_answers} with max_new_tokens of {max_new_tokens}"
    raise InvalidRequest(field, f"{asked} may take {size} bytes; {limit.name} of the server is {limit.max_bytes}")


def check_scores(request: messages.ScoreRequest, tokenizers: Tokenizers, vocabulary: int, limit: AnswerLimit) -> None:
    """Check that scores with alignment weights can be sent; raise `InvalidRequest`, naming the limit."""
    num_source, num_target = len(request.source_ids), len(request.target_ids)
    shape = ScoresShape(
        num_source=num_source,
        num_target=num_target,
        source_bytes=sum(map(len, map(tokenizers.source.token_bytes, request.source_ids))),
        target_bytes=sum(map(len, map(tokenizers.target.token_bytes, request.target_ids))),
        max_token=max(0, vocabulary - 1),
    )
    size = limit.scores_bytes(shape)
    if size > limit.max_bytes:
        asked = f"the scores of {num_target} target and {num_source} source tokens may take {size} bytes"
        raise InvalidRequest("return_alignment", f"{asked}; {limit.name} of the server is {limit.max_bytes}")


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
