"""What callers get, in no protocol's terms, and how it is made of what the engine reports."""

import time
from collections.abc import Collection, Iterator, Sequence
from typing import Literal, NamedTuple

from msgspec import Struct

from dragoman.model.text.tokenizer import Tokenizer
from dragoman.server.engine import messages
from dragoman.server.service.context import Call
from dragoman.server.service.languages import decode_after
from dragoman.server.service.ports import Model
from dragoman.server.service.sentences import has_several
from dragoman.server.service.validation import Prepared

SEVERAL_SENTENCES = "text: has several sentences; this model knows one at a time and may leave some out"


class TokenLogProb(NamedTuple):
    """A token and how likely it was; a tuple, since an answer may have thousands of them.

    Attributes:
        token: Its id.
        piece: Its text in UTF-8, perhaps a part of a character; empty for end-of-sequence.
        log_prob: Natural logarithm of its probability, as the model gives it.
        top: The likeliest tokens at its position, if asked for.
    """

    token: int
    piece: bytes
    log_prob: float
    top: Sequence["TokenLogProb"] = ()


class Answer(Struct, frozen=True):
    """One generated sequence.

    Attributes:
        text: What it says.
        tokens: Its ids, the forced prefix included, end-of-sequence not.
        finish_reason: Whether it ended by itself.
        score: What answers are ranked by.
        log_probs: Of each generated token, end-of-sequence included, the forced prefix not; empty unless asked for.
    """

    text: str
    tokens: Sequence[int]
    finish_reason: Literal["eos", "length"]
    score: float
    log_probs: Collection[TokenLogProb] = ()


class Timings(Struct, frozen=True):
    """Where a request's time went, in seconds."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


class Generated(Struct, frozen=True):
    """All that a request is answered with.

    Attributes:
        request_id: The caller's or ours.
        model: Name of the model that answered.
        model_version: Of its bundle.
        answers: The best one first; at least one.
        is_truncated: Whether the source was cut.
        source_tokens: Tokens of the source; of a prompt, all of them.
        generated_tokens: Tokens generated for all answers.
        timings: Where the time went.
        seed: What samples were drawn with; None for other searches.
        shortlist_tokens: Tokens that the answers were chosen from; 0 for the whole vocabulary.
        warnings: What a person should know of the answer, in English.
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
        """The first answer."""
        return self.answers[0]


class Piece(Struct, frozen=True):
    """What is new of a streamed answer.

    Attributes:
        text: What follows the pieces before; never half a character.
        tokens: Ids that follow those before.
        result: The whole answer, in the last piece only.
    """

    text: str
    tokens: Sequence[int]
    result: Generated | None = None


def to_generated(call: Call, source: str, model: Model, prepared: Prepared, finished: messages.Finished, text: str) -> Generated:
    """Return what a request is answered with.

    Args:
        call: The request's record.
        source: Its text.
        model: What answered.
        prepared: The request.
        finished: How it ended.
        text: Text of the first answer.
    """
    request = prepared.request
    admitted = request.arrival if finished.admitted is None else finished.admitted
    first_token = finished.ended if finished.first_token is None else finished.first_token
    before = prepared.frame.before(request)
    texts = [text, *(decode_after(model.tokenizers.target, before, answer.token_ids) for answer in finished.answers[1:])]
    sampling = request.search.sampling
    return Generated(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        answers=[_to_answer(model, prepared, *pair) for pair in zip(finished.answers, texts, strict=True)],
        is_truncated=prepared.is_truncated,
        source_tokens=prepared.frame.num_source_tokens(request.source_ids),
        generated_tokens=finished.num_generated,
        timings=Timings(
            queue_seconds=admitted - request.arrival,
            prefill_seconds=finished.prefill_seconds,
            decode_seconds=finished.ended - first_token,
            time_to_first_token_seconds=first_token - request.arrival,
            total_seconds=time.monotonic() - request.arrival,
        ),
        seed=None if sampling is None else sampling.seed,
        shortlist_tokens=shortlist_tokens(model),
        warnings=_warnings(source, model),
    )


def _warnings(source: str, model: Model) -> Sequence[str]:
    own = model.traits.one_sentence
    is_of_one = model.manifest.one_sentence if own is None else own
    return (SEVERAL_SENTENCES,) if is_of_one and has_several(source) else ()


def shortlist_tokens(model: Model) -> int:
    """Return the length of a model's shortlist; 0 where it chooses from its whole vocabulary."""
    manifest = model.manifest
    return manifest.num_choices if manifest.num_choices < manifest.target_vocab_size else 0


class LogProbs(Collection[TokenLogProb]):
    """The log-probabilities of an answer's generated tokens, with the likeliest ones beside them if they were wanted.

    Each is made when it is looked at: an answer may have hundreds of thousands, which all together would take more time and memory
    than neighbours can do without.
    """

    def __init__(self, model: Model, prepared: Prepared, answer: messages.Answer) -> None:
        """Tell what an answer has of them.

        Args:
            model: What answered.
            prepared: The request.
            answer: What the engine reports.
        """
        self._tokenizer = model.tokenizers.target
        self._answer = answer
        generated = answer.token_ids[len(prepared.request.search.forced_prefix) :]
        self._ids = [*generated, model.manifest.eos_id] if answer.reason == "eos" else generated
        self._has_top = prepared.request.search.num_top_log_probs > 0

    def __len__(self) -> int:
        """Return the number of tokens told."""
        return len(self._ids)

    def __contains__(self, told: object) -> bool:
        """Say whether this is told of one of the tokens."""
        return any(told == own for own in self)

    def __iter__(self) -> Iterator[TokenLogProb]:
        """Tell one after another."""
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


def _to_answer(model: Model, prepared: Prepared, answer: messages.Answer, text: str) -> Answer:
    """Return one answer, with log-probabilities if they are wanted."""
    told = LogProbs(model, prepared, answer) if prepared.has_log_probs else ()
    return Answer(text, answer.token_ids, answer.reason, answer.score, told)
