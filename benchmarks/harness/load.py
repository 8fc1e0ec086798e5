"""Load on a server from a process of its own: arrivals at a rate, or callers that wait for their answers, over any protocol.

A `Sender` lives in an `Actor`. Calls are made with bare stubs: no retries, no deadlines.
"""

import asyncio
import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from grpc import aio

from benchmarks.harness.actor import Actor
from dragoman.client.sync import Client
from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.v1.generation_pb2 import GenerateBulkRequest, GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub

CONNECT_SECONDS, LEAD_SECONDS, GRACE_SECONDS, CLIENT_SECONDS = 30.0, 0.2, 60.0, 600.0
REJECTED, UNFINISHED = "RESOURCE_EXHAUSTED", "UNFINISHED"
GRPC, BATCH, BULK, CLIENT = "gRPC", "GenerateBatch", "GenerateBulk", "client"
OIP_GRPC, HTTP, OIP_REST, PEER_HTTP, TRITON = "OIP gRPC", "HTTP/JSON", "OIP REST", "peer over HTTP", "Triton"
SHARES = {1: 0.6, 2: 0.25, 3: 0.15}
"""Numbers of captions that `mixed_texts` joins, and how often."""

Answer = tuple[str, Sequence[int]]
"""Text and, where the protocol has them, tokens."""
Ask = Callable[[str], Awaitable[Answer]]
"""Sends a text and returns the answer.

Raises:
    CallError: If there is none.
"""


class CallError(Exception):
    """A call without an answer; the message is the name of its status."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send."""

    texts: Sequence[str]  # sources
    seconds: float = 0.0  # duration of sending texts repeatedly in random order; 0 sends each text once
    rate: float = 0.0  # arrivals a second, as a Poisson process; 0 for callers that wait
    concurrency: int = 1  # callers that wait; of a stream, requests in flight
    seed: int = 0  # seed of arrivals and order of texts
    num_beams: int = 1  # beams of each request
    early_stopping: bool = False  # early stopping of each request with beams
    max_new_tokens: int = 0  # limit of each request; 0 for the server's default
    batch_size: int = 16  # requests in a message of `GenerateBulk`
    keeps_answers: bool = False  # whether outcomes have the answers

    def queue(self) -> Iterator[str]:
        """Return the texts to send."""
        if not self.seconds:
            return iter(self.texts)
        texts = list(self.texts)
        random.Random(self.seed).shuffle(texts)
        return itertools.cycle(texts)

    def request(self, text: str, model: str) -> GenerateRequest:
        """Return a request of the native protocol."""
        request = GenerateRequest(model=model, text=text, num_beams=self.num_beams)
        if self.early_stopping and self.num_beams > 1:
            request.early_stopping = True
        if self.max_new_tokens:
            request.max_new_tokens = self.max_new_tokens
        return request


class Outcome(NamedTuple):
    """One request; times are seconds since the first could have been sent."""

    due: float  # scheduled time of sending
    sent: float  # time of sending
    ended: float  # time of its status; without one, the end of waiting
    code: str  # name of its status, or `UNFINISHED`
    answer: Answer = ("", ())  # text and tokens, where they are kept


@dataclass(frozen=True, slots=True)
class Record:
    """Outcomes of a load."""

    outcomes: list[Outcome]  # in the order of sending
    cpu_seconds: float  # processor time of the sender
    wall_seconds: float  # from the first request to the last status

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.codes["OK"] / self.wall_seconds

    @property
    def codes(self) -> Counter[str]:
        """Number of requests by status."""
        return Counter(outcome.code for outcome in self.outcomes)

    def latencies(self, code: str = "OK") -> list[float]:
        """Return sorted seconds from the scheduled time to the end of requests with that status."""
        return sorted(outcome.ended - outcome.due for outcome in self.outcomes if outcome.code == code)

    def check(self) -> "Record":
        """Return the record itself.

        Raises:
            RuntimeError: If a request was not answered, or there was none.
        """
        if set(self.codes) != {"OK"}:
            raise RuntimeError(f"every request should be answered: {dict(self.codes)}")
        return self


class Sender:
    """Sends loads to one server by one protocol."""

    def __init__(self, protocol: str, address: str, model: str = "") -> None:
        self._protocol, self._address, self._model = protocol, address, model

    def run(self, load: Load) -> Record:
        """Send a load and return its outcomes.

        Raises:
            TimeoutError: If there is no server.
        """
        gc.disable()  # outcomes are kept until the end: collections of a hundred thousand objects delay sending
        try:
            if self._protocol == CLIENT:
                return self._run_client(load)
            return asyncio.run(self._run(load))
        finally:
            gc.enable()

    async def _run(self, load: Load) -> Record:
        if self._protocol in (BATCH, BULK):
            async with grpc_channel(self._address) as channel:
                stub = GenerationStub(channel)  # type: ignore[no-untyped-call]
                wall, cpu = time.perf_counter(), time.process_time()
                outcomes = await stream(stub, self._protocol, load, self._model)
        else:
            async with PROTOCOLS[self._protocol](self._address, self._model, load) as ask:
                await ask(load.texts[0])  # so that the connection is open
                wall, cpu = time.perf_counter(), time.process_time()
                outcomes = await (at_rate if load.rate else in_turns)(ask, load)
        return Record(outcomes, time.process_time() - cpu, time.perf_counter() - wall)

    def _run_client(self, load: Load) -> Record:
        """Give all texts to the client's `generate_many` at once."""
        options: dict[str, Any] = {"early_stopping": True} if load.early_stopping and load.num_beams > 1 else {}
        with Client(self._address, timeout_seconds=CLIENT_SECONDS) as client:
            client.generate(load.texts[0], max_new_tokens=1)
            wall, cpu = time.perf_counter(), time.process_time()
            found = client.generate_many(
                load.texts,
                concurrency=load.concurrency,
                num_beams=load.num_beams,
                max_new_tokens=load.max_new_tokens or None,
                **options,
            )
            answers = [(result.text, list(result.tokens)) for result in found]
            seconds = time.perf_counter() - wall
        return Record([Outcome(0, 0, seconds, "OK", each) for each in answers], time.process_time() - cpu, seconds)


def send(protocol: str, address: str, load: Load, model: str = "") -> Record:
    """Send one load from a new process."""
    with Actor(Sender, protocol, address, model) as sender:
        record: Record = sender.call("run", load)
        return record


async def at_rate(ask: Ask, load: Load) -> list[Outcome]:
    """Send requests at their scheduled times, regardless of answers."""
    loop = asyncio.get_running_loop()
    start = loop.time() + LEAD_SECONDS
    texts = load.queue()
    calls: list[tuple[float, float, asyncio.Task[tuple[float, str, Answer]]]] = []

    async def timed(text: str) -> tuple[float, str, Answer]:
        code, answer = await _named(ask, text, load)
        return loop.time() - start, code, answer

    for due in arrivals(load.rate, load.seconds, load.seed):
        await asyncio.sleep(max(0.0, start + due - loop.time()))
        calls.append((due, loop.time() - start, asyncio.create_task(timed(next(texts)))))
    if calls:
        await asyncio.wait([task for _, _, task in calls], timeout=GRACE_SECONDS)
    given_up = loop.time() - start
    outcomes = []
    for due, sent, task in calls:
        outcomes.append(Outcome(due, sent, *task.result()) if task.done() else Outcome(due, sent, given_up, UNFINISHED))
        task.cancel()
    return outcomes


async def in_turns(ask: Ask, load: Load) -> list[Outcome]:
    """Keep `concurrency` calls in flight."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    texts = enumerate(load.queue())
    outcomes: dict[int, Outcome] = {}

    async def call() -> None:
        for i, text in texts:
            sent = loop.time() - start
            if load.seconds and sent >= load.seconds:
                return
            code, answer = await _named(ask, text, load)
            outcomes[i] = Outcome(sent, sent, loop.time() - start, code, answer)

    await asyncio.gather(*(call() for _ in range(load.concurrency)))
    return [outcomes[i] for i in sorted(outcomes)]


async def stream(stub: Any, method: str, load: Load, model: str) -> list[Outcome]:
    """Keep `concurrency` requests in flight on one stream of `GenerateBatch` or `GenerateBulk`."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    texts, size = load.queue(), load.batch_size if method == BULK else 1
    sent: list[float] = []
    ended: dict[int, tuple[float, str]] = {}
    call = getattr(stub, method)()

    async def fill() -> None:
        while len(sent) - len(ended) + size <= load.concurrency and loop.time() - start < load.seconds:
            requests = [load.request(next(texts), model) for _ in range(size)]
            for i, request in enumerate(requests, len(sent)):
                request.request_id = f"r{i}"
            sent.extend([loop.time() - start] * size)
            await call.write(GenerateBulkRequest(requests=requests) if method == BULK else requests[0])

    await fill()
    while len(ended) < len(sent):
        response = await call.read()
        if response is aio.EOF:
            break
        for answer in response.answers if method == BULK else [response]:
            code = _status_name(answer.error.code) if answer.HasField("error") else "OK"
            ended[answer.index] = loop.time() - start, code
        await fill()
    await call.done_writing()
    status = await call.code()
    given_up = loop.time() - start, UNFINISHED if status is grpc.StatusCode.OK else status.name
    return [Outcome(at, at, *ended.get(i, given_up)) for i, at in enumerate(sent)]


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, up to `seconds`."""
    generator = random.Random(seed)
    due = generator.expovariate(rate)
    while due < seconds:
        yield due
        due += generator.expovariate(rate)


def percentile(rising: Sequence[float], percent: int) -> float:
    """Return the smallest of sorted values that this percentage of them does not exceed."""
    return rising[max(0, -(-len(rising) * percent // 100) - 1)]


def mixed_texts(captions: Sequence[str], count: int, seed: int) -> list[str]:
    """Return texts of one to three captions (`SHARES`), drawn at random; the same seed gives the same texts."""
    generator = random.Random(seed)
    sizes = generator.choices(list(SHARES), list(SHARES.values()), k=count)
    return [" ".join(generator.choices(captions, k=size)) for size in sizes]


async def _named(ask: Ask, text: str, load: Load) -> tuple[str, Answer]:
    try:
        answer = await ask(text)
    except CallError as error:
        return str(error), ("", ())
    return "OK", (answer[0], list(answer[1])) if load.keeps_answers else ("", ())


def _status_name(number: int) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


@asynccontextmanager
async def grpc_channel(address: str) -> AsyncIterator[aio.Channel]:
    """Open a connection."""
    async with aio.insecure_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        yield channel


async def _reply(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except aio.AioRpcError as error:
        raise CallError(error.code().name) from error


@asynccontextmanager
async def by_grpc(address: str, model: str, load: Load) -> AsyncIterator[Ask]:
    """Ask by `Generate`."""
    async with grpc_channel(address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> Answer:
            response = await _reply(stub.Generate(load.request(text, model)))
            return response.text, response.tokens

        yield ask


@asynccontextmanager
async def by_oip_grpc(address: str, model: str, load: Load) -> AsyncIterator[Ask]:
    """Ask by the Open Inference Protocol's `ModelInfer`, as Triton's client does, with raw tensors."""
    async with grpc_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> Answer:
            request = ModelInferRequest(model_name=model, raw_input_contents=[_packed(text)])
            request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            request.parameters["num_beams"].int64_param = load.num_beams
            response = await _reply(stub.ModelInfer(request))
            names = [tensor.name for tensor in response.outputs]
            return response.raw_output_contents[names.index("text_output")][4:].decode(), ()

        yield ask


@asynccontextmanager
async def by_triton(address: str, model: str, load: Load) -> AsyncIterator[Ask]:
    """Ask the peer's model of Triton, whose input and output is one string."""
    async with grpc_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> Answer:
            request = ModelInferRequest(model_name="translate", raw_input_contents=[_packed(text)])
            request.inputs.add(name="text", datatype="BYTES", shape=[1, 1])
            response = await _reply(stub.ModelInfer(request))
            return response.raw_output_contents[0][4:].decode(), ()

        yield ask


def _packed(text: str) -> bytes:
    content = text.encode()
    return len(content).to_bytes(4, "little") + content


def _by_http(path: str, body: Callable[[str, Load], Any], read: Callable[[Any], str]) -> Any:
    """Return a function that asks a server over HTTP with kept connections."""

    @asynccontextmanager
    async def connect(address: str, model: str, load: Load) -> AsyncIterator[Ask]:
        url = address + path.format(model=model)
        async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None)) as session:

            async def ask(text: str) -> Answer:
                try:
                    async with session.post(url, json=body(text, load)) as response:
                        if response.status != 200:
                            raise CallError(f"HTTP {response.status}")
                        return read(await response.json()), ()
                except ClientError as error:
                    raise CallError(type(error).__name__) from error

            yield ask

    return connect


def _oip_body(text: str, load: Load) -> Any:
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [text]}
    return {"inputs": [tensor], "parameters": {"num_beams": load.num_beams}}


def _oip_text(answer: Any) -> str:
    return str(next(tensor["data"][0] for tensor in answer["outputs"] if tensor["name"] == "text_output"))


PROTOCOLS: dict[str, Callable[[str, str, Load], AbstractAsyncContextManager[Ask]]] = {
    GRPC: by_grpc,
    OIP_GRPC: by_oip_grpc,
    HTTP: _by_http("/v1/generate", lambda text, load: {"text": text, "numBeams": load.num_beams}, lambda answer: answer["text"]),
    OIP_REST: _by_http("/v2/models/{model}/infer", _oip_body, _oip_text),
    PEER_HTTP: _by_http("", lambda text, load: {"text": text}, lambda answer: answer["text"]),
    TRITON: by_triton,
}
