"""A gRPC server on a real port whose answers are scripted by the test, with the admin service where a test asks for it."""

import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from dragoman.v1 import generation_pb2, generation_pb2_grpc, repository_pb2, repository_pb2_grpc

PATIENCE_SECONDS = 60
EOS = generation_pb2.FINISH_REASON_EOS
Behaviour = Callable[[Any], object]


def filled(kind: type[Message], **values: Any) -> Any:
    """Return a message in which each field has a value of its own, lists two; `values` are set as they are given."""
    message = kind(**values)
    for field in kind.DESCRIPTOR.fields:
        if field.name in values or field.message_type is kind.DESCRIPTOR:
            continue
        if field.enum_type is not None:
            value = 1
        elif field.message_type is None:
            numbers = {field.CPPTYPE_STRING: field.name, field.CPPTYPE_BOOL: True, field.CPPTYPE_DOUBLE: field.number / 2}
            value = numbers.get(field.cpp_type, field.number / 2 if field.cpp_type == field.CPPTYPE_FLOAT else field.number)
            value = value.encode() if field.type == field.TYPE_BYTES else value
        else:
            value = filled(field.message_type._concrete_class)
        if field.is_repeated:
            getattr(message, field.name).extend([value, value])
        elif field.message_type is None:
            setattr(message, field.name, value)
        else:
            getattr(message, field.name).CopyFrom(value)
    return message


def plain(message: Any) -> Any:
    """Return a message as the plain data that callers get: dictionaries and tuples, with None for an absent field."""
    if not isinstance(message, Message):
        return message
    values = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            values[field.name] = dict(value)
        elif field.is_repeated:
            values[field.name] = tuple(map(plain, value))
        elif field.enum_type is not None:
            names = field.enum_type.values_by_number
            values[field.name] = names.get(value, names[0]).name.rpartition("_")[2].lower()
        else:
            values[field.name] = plain(value) if not field.has_presence or message.HasField(field.name) else None
    return values


def answer_to(request: Any) -> generation_pb2.GenerateResponse:
    """Answer with the text in capitals; each answer after the first has one more `!`."""
    text, tokens = request.text.upper(), [ord(character) for character in request.text]
    answers = [
        generation_pb2.Answer(text=text + "!" * i, tokens=tokens, finish_reason=EOS, score=-0.5 - i)
        for i in range(request.num_return_sequences or 1)
    ]
    if request.return_log_probs:
        answers[0].log_probs.add(token=5, piece=b"\xe2\x96", log_prob=-0.25).top.add(token=7, piece=b"\xc3", log_prob=-0.5)
    return generation_pb2.GenerateResponse(
        request_id=request.request_id,
        model=request.model or "en-de",
        text=text,
        tokens=tokens,
        finish_reason=EOS,
        answers=answers,
        usage=generation_pb2.Usage(source_tokens=5, generated_tokens=4),
        timings=generation_pb2.Timings(queue_seconds=0.001, total_seconds=0.002),
    )


def score_of(request: Any) -> generation_pb2.ScoreResponse:
    """Score a target: -1.5 for each character and for end-of-sequence."""
    tokens = [generation_pb2.TokenLogProb(token=ord(x), piece=x.encode(), log_prob=-1.5) for x in request.target]
    tokens.append(generation_pb2.TokenLogProb(token=1, log_prob=-1.5))
    links = "0-0 1-1" if request.return_word_alignment else ""
    ids = {"request_id": request.request_id, "model": request.model}
    return generation_pb2.ScoreResponse(**ids, log_prob=-1.5 * len(tokens), score=-1.5, tokens=tokens, word_alignment=links)


def make_status(code: str, message: str = "no", retry_after: tuple[int, int] | None = None) -> generation_pb2.Error:
    """Return a status; `retry_after` are seconds and nanoseconds of its RetryInfo."""
    status = generation_pb2.Error(code=code_pb2.Code.Value(code), message=message)
    if retry_after is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.seconds, info.retry_delay.nanos = retry_after
        status.details.add().Pack(info)
    return status


class Failed(Exception):
    """A call, or one request of a batch, ends with a status."""

    def __init__(self, status: generation_pb2.Error) -> None:
        self.status = status


@contextmanager
def ending(context: Any) -> Iterator[None]:
    """End the call with the status of a `Failed`."""
    try:
        yield
    except Failed as failed:
        context.abort_with_status(rpc_status.to_status(failed.status))


def failing(code: str, message: str = "no", retry_after: tuple[int, int] | None = None, place: str = "start") -> Behaviour:
    """Return a behaviour that fails with a status, at its place in a stream."""

    def fail(_: Any) -> None:
        raise Failed(make_status(code, message, retry_after))

    fail.place = place
    return fail


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Return a behaviour that acts as each of these once, and then does nothing."""
    left = deque(behaviours)
    return lambda context: left.popleft()(context) if left else None


class Held:
    """A behaviour that blocks the call until it is released or the client cancels."""

    def __init__(self, place: str = "start") -> None:
        self.place = place
        self._began, self._over, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._was_cancelled = False
        self.release = self._over.set

    def __call__(self, context: Any) -> None:
        if context.add_callback(self._over.set):
            self._began.set()
            assert self._over.wait(PATIENCE_SECONDS)
            self._was_cancelled = not context.is_active()
        self._ended.set()

    def wait_until_began(self) -> None:
        assert self._began.wait(PATIENCE_SECONDS)

    def assert_cancelled(self) -> None:
        assert self._ended.wait(PATIENCE_SECONDS)
        assert self._was_cancelled


class Service(generation_pb2_grpc.GenerationServicer):
    """Answers by the next behaviour of the script, by that of the text, or with `answer` and `score`.

    Attributes:
        script: Behaviours of the next calls.
        behaviours: Behaviours by source text.
        breaks: For each batch stream how many requests it answers, and the behaviour that ends it.
        has_bulk: Whether GenerateBulk is implemented; older servers have GenerateBatch only.
        batches: Requests of each batch stream.
        messages: Number of requests in each message of each GenerateBulk stream.
    """

    def __init__(self) -> None:
        self.answer, self.score = answer_to, score_of
        self.script: deque[Behaviour] = deque()
        self.behaviours: dict[str, Behaviour] = {}
        self.breaks: deque[tuple[int, Behaviour]] = deque()
        self.has_bulk = True
        self.batches: list[list[Any]] = []
        self.messages: list[list[int]] = []
        self.requests: list[Any] = []
        self.seconds_left: list[float] = []
        self.metadata: list[tuple[str, dict[str, Any]]] = []
        self.models = [generation_pb2.Model(name="en-de", is_ready=True), generation_pb2.Model(name="en-fr")]
        self._num_running = self.max_running = 0
        self._lock = threading.Lock()

    def begin(self, request: Any) -> Behaviour | None:
        """Record a request and return its behaviour."""
        self.requests.append(request)
        return self.script.popleft() if self.script else self.behaviours.get(getattr(request, "text", None))

    @contextmanager
    def _running(self, method: str, request: Any, context: Any) -> Iterator[Behaviour | None]:
        with self._lock:
            self.seconds_left.append(context.time_remaining())
            self.metadata.append((method, dict(context.invocation_metadata())))
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
            behave = self.begin(request)
        try:
            yield behave
        finally:
            with self._lock:
                self._num_running -= 1

    def _serve(self, method: str, request: Any, context: Any, answer: Callable[[Any], Any]) -> Any:
        with self._running(method, request, context) as behave:
            return (behave and behave(context)) or answer(request)

    def Generate(self, request, context):
        with ending(context):
            return self._serve("Generate", request, context, self.answer)

    def Score(self, request, context):
        with ending(context):
            return self._serve("Score", request, context, self.score)

    def ListModels(self, request, context):
        with ending(context):
            return self._serve("ListModels", request, context, lambda _: generation_pb2.ListModelsResponse(models=self.models))

    def GetModel(self, request, context):
        found = [model for model in self.models if model.name == request.model]
        if not found:
            context.abort(grpc.StatusCode.NOT_FOUND, f"model: {request.model!r} is not loaded")
        return self._serve("GetModel", request, context, lambda _: found[0])

    def GenerateStream(self, request, context):
        """Answer in two halves; a behaviour acts at its place: at the start, in the middle or at the end."""
        whole, half = self.answer(request), len(request.text) // 2
        with ending(context), self._running("GenerateStream", request, context) as behave:
            acts = {getattr(behave, "place", "start"): behave} if behave else {}
            acts.get("start", str)(context)
            yield generation_pb2.GenerateStreamResponse(text=whole.text[:half], tokens=whole.tokens[:half])
            if acts.get("middle", str)(context) is StopIteration:
                return
            yield generation_pb2.GenerateStreamResponse(text=whole.text[half:], tokens=whole.tokens[half:], result=whole)
            acts.get("end", str)(context)

    def GenerateBatch(self, messages, context):
        yield from self._answer_batch("GenerateBatch", messages, context)

    def GenerateBulk(self, messages, context):
        if not self.has_bulk:
            self.metadata.append(("GenerateBulk", dict(context.invocation_metadata())))
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.messages.append(sizes := [])

        def requests() -> Iterator[Any]:
            for message in messages:
                sizes.append(len(message.requests))
                yield from message.requests

        for answer in self._answer_batch("GenerateBulk", requests(), context):
            yield generation_pb2.GenerateBulkResponse(answers=[answer])

    def _answer_batch(self, method: str, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        seen, answers = [], SimpleQueue()
        self.batches.append(seen)
        num_answers, end = self.breaks.popleft() if self.breaks else (None, None)

        def serve(request: Any) -> None:
            try:
                answer = {"response": self._serve(method, request, context, self.answer)}
            except Failed as failed:
                answer = {"error": failed.status}
            answers.put(answer | {"request_id": request.request_id})

        def read() -> None:
            # The threads end before the stream does, so that a stream breaks after the answers that it is to give.
            with ThreadPoolExecutor(32) as threads, suppress(grpc.RpcError):
                for request in requests:
                    seen.append(request)
                    if len(seen) - 1 == num_answers:
                        break
                    threads.submit(serve, request)
            is_broken = num_answers is not None and len(seen) >= num_answers
            answers.put(end if is_broken else None)

        reading = threading.Thread(target=read)
        reading.start()
        while isinstance(answer := answers.get(), dict):
            yield generation_pb2.GenerateBatchResponse(**answer)
        if answer is not None:
            with ending(context):
                answer(context)
        reading.join()


class AdminService(repository_pb2_grpc.RepositoryServicer):
    """Records requests and tokens, and answers each with the same model, or with the failure of the requested model's name."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.tokens: list[Any] = []
        self.failures: dict[str, Behaviour] = {}
        self.model = repository_pb2.RepositoryModel(name="en-de", versions=[repository_pb2.RepositoryVersion(name="3", state=6)])
        self.problem = ""

    def __getattribute__(self, name: str) -> Any:
        return self._answer if name[0].isupper() else super().__getattribute__(name)

    def _answer(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.tokens.append(dict(context.invocation_metadata()).get("authorization"))
        with ending(context):
            self.failures.get(getattr(request, "model", ""), str)(context)
        if type(request).__name__ in ("ListRepositoryRequest", "RefreshRepositoryRequest"):
            return repository_pb2.ListRepositoryResponse(models=[self.model], problem=self.problem)
        return self.model


class FakeServer:
    """A server that can be stopped and started again on its port; it has the admin service if one is given."""

    def __init__(
        self,
        service: Service | None = None,
        credentials: grpc.ServerCredentials | None = None,
        admin: AdminService | None = None,
    ) -> None:
        self.service = service or Service()
        self.health = health.HealthServicer()
        self.port = 0
        self._credentials = credentials
        self._admin = admin
        self._server: grpc.Server | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._threads = ThreadPoolExecutor(64)
        self._server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        generation_pb2_grpc.add_GenerationServicer_to_server(self.service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        if self._admin is not None:
            repository_pb2_grpc.add_RepositoryServicer_to_server(self._admin, self._server)
        if self._credentials is None:
            self.port = self._server.add_insecure_port(self.target)
        else:
            self.port = self._server.add_secure_port(self.target, self._credentials)
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._threads.shutdown()
            self._server = None

    def __enter__(self) -> "FakeServer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def set_health(self, name: str, is_serving: bool) -> None:
        kind = health_pb2.HealthCheckResponse
        self.health.set(name, kind.SERVING if is_serving else kind.NOT_SERVING)


def interrupt(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Send SIGINT until a process ends and return its output; Python can miss a signal just before it waits for a lock."""
    for _ in range(PATIENCE_SECONDS // 5):
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=5)
    raise AssertionError("the process does not end")
