"""Callers of every kind, who never try again: each answer is kept with its version and its times."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from dragoman.v1 import generation_pb2, generation_pb2_grpc

CALL_SECONDS = 60.0
BATCH_SIZE, NUM_BEAMS = 4, 4
MIX: Mapping[str, float] = {"unary": 0.55, "stream": 0.2, "batch": 0.05, "beams": 0.1, "score": 0.1}
"""Share of the calls; a batch is several requests."""
REQUESTS_A_CALL = 1 + MIX["batch"] * (BATCH_SIZE - 1)
NUM_CHANNELS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        kind: Of call.
        model: That was asked.
        began: When the caller sent it, seconds since 1970.
        ended: When the whole answer was there, or the error.
        version: That answered, by its content; empty for an error.
        error: Status and message; empty for an answer.
        text: That was asked about.
        score: Of the answer, to the last bit; versions of a model tell each other apart by it.
    """

    kind: str
    model: str
    began: float
    ended: float
    version: str = ""
    error: str = ""
    text: str = ""
    score: float = 0.0


class Callers:
    """Calls at random times, so many a second, whatever becomes of those before; on a thread with an event loop of its own.

    Attributes:
        answers: What has become of requests so far; in the end of all that were begun.
    """

    def __init__(
        self, address: str, models: Sequence[str], texts: Sequence[str], rate: float, *, max_new_tokens: int = 0, seed: int = 0
    ) -> None:
        """Describe them.

        Args:
            address: Of the server.
            models: Asked in turn.
            texts: Sources.
            rate: Requests a second.
            max_new_tokens: Of an answer; 0 for the model's default.
            seed: Of times, kinds and texts.
        """
        self._address, self._models, self._texts = address, models, texts
        self._rate = rate / REQUESTS_A_CALL
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens} if max_new_tokens else {}
        self._draws = random.Random(seed)
        self.answers: list[Answer] = []
        self._num_begun = 0
        self._failure: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._call_until_stopped, name="callers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Begin no more calls, and wait for those that have begun; a request that has no end by then has failed.

        Raises:
            RuntimeError: If calls could not be begun until now.
        """
        self._stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError("the callers gave up before their time") from self._failure
        now = time.time()
        self.answers += [Answer("", "", now, now, error="it had no end")] * (self._num_begun - len(self.answers))

    @property
    def failures(self) -> list[Answer]:
        """Requests that were not answered."""
        return [answer for answer in self.answers if answer.error]

    def _call_until_stopped(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self._failure = error

    async def _run(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        channels = [aio.insecure_channel(self._address, options) for _ in range(NUM_CHANNELS)]
        stubs: list[Any] = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
        kinds: dict[str, Callable[[Any, str], Awaitable[None]]] = {
            "unary": self._unary,
            "stream": self._stream,
            "batch": self._batch,
            "beams": self._beams,
            "score": self._score,
        }
        calls: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        number = 0
        while not self._stopping.is_set():
            due += self._draws.expovariate(self._rate)
            if (pause := due - time.monotonic()) > 0:
                await asyncio.sleep(pause)
            [kind] = self._draws.choices(list(MIX), list(MIX.values()))
            work = self._guarded(kind, kinds[kind], stubs[number % NUM_CHANNELS], self._models[number % len(self._models)])
            task = asyncio.create_task(work)
            calls.add(task)
            task.add_done_callback(calls.discard)
            number += 1
        await asyncio.gather(*calls)
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _guarded(self, kind: str, call: Callable[[Any, str], Awaitable[None]], stub: Any, model: str) -> None:
        began = time.time()
        self._num_begun += BATCH_SIZE if kind == "batch" else 1
        try:
            await call(stub, model)
        except aio.AioRpcError as error:
            self.answers.append(Answer(kind, model, began, time.time(), error=f"{error.code().name}: {error.details()}"))
        except Exception as error:
            self.answers.append(Answer(kind, model, began, time.time(), error=repr(error)))

    def _note(self, kind: str, began: float, request: Any, answer: Any) -> None:
        is_right = answer.model == request.model and answer.model_version
        error = "" if is_right else f"model {answer.model}, version {answer.model_version!r}"
        score = answer.score if kind == "score" else answer.answers[0].score
        self.answers.append(Answer(kind, request.model, began, time.time(), answer.model_version, error, request.text, score))

    def _request(self, model: str, **fields: Any) -> Any:
        return generation_pb2.GenerateRequest(model=model, text=self._draws.choice(self._texts), **self._options | fields)

    async def _unary(self, stub: Any, model: str) -> None:
        began, request = time.time(), self._request(model)
        self._note("unary", began, request, await stub.Generate(request, timeout=CALL_SECONDS))

    async def _beams(self, stub: Any, model: str) -> None:
        began, request = time.time(), self._request(model, num_beams=NUM_BEAMS)
        self._note("beams", began, request, await stub.Generate(request, timeout=CALL_SECONDS))

    async def _score(self, stub: Any, model: str) -> None:
        began = time.time()
        request = generation_pb2.ScoreRequest(model=model, text=self._draws.choice(self._texts), target="ein Hund")
        self._note("score", began, request, await stub.Score(request, timeout=CALL_SECONDS))

    async def _stream(self, stub: Any, model: str) -> None:
        began, request = time.time(), self._request(model)
        last: Any = None
        async for message in stub.GenerateStream(request, timeout=CALL_SECONDS):
            last = message
        if last is None or not last.HasField("result"):
            self.answers.append(Answer("stream", model, began, time.time(), error="the stream ended without a result"))
        else:
            self._note("stream", began, request, last.result)

    async def _batch(self, stub: Any, model: str) -> None:
        began = time.time()
        sent = [self._request(model, request_id=f"{began}-{id(self)}-{number}") for number in range(BATCH_SIZE)]
        asked = dict(enumerate(sent))

        async def requests() -> AsyncIterator[Any]:
            for request in sent:
                yield request

        async for answer in stub.GenerateBatch(requests(), timeout=CALL_SECONDS):
            request = asked.pop(answer.index)
            if answer.HasField("response"):
                self._note("batch", began, request, answer.response)
            else:
                told = f"{grpc_code(answer.error.code)}: {answer.error.message}"
                self.answers.append(Answer("batch", model, began, time.time(), error=told))
        for _ in asked:
            self.answers.append(Answer("batch", model, began, time.time(), error="the batch ended without an answer"))


def grpc_code(number: int) -> str:
    """Return the name of a status."""
    return next((code.name for code in grpc.StatusCode if code.value[0] == number), str(number))
