"""Callers that `dragoman load` does not have: scores, samples, broken messages, broken connections. Each goes round and round.

Every call is counted when it begins and, by its outcome, when it ends: a gRPC status, or for bare connections what became of them.
"""

import asyncio
import contextlib
import random
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpc import aio

from benchmarks.harness.cut_line import CutLine
from dragoman.v1 import generation_pb2, generation_pb2_grpc

CALL_SECONDS = 60.0
CLOSE_SECONDS = 10.0
OK, CLOSED, OPEN = "OK", "closed by the server", "left open"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = bytes.fromhex("000000040000000000")
LONG: dict[str, Any] = {"min_new_tokens": 50, "max_new_tokens": 60}


@dataclass(slots=True)
class Count:
    """Calls of one kind.

    Attributes:
        expected: How they may end.
        num_begun: All of them.
        ended: By how they ended.
    """

    expected: frozenset[str]
    num_begun: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    @property
    def num_lost(self) -> int:
        """Calls that began and never ended."""
        return self.num_begun - self.ended.total()

    @property
    def unexpected(self) -> dict[str, int]:
        """Outcomes that there should not be."""
        return {code: count for code, count in sorted(self.ended.items()) if code not in self.expected}


class Callers:
    """All kinds, on one event loop.

    Attributes:
        counts: By kind.
    """

    def __init__(self, address: str, texts: Sequence[str], seed: int = 0) -> None:
        """Describe them; `texts` are sources that the model knows."""
        self._address, self._texts, self._draws = address, texts, random.Random(seed)
        invalid, large = frozenset({"INVALID_ARGUMENT"}), frozenset({"RESOURCE_EXHAUSTED"})
        kinds: dict[str, tuple[Callable[[], Awaitable[str]], frozenset[str]]] = {
            "score": (self._score, frozenset({OK})),
            "sample": (self._sample, frozenset({OK})),
            "not UTF-8": (lambda: self._send_bytes(b"\x12\x02\xff\xfe"), invalid),
            "not a message": (lambda: self._send_bytes(b"\xff" * 40), invalid),
            "too long": (lambda: self._send_text("word " * 50_000), invalid),
            "message too large": (lambda: self._send_text("x" * (5 * 2**20)), large),
            "wrong options": (self._send_wrong_options, invalid),
            "unknown method": (self._call_nothing, frozenset({"UNIMPLEMENTED"})),
            "closed channel": (self._close_channel, frozenset({"CANCELLED"})),
            "cut connection": (self._cut_connection, frozenset({"UNAVAILABLE"})),
            "not HTTP/2": (lambda: self._send_raw(self._draws.randbytes(512)), frozenset({CLOSED})),
            "broken HTTP/2": (
                lambda: self._send_raw(PREFACE + SETTINGS + b"\x00\x00\x08\x01\x04\x00\x00\x00\x00" * 9),
                frozenset({CLOSED}),
            ),
            "reset connection": (self._reset, frozenset({CLOSED})),
        }
        self._kinds = {name: act for name, (act, _) in kinds.items()}
        self.counts = {name: Count(expected) for name, (_, expected) in kinds.items()}

    async def run(self, period_seconds: float, stopping: asyncio.Event) -> None:
        """Have every kind call again and again until told to stop, each waiting so long after an outcome."""
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        async with aio.insecure_channel(self._address, options) as channel:
            self._channel = channel
            self._stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
            await asyncio.gather(*(self._repeat(name, period_seconds, stopping) for name in self._kinds))

    async def _repeat(self, name: str, period_seconds: float, stopping: asyncio.Event) -> None:
        count = self.counts[name]
        while not stopping.is_set():
            count.num_begun += 1
            count.ended[await _outcome(self._kinds[name])] += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), period_seconds)

    def _text(self) -> str:
        return self._draws.choice(self._texts)

    async def _score(self) -> str:
        request = generation_pb2.ScoreRequest(text=self._text(), target=self._text(), return_alignment=True)
        await self._stub.Score(request, timeout=CALL_SECONDS)
        return OK

    async def _sample(self) -> str:
        request = generation_pb2.GenerateRequest(text=self._text(), do_sample=True, top_p=0.9, num_return_sequences=3)
        response = await self._stub.Generate(request, timeout=CALL_SECONDS)
        return OK if len(response.answers) == 3 else f"{len(response.answers)} answers"

    async def _send_bytes(self, content: bytes) -> str:
        call: Any = self._channel.unary_unary("/dragoman.v1.Generation/Generate")
        await call(content, timeout=CALL_SECONDS)
        return OK

    async def _send_text(self, text: str) -> str:
        await self._stub.Generate(generation_pb2.GenerateRequest(text=text), timeout=CALL_SECONDS)
        return OK

    async def _send_wrong_options(self) -> str:
        wrong: dict[str, Any] = self._draws.choice(
            [{"max_new_tokens": 0}, {"num_beams": 10**6}, {"do_sample": True, "temperature": -1.0}]
        )
        await self._stub.Generate(generation_pb2.GenerateRequest(text=self._text(), **wrong), timeout=CALL_SECONDS)
        return OK

    async def _call_nothing(self) -> str:
        call: Any = self._channel.unary_unary("/dragoman.v1.Generation/NoSuchMethod")
        await call(b"", timeout=CALL_SECONDS)
        return OK

    async def _close_channel(self) -> str:
        """Read the first message of a long stream and close the channel under it."""
        async with aio.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            rpc = self._long_stream(channel)
            await anext(aiter(rpc))
            await channel.close()
            return await _status(rpc)

    async def _cut_connection(self) -> str:
        """Read the first message of a long stream and lose the connection, without a word of HTTP/2."""
        async with CutLine(self._address) as line, aio.insecure_channel(line.address) as channel:
            rpc = self._long_stream(channel)
            await anext(aiter(rpc))
            line.cut()
            return await _status(rpc)

    def _long_stream(self, channel: aio.Channel) -> Any:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]
        return stub.GenerateStream(generation_pb2.GenerateRequest(text=self._text(), **LONG), timeout=CALL_SECONDS)

    async def _send_raw(self, content: bytes) -> str:
        """Send bytes that are no call; the server is to close the connection."""
        reader, writer = await self._connect()
        try:
            writer.write(content)
            await asyncio.wait_for(reader.read(), CLOSE_SECONDS)
        except TimeoutError:
            return OPEN
        except ConnectionError:
            return CLOSED
        finally:
            writer.transport.abort()
        return CLOSED

    async def _reset(self) -> str:
        """Begin to speak HTTP/2 and reset the connection in the middle of a frame."""
        _, writer = await self._connect()
        writer.write(PREFACE + SETTINGS[:4])
        await writer.drain()
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(1, 13, linger)  # SOL_SOCKET, SO_LINGER: closing sends a reset
        writer.close()
        return CLOSED

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self._address.rpartition(":")
        return await asyncio.open_connection(host, int(port))


async def _outcome(act: Callable[[], Awaitable[str]]) -> str:
    try:
        return await asyncio.wait_for(act(), 2 * CALL_SECONDS)
    except aio.AioRpcError as error:
        return error.code().name
    except TimeoutError:
        return "never ended"
    except (OSError, StopAsyncIteration) as error:
        return type(error).__name__


async def _status(rpc: Any) -> str:
    """Read a stream to its end and return its status."""
    try:
        async for _ in rpc:
            pass
    except aio.AioRpcError as error:
        return str(error.code().name)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return "CANCELLED"
    return OK
