"""A caller's program: everything that the package offers, used as a stranger would; strict type checkers find nothing in it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator

from dragoman import (
    Alignment,
    Answer,
    AsyncClient,
    AsyncStream,
    CallError,
    Cancelled,
    Client,
    DeadlineExceeded,
    Defaults,
    FinishReason,
    InputError,
    InternalError,
    InvalidArgument,
    Language,
    ModelInfo,
    ModelNotFound,
    Outcome,
    Overloaded,
    PermissionDenied,
    Piece,
    Request,
    Result,
    RetryPolicy,
    Scope,
    Score,
    Search,
    SearchOptions,
    Stream,
    Timings,
    TokenLogProb,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Usage,
    __version__,
)

TOLD: dict[str, object] = {"version": __version__}


def unary(client: Client) -> None:
    result: Result = client.generate(
        "ab", model="en-de", target_language="de", num_beams=4, num_return_sequences=2, suppressed_tokens=[1, 2]
    )
    reason: FinishReason = result.finish_reason
    usage: Usage = result.usage
    timings: Timings = result.timings
    best: Answer = result.answers[0]
    TOLD["unary"] = [result.text, reason, usage.source_tokens, timings.total_seconds, best.score, len(result.answers)]

    beams = Search(num_beams=5, length_penalty=0.5)
    shared: SearchOptions = {"num_beams": 2, "return_log_probs": True, "top_log_probs": 1}
    told: tuple[TokenLogProb, ...] = client.generate("ab", search=beams, **shared).answers[0].log_probs
    TOLD["log_probs"] = [[one.token, one.log_prob, len(one.top)] for one in told]


def streamed(client: Client) -> None:
    stream: Stream
    with client.stream("abcd", do_sample=True, temperature=0.5) as stream:
        pieces: list[Piece] = list(stream)
    TOLD["stream"] = [[piece.text for piece in pieces], stream.result.text]


def many(client: Client) -> None:
    texts: Iterator[str] = iter(["a", " ", "c"])
    TOLD["many"] = [result.text for result in client.generate_many(texts, concurrency=2, no_repeat_ngram_size=3)]
    outcomes: list[Outcome] = []
    with client.scope() as scope:
        kept: Scope = scope
        outcomes.extend(client.generate_batch([Request("a"), Request("b", search=Search(num_beams=2))], scope=kept))
    texts_of: dict[int, str] = {}
    for outcome in outcomes:
        if outcome.result is not None:
            texts_of[outcome.index] = outcome.result.text
    TOLD["batch"] = [texts_of[index] for index in sorted(texts_of)]


def scored(client: Client) -> None:
    score: Score = client.score("ab", "cd", return_alignment=True, return_word_alignment=True)
    alignment: Alignment | None = score.alignment
    TOLD["score"] = [score.log_prob, score.word_alignment, None if alignment is None else len(alignment.weights)]


def described(client: Client) -> None:
    models: list[ModelInfo] = client.models()
    TOLD["models"] = [model.name for model in models]
    languages: tuple[Language, ...] = models[0].target_languages
    defaults: Defaults = models[0].defaults
    beams: int | None = defaults.num_beams
    TOLD["defaults"] = [[language.code for language in languages], beams]
    TOLD["ready"] = [client.model("en-de").is_ready, client.is_ready()]


def failed(client: Client) -> None:
    kinds: tuple[type[CallError], ...] = (
        Cancelled,
        DeadlineExceeded,
        InternalError,
        InvalidArgument,
        Overloaded,
        PermissionDenied,
        TooLarge,
        Unauthenticated,
        Unavailable,
        Unimplemented,
    )
    try:
        client.model("en-xx")
    except kinds:
        TOLD["error"] = "of another kind"
    except ModelNotFound as error:
        wait: float | None = error.retry_after_seconds
        TOLD["error"] = [error.code, error.message.partition(":")[0], wait]
    TOLD["input_error"] = issubclass(InputError, ValueError)


async def asynchronous(target: str) -> None:
    async def texts() -> AsyncIterator[str]:
        for text in ("a", "", "c"):
            yield text

    async with AsyncClient(target, retry=RetryPolicy(max_attempts=2), timeout_seconds=30.0) as client:
        result: Result = await client.generate("ab", num_beams=4)
        stream: AsyncStream = client.stream("abcd", num_beams=1)
        pieces: list[Piece] = [piece async for piece in stream]
        answers: list[str] = [answer.text async for answer in client.generate_many(texts(), num_beams=2)]
        batch: list[str | None] = []
        async for outcome in client.generate_batch([Request("a")]):
            batch.append(None if outcome.result is None else outcome.result.text)
        score: Score = await client.score("ab", "cd")
        names: list[str] = [model.name for model in await client.models()]
    TOLD["async"] = [result.text, [piece.text for piece in pieces], stream.result.text, answers, batch, score.score, names]


def main(target: str) -> None:
    with Client(target) as client:
        for part in (unary, streamed, many, scored, described, failed):
            part(client)
    asyncio.run(asynchronous(target))
    json.dump(TOLD, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
