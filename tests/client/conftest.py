"""A real server on a real port whose answers the test writes, and a clock that moves only when somebody waits."""

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from dragoman.client.aio import AsyncClient
from dragoman.client.sync import Client
from dragoman.v1 import generation_pb2, generation_pb2_grpc

PATIENCE_SECONDS = 60


def answer_to(request) -> generation_pb2.GenerateResponse:
    """Shout the source back; each answer after the first has a `!` more."""
    answers = [
        generation_pb2.Answer(
            text=request.forced_prefix + request.text.upper() + "!" * i,
            tokens=[ord(character) for character in request.text],
            finish_reason=generation_pb2.FINISH_REASON_EOS,
            score=-0.5 - i,
        )
        for i in range(request.num_return_sequences or 1)
    ]
    if request.return_log_probs:
        top = [generation_pb2.TokenLogProb(token=7, piece=b"\xc3", log_prob=-0.5)] if request.top_log_probs else []
        answers[0].log_probs.append(generation_pb2.TokenLogProb(token=5, piece=b"\xe2\x96", log_prob=-0.25, top=top))
    return generation_pb2.GenerateResponse(
        request_id=request.request_id,
        model=request.model or "en-de",
        model_version="3",
        text=request.text.upper(),
        tokens=[ord(character) for character in request.text],
        finish_reason=generation_pb2.FINISH_REASON_EOS,
        is_truncated=request.truncate,
        usage=generation_pb2.Usage(source_tokens=len(request.text) + 1, generated_tokens=len(request.text) + 1),
        timings=generation_pb2.Timings(
            queue_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=0.75,
            time_to_first_token_seconds=1.0,
            total_seconds=1.5,
        ),
        answers=answers,
        seed=request.seed if request.do_sample else None,
    )


def score_of(request) -> generation_pb2.ScoreResponse:
    """Score a target by its characters."""
    count = len(request.target) + 1
    response = generation_pb2.ScoreResponse(
        request_id=request.request_id,
        model=request.model or "en-de",
        model_version="3",
        log_prob=-1.5 * count,
        score=-1.5,
        tokens=[
            generation_pb2.TokenLogProb(token=ord(character), piece=character.encode(), log_prob=-1.5)
            for character in request.target
        ]
        + [generation_pb2.TokenLogProb(token=1, log_prob=-1.5)],
        usage=generation_pb2.Usage(source_tokens=len(request.text) + 1),
    )
    if request.return_alignment:
        response.alignment.num_source_tokens, response.alignment.num_target_tokens = 2, count
        response.alignment.weights.extend([0.25, 0.75] * count)
        response.alignment.source_pieces.extend([b" \xe7", b""])
    if request.return_word_alignment:
        response.word_alignment = "0-0 1-1"
    return response


class Service(generation_pb2_grpc.GenerationServicer):
    """Answers each call by the next behaviour of the script, or by shouting when there is none."""

    def __init__(self) -> None:
        self.script = deque()
        self.behaviours = {}  # by source text, beside the script
        self.has_bulk = True  # False as on a server that is older
        self.is_cut_short = False  # streams end without their result
        self.messages = []  # of each stream of several requests in a message, how many each had
        self.batches = []  # what came on each stream of a batch
        self.breaks = deque()  # for each such stream: how many requests it answers, and the behaviour that follows
        self.refusals = {}  # by source text: statuses that its attempts end with, before it is answered
        self.requests = []
        self.seconds_left = []
        self.metadata = []
        self.max_running = 0
        self._num_running = 0
        self._lock = threading.Lock()
        self.models = [
            generation_pb2.Model(
                name="en-de",
                version="3",
                is_ready=True,
                precision="fp32",
                device="cpu",
                max_source_tokens=256,
                max_target_tokens=200,
                default_max_new_tokens=128,
                max_slots=64,
                max_slots_per_request=16,
                source_vocab_size=6000,
                target_vocab_size=7000,
                domain="captions of photographs",
                target_languages=[generation_pb2.Language(code="de", names=["deu", "german"])],
                defaults=generation_pb2.Defaults(num_beams=4),
            ),
            generation_pb2.Model(name="en-fr", version="1"),
        ]

    def _begin(self, request, context):
        with self._lock:
            self.requests.append(request)
            self.seconds_left.append(context.time_remaining())
            self.metadata.append(dict(context.invocation_metadata()))
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
            return self.script.popleft() if self.script else self.behaviours.get(getattr(request, "text", None))

    def _end(self) -> None:
        with self._lock:
            self._num_running -= 1

    def Generate(self, request, context):
        behave = self._begin(request, context)
        try:
            answer = None if behave is None else behave(context)
            return answer_to(request) if answer is None else answer
        finally:
            self._end()

    def GenerateStream(self, request, context):
        """Answer in two halves; the behaviour acts at its `place`: before the first piece, between the two, or at the end."""
        behave = self._begin(request, context)
        place = getattr(behave, "place", "start")
        try:
            if behave is not None and place == "start":
                behave(context)
            whole = answer_to(request)
            half = len(request.text) // 2
            yield generation_pb2.GenerateStreamResponse(text=whole.text[:half], tokens=whole.tokens[:half])
            if behave is not None and place == "middle":
                behave(context)
            if self.is_cut_short:
                return
            yield generation_pb2.GenerateStreamResponse(text=whole.text[half:], tokens=whole.tokens[half:], result=whole)
            if behave is not None and place == "end":
                behave(context)
        finally:
            self._end()

    def GenerateBatch(self, requests, context):
        """Answer each request at once, but one whose text begins with `late` after the next."""
        seen, late = [], []
        with self._lock:
            self.batches.append(seen)
            self.seconds_left.append(context.time_remaining())
            self.metadata.append(dict(context.invocation_metadata()))
            num_answers, break_off = self.breaks.popleft() if self.breaks else (None, None)
        for request in requests:
            seen.append(request)
            if len(seen) - 1 == num_answers:
                break_off(context)
                return
            if request.text in self.behaviours:
                self.behaviours[request.text](context)
            refusals = self.refusals.get(request.text)
            if request.text.startswith("late"):
                late.append(request)
            elif refusals:
                yield generation_pb2.GenerateBatchResponse(request_id=request.request_id, error=refusals.pop(0))
            else:
                for one in [request, *late]:
                    yield generation_pb2.GenerateBatchResponse(request_id=one.request_id, response=answer_to(one))
                late.clear()
        if len(seen) == num_answers:
            break_off(context)

    def GenerateBulk(self, messages, context):
        """Answer each request side by side, as Generate would; `batches`, `breaks` and `refusals` are as in GenerateBatch."""
        if not self.has_bulk:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        seen, answers = [], SimpleQueue()
        with self._lock:
            self.batches.append(seen)
            self.messages.append([])
            num_answers, break_off = self.breaks.popleft() if self.breaks else (None, None)

        def serve(request) -> None:
            item = _Item(context)
            try:
                answers.put({"response": self.Generate(request, item), "request_id": request.request_id})
            except _Aborted:
                answers.put({"error": item.error, "request_id": request.request_id})

        def read() -> None:
            with ThreadPoolExecutor(32) as threads, suppress(grpc.RpcError):
                for message in messages:
                    self.messages[-1].append(len(message.requests))
                    for request in message.requests:
                        seen.append(request)
                        if len(seen) - 1 == num_answers:
                            answers.put(break_off)
                            return
                        if refusals := self.refusals.get(request.text):
                            answers.put({"error": refusals.pop(0), "request_id": request.request_id})
                        else:
                            threads.submit(serve, request)
            answers.put(break_off if len(seen) == num_answers else None)

        reading = threading.Thread(target=read)
        reading.start()
        while isinstance(answer := answers.get(), dict):
            response = generation_pb2.GenerateBatchResponse(**answer)
            yield generation_pb2.GenerateBulkResponse(answers=[response])
        if answer is not None:
            answer(context)
        reading.join()

    def Score(self, request, context):
        """Find each character of the target as likely as its place says; the attention is on the diagonal."""
        behave = self._begin(request, context)
        try:
            if behave is not None:
                behave(context)
            return score_of(request)
        finally:
            self._end()

    def ListModels(self, request, context):
        behave = self._begin(request, context)
        if behave is not None:
            behave(context)
        return generation_pb2.ListModelsResponse(models=self.models)

    def GetModel(self, request, context):
        self._begin(request, context)
        for model in self.models:
            if model.name == request.model:
                return model
        context.abort(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not loaded; loaded: en-de, en-fr")


class _Aborted(Exception):
    """A request of a stream has failed."""


class _Item:
    """The context of one request of a stream."""

    def __init__(self, stream) -> None:
        self._stream = stream
        self.error = None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def abort(self, code, details):
        self.error = generation_pb2.Error(code=code.value[0], message=details)
        raise _Aborted

    def abort_with_status(self, status):
        found = dict(status.trailing_metadata)
        self.error = generation_pb2.Error.FromString(found["grpc-status-details-bin"])
        raise _Aborted


class Held:
    """A behaviour: the call stays until the test lets go or the client does."""

    def __init__(self, place: str = "start") -> None:
        self.place = place
        self.began = threading.Event()
        self.ended = threading.Event()
        self.was_cancelled = False
        self._over = threading.Event()

    def __call__(self, context) -> None:
        if context.add_callback(self._over.set):
            self.began.set()
            assert self._over.wait(PATIENCE_SECONDS)
            self.was_cancelled = not context.is_active()
        self.ended.set()

    def wait_until_began(self) -> None:
        assert self.began.wait(PATIENCE_SECONDS)

    def let_go(self) -> None:
        self._over.set()

    def assert_cancelled(self) -> None:
        assert self.ended.wait(PATIENCE_SECONDS)
        assert self.was_cancelled


class FakeServer:
    """A server that can go away and come back on its port."""

    def __init__(self) -> None:
        self.service = Service()
        self.health = health.HealthServicer()
        self.port = 0
        self._server = None
        self._threads = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._threads = ThreadPoolExecutor(48)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        generation_pb2_grpc.add_GenerationServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._threads.shutdown()
            self._server = None

    def set_health(self, name: str, is_serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        self.health.set(name, kind.SERVING if is_serving else kind.NOT_SERVING)


class FakeClock:
    """Time passes only in waits, which are noted and over at once."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits = []

    def __call__(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def service(server: FakeServer) -> Service:
    return server.service


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def client(server: FakeServer, clock: FakeClock) -> Iterator[Client]:
    with Client(server.target, clock=clock, wait=clock.wait) as client:
        yield client


@pytest.fixture
def held() -> type[Held]:
    return Held


@pytest.fixture
def failing() -> Callable[..., Callable[[grpc.ServicerContext], None]]:
    """Make a behaviour that fails with a status."""

    def failing(code: str, message: str = "no", retry_after: tuple[int, int] | None = None, place: str = "start"):
        def behave(context: grpc.ServicerContext) -> None:
            context.abort_with_status(rpc_status.to_status(make_status(code, message, retry_after)))

        behave.place = place
        return behave

    return failing


@pytest.fixture
def refusing() -> Callable[..., generation_pb2.Error]:
    """Make the status that a request of a batch fails with."""
    return make_status


def make_status(code: str, message: str = "no", retry_after: tuple[int, int] | None = None) -> generation_pb2.Error:
    details = []
    if retry_after is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.seconds, info.retry_delay.nanos = retry_after
        details.append(any_pb2.Any())
        details[0].Pack(info)
    return generation_pb2.Error(code=code_pb2.Code.Value(code), message=message, details=details)


@pytest.fixture
def running_async() -> Callable[[Callable[[], Awaitable[object]]], object]:
    """Run a coroutine function, with an end to the wait for it."""
    return lambda main: asyncio.run(asyncio.wait_for(main(), PATIENCE_SECONDS))


@pytest.fixture(params=["sync", "aio"])
def call(request: pytest.FixtureRequest, server: FakeServer, clock: FakeClock) -> Callable[..., object]:
    """Call a method of either client on the fake clock; what it iterates over comes as a list."""

    def call_sync(method: str, *args, options=(), **arguments):
        with Client(server.target, clock=clock, wait=clock.wait, **dict(options)) as client:
            value = getattr(client, method)(*args, **arguments)
            return list(value) if hasattr(value, "__next__") else value

    def call_aio(method: str, *args, options=(), **arguments):
        async def main():
            async with AsyncClient(server.target, clock=clock, sleep=clock.sleep, **dict(options)) as client:
                value = getattr(client, method)(*args, **arguments)
                return [item async for item in value] if hasattr(value, "__anext__") else await value

        return asyncio.run(main())

    return call_sync if request.param == "sync" else call_aio
