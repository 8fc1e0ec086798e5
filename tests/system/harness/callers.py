"""Background callers of every kind, each answer kept with its version, its times and its content.

They run on a thread with an event loop of their own, each on connections of its own, and each asks again as soon as it is answered.
None tries again, but for the kind `retrying`, which is the Python client.
"""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from dragoman.client.aio import AsyncClient
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest, ScoreRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.grpc_client import OPTIONS
from tests.system.harness.protocol import Query, Refused
from tests.system.harness.protocols import PROTOCOLS
from tests.system.harness.server import Event, Server, footprint, processes, wait_until, wait_until_not_grown

CALL_SECONDS = 60.0
PATIENT = RetryPolicy(max_attempts=1000, max_backoff_seconds=1.0)
NO_RETRY = RetryPolicy(max_attempts=1)
NUM_TOGETHER = 4
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request, sent and answered whole at times in seconds since 1970.

    The version and the content, which has no times, are empty for an error; `error` is status and message, empty for an answer.
    """

    kind: str
    model: str
    began: float
    ended: float
    text: str
    version: str = ""
    content: object = None
    error: str = ""

    @property
    def status(self) -> str:
        return self.error.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Caller:
    address: str
    options: Mapping[str, Any]
    channel: aio.Channel
    client: AsyncClient
    protocols: Mapping[str, Any]

    @property
    def stub(self) -> Any:
        return GenerationStub(self.channel)


# A version and what it answered. A kind whose call is refused as it has to be returns none.
Outcome = tuple[str, object]
Kind = Callable[[Caller, str, str], Awaitable[list[Outcome]]]


def outcome(message: Any) -> Outcome:
    """Return the version and the content of a native answer, of a copy without its times and its id."""
    kept = type(message)()
    kept.CopyFrom(message)
    for field in ("timings", "request_id"):
        if field in message.DESCRIPTOR.fields_by_name:
            kept.ClearField(field)
    return message.model_version, kept.SerializeToString(deterministic=True)


async def score(caller: Caller, model: str, text: str) -> list[Outcome]:
    return [outcome(await caller.stub.Score(ScoreRequest(model=model, text=text, target="a dog"), timeout=CALL_SECONDS))]


async def retrying(caller: Caller, model: str, text: str) -> list[Outcome]:
    result = await caller.client.generate(text, model=model, timeout_seconds=CALL_SECONDS, **caller.options)
    return [(result.model_version, (result.answers, result.usage.generated_tokens))]


def over(protocol: str, *methods: str, **more: Any) -> Kind:
    """Ask by one of the methods of a protocol, by any of them if none is named; all answer alike."""

    async def ask(caller: Caller, model: str, text: str) -> list[Outcome]:
        client = caller.protocols[protocol]
        name = random.choice(methods or list(client.methods))
        call, num_texts = client.methods[name]
        options = {**caller.options, **more}
        texts = [text] * min(num_texts, NUM_TOGETHER)
        query = Query(texts, options if client.supports(name, options) else {}, model, timeout_seconds=CALL_SECONDS)
        return [(answer.version or "", answer) for answer in await call(query)]

    return ask


NATIVE: dict[str, Kind] = {
    "unary": over("gRPC", "Generate"),
    "beams": over("gRPC", "Generate", num_beams=4, num_return_sequences=2),
    "samples": over("gRPC", "Generate", do_sample=True, seed=7, num_return_sequences=2),
    "stream": over("gRPC", "GenerateStream"),
    "batch": over("gRPC", "GenerateBatch"),
    "bulk": over("gRPC", "GenerateBulk"),
    "score": score,
}
RETRYING: dict[str, Kind] = {"retrying": retrying}
OTHER_PROTOCOLS: dict[str, Kind] = {each.name: over(each.name) for each in PROTOCOLS if each.name != "gRPC"}


class Callers:
    """Callers that ask while the `with` lasts; on leaving, those under way are awaited. `answers` are all outcomes so far."""

    def __init__(
        self,
        server: Server | str,
        models: Sequence[str] = ("alpha",),
        *,
        kinds: Mapping[str, Kind] = NATIVE,
        texts: Sequence[str] = ("a dog runs", "over the grass"),
        num: int = 6,
        pause_seconds: float = 0.0,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Describe so many callers, who choose among models, by weights if there are any, kinds of calls and texts.

        `server` may be a target of gRPC, which other protocols than gRPC cannot ask. `pause_seconds` is the mean pause of a caller
        between two calls. `options` are fields of `dragoman.v1.GenerateRequest` for all calls.
        """
        self._server, self._address = server, server if isinstance(server, str) else server.address
        self._models, self._weights, self._kinds, self._texts = models, weights, kinds, texts
        self._num, self._pause, self._seed, self._options = num, pause_seconds, seed, options
        self.answers: list[Answer] = []
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="callers")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self._failure is not None:
            raise RuntimeError("the callers gave up before their time") from self._failure

    @property
    def failures(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.error]

    @property
    def statuses(self) -> Counter[str]:
        return Counter(answer.status for answer in self.failures)

    def wait_for_more(self, count: int = 20) -> None:
        before = len(self.answers) - len(self.failures)
        wait_until(lambda: len(self.answers) - len(self.failures) >= before + count, f"{count} more are answered")

    def answered_differently(self) -> list[tuple[str, ...]]:
        """Return the questions to which one version has given answers that differ."""
        found: dict[tuple[str, ...], set[str]] = {}
        for each in self.answers:
            if each.content is not None:
                found.setdefault((each.kind, each.model, each.text, each.version), set()).add(repr(each.content))
        return [question for question, contents in found.items() if len(contents) > 1]

    def _run(self) -> None:
        try:
            asyncio.run(self._call_all())
        except BaseException as error:
            self._failure = error

    async def _call_all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._num):
                group.create_task(self._call(random.Random(f"{self._seed}/{number}")))

    async def _call(self, draws: random.Random) -> None:
        async with AsyncExitStack() as stack:
            channel = await stack.enter_async_context(aio.insecure_channel(self._address, OPTIONS))
            client = await stack.enter_async_context(AsyncClient(self._address, retry=PATIENT))
            names = {*self._kinds, *(("gRPC",) if isinstance(self._server, Server) else ())}
            wanted = [each for each in PROTOCOLS if each.name in names]
            protocols = {each.name: await stack.enter_async_context(each.connect(self._server)) for each in wanted}
            caller = Caller(self._address, self._options, channel, client, protocols)
            while not self._stopping.is_set():
                [model] = draws.choices(self._models, self._weights)
                is_answered = await self._ask(caller, draws.choice(list(self._kinds)), model, draws.choice(self._texts))
                pause = draws.expovariate(1 / self._pause) if self._pause else 0.0
                await asyncio.sleep(pause if is_answered else max(pause, 0.02))

    async def _ask(self, caller: Caller, kind: str, model: str, text: str) -> bool:
        """Ask, and keep what comes; return whether it was answered."""
        began = time.time()
        try:
            outcomes = await asyncio.wait_for(self._kinds[kind](caller, model, text), 2 * CALL_SECONDS)
        except Exception as error:
            self.answers.append(Answer(kind, model, began, time.time(), text, error=told(error)))
            return False
        ended = time.time()
        self.answers += [Answer(kind, model, began, ended, text, *each) for each in outcomes or [("", None)]]
        return True


def told(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, Refused):
        return f"{error.status}: {error.message}"
    return f"{getattr(error, 'code', type(error).__name__)}: {error}"


@contextmanager
def connection(server: Server, frontend: int | None = None, token: str = "") -> Iterator[grpc.Channel]:
    """Open a connection of its own; if a number is given, one that this frontend has, which the log of calls tells."""
    while True:
        with grpc.insecure_channel(server.address, OPTIONS) as channel:
            if frontend is not None and server.num_frontends > 1:
                name = f"which-{next(_NUMBERS)}"
                GenerationStub(channel).ListModels(ListModelsRequest(), metadata=[("x-request-id", name), *bearer(token)])
                if server.wait_for(Event.CALL, request_id=name)["front_end"] != frontend:
                    continue
            yield channel
            return


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")] if token else []


def generate(channel: grpc.Channel, num_tokens: int = 2, token: str = "", **fields: Any) -> Any:
    request = GenerateRequest(**{"text": "a dog runs", "model": "alpha", "max_new_tokens": num_tokens} | fields)
    return GenerationStub(channel).Generate.future(request, timeout=CALL_SECONDS, metadata=bearer(token))


KNOWN = {"text": "a dog runs over the grass", "num_beams": 4, "num_return_sequences": 4, "return_log_probs": True}


@contextmanager
def unharmed(server: Server, *, max_bytes: int = 64 * 2**20) -> Iterator[None]:
    """Check that the server is ready and idle before and after, answers a known request alike, and holds no more than it did.

    Its processes must be the same ones, and its log has no errors. What grows once, such as pools of threads, arenas and caches,
    is to have grown before. Allocators may keep `max_bytes` of what was in use.
    """

    def answer() -> object:
        with connection(server) as channel:
            return outcome(generate(channel, 20, **KNOWN).result())

    right = answer()
    server.wait_until_idle()
    everything = processes(server)
    before = footprint(everything)
    yield
    server.wait_until_idle()
    with Client(server.address) as client:
        assert client.is_ready() and client.is_ready("liveness")
    assert answer() == right, "a known request has another answer"
    assert processes(server) == everything, "processes have ended or come"
    wait_until_not_grown(before, max_bytes)
    assert server.problems() == []
