"""Messages of the Open Inference Protocol as its REST has them: JSON, and tensors as bytes behind it where they are wanted so."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from dragoman.inference import inference_pb2
from dragoman.server.core.text_work import on_thread
from dragoman.server.faces.large_requests import LARGE_BYTES
from dragoman.server.faces.oip.datatypes import DATATYPES, elements_of

JSON, BINARY = "application/json", "application/octet-stream"
# Bytes of the JSON of a body that has tensors behind it.
LENGTH_KEY = "Inference-Header-Content-Length"

Response = inference_pb2.ModelInferResponse
Kind = TypeVar("Kind")


def plain(message: Any) -> dict[str, Any]:
    """Return a message of the protocol with the contract's names; integers are numbers, as Triton has them."""
    return {
        field.name: _plain(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _plain(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_one(field, each) for each in value]
    return _one(field, value)


def _one(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    return value if field.enum_type is None else field.enum_type.values_by_number[value].name


async def to_answer(response: Response, is_binary: Callable[[str], bool]) -> web.Response:
    """Return what answers a request for inference; a large one is written beside others' work.

    Args:
        response: As gRPC would send it.
        is_binary: Says of an output by its name whether it is wanted as bytes.
    """
    binary = {output.name for output in response.outputs if is_binary(output.name)}
    head, tensors = await _beside(response, lambda: _with_tensors(response, binary))
    if not binary:
        return web.Response(body=head, content_type=JSON)
    return web.Response(body=b"".join((head, *tensors)), content_type=BINARY, headers={LENGTH_KEY: str(len(head))})


async def to_generated(response: Response) -> bytes:
    """Return JSON that has each output by its name: a value, or a list where there are several."""
    return await _beside(response, lambda: _by_name(response))


async def _beside(response: Response, write: Callable[[], Kind]) -> Kind:
    is_large = sum(map(len, response.raw_output_contents)) > LARGE_BYTES
    return await on_thread(write) if is_large else write()


def _with_tensors(response: Response, binary: set[str]) -> tuple[bytes, list[bytes]]:
    """Return JSON, and the content of outputs that is bytes."""
    outputs, tensors = [], []
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        told: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if output.name in binary:
            tensors.append(raw)
            outputs.append(told | {"parameters": {"binary_data_size": len(raw)}})
        else:
            outputs.append(told | {"data": list(_values(output.datatype, raw))})
    return msgspec.json.encode(_envelope(response) | {"outputs": outputs}), tensors


def _by_name(response: Response) -> bytes:
    told = _envelope(response)
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        values = list(_values(output.datatype, raw))
        told[output.name] = values[0] if len(values) == 1 else values
    return msgspec.json.encode(told)


def _envelope(response: Response) -> dict[str, Any]:
    told = {"id": response.id, "model_name": response.model_name}
    return told | ({"model_version": response.model_version} if response.model_version else {})


def _values(datatype: str, raw: bytes) -> Iterator[Any]:
    """Yield elements as JSON has them; those of BYTES are texts."""
    for element in elements_of(DATATYPES[datatype], raw):
        yield element.decode(errors="replace") if isinstance(element, bytes) else element
