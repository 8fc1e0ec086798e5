"""One way to ask each kind of server for a translation: send a text, get its translation or the name of what went wrong."""

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from grpc import aio

from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.v1 import generation_pb2, generation_pb2_grpc

TRITON_MODEL = "translate"


class AskError(Exception):
    """A request that was not answered; the message is the name of its status."""


Ask = Callable[[str], Awaitable[str]]
"""Sends a text and returns its translation; raises AskError."""


@asynccontextmanager
async def dragoman(address: str) -> AsyncIterator[Ask]:
    """Lend a connection to Dragoman."""
    async with aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> str:
            try:
                response = await stub.Generate(generation_pb2.GenerateRequest(text=text))
            except aio.AioRpcError as error:
                raise AskError(error.code().name) from error
            return str(response.answers[0].text)

        yield ask


@asynccontextmanager
async def triton(address: str) -> AsyncIterator[Ask]:
    """Lend a connection to Triton, whose model takes and gives one string."""
    tensor = ModelInferRequest.InferInputTensor(name="text", datatype="BYTES", shape=[1, 1])
    async with aio.insecure_channel(address) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(text: str) -> str:
            content = text.encode()
            packed = struct.pack("<I", len(content)) + content
            request = ModelInferRequest(model_name=TRITON_MODEL, inputs=[tensor], raw_input_contents=[packed])
            try:
                response = await stub.ModelInfer(request)
            except aio.AioRpcError as error:
                raise AskError(error.code().name) from error
            return str(response.raw_output_contents[0][4:].decode())

        yield ask


@asynccontextmanager
async def http(address: str) -> AsyncIterator[Ask]:
    """Lend connections, kept alive and as many as it takes, to a server that answers JSON with JSON; `address` is the URL."""
    import aiohttp  # only those who measure such servers have it

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def ask(text: str) -> str:
            try:
                async with session.post(address, json={"text": text}) as response:
                    if response.status != 200:
                        raise AskError(f"HTTP {response.status}")
                    return str((await response.json())["text"])
            except aiohttp.ClientError as error:
                raise AskError(type(error).__name__) from error

        yield ask


FACES: dict[str, Callable[[str], AbstractAsyncContextManager[Ask]]] = {"dragoman": dragoman, "triton": triton, "http": http}
"""By protocol."""
