"""Messages of the protocol, as a client makes them."""

import struct
from collections.abc import Sequence
from typing import Any

from dragoman.inference.inference_pb2 import ModelInferRequest, ModelInferResponse
from dragoman.server.faces.oip.datatypes import DATATYPES, to_raw

NAMES = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES", bytes: "BYTES"}


def raw_bytes(*elements: str | bytes) -> bytes:
    encoded = [element.encode() if isinstance(element, str) else element for element in elements]
    return b"".join(struct.pack("<I", len(element)) + element for element in encoded)


def asking(*texts: str | bytes, shape: Sequence[int] | None = None, model: str = "en-de", **fields: Any) -> ModelInferRequest:
    """Return a request for texts with their raw content."""
    request = ModelInferRequest(model_name=model, raw_input_contents=[raw_bytes(*texts)], **fields)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)] if shape is None else shape)
    return request


def with_tensor(
    request: ModelInferRequest, name: str, values: Sequence[Any], datatype: str = "", shape: Sequence[int] | None = None
) -> ModelInferRequest:
    """Add a tensor with its raw content."""
    datatype = datatype or NAMES[type(values[0])]
    elements = [value.encode() if isinstance(value, str) else value for value in values]
    request.inputs.add(name=name, datatype=datatype, shape=[len(values)] if shape is None else shape)
    request.raw_input_contents.append(to_raw(DATATYPES[datatype], elements))
    return request


def with_parameters(request: ModelInferRequest, **parameters: bool | int | float | str) -> ModelInferRequest:
    """Add parameters."""
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


def outputs(response: ModelInferResponse) -> dict[str, tuple[list[int], list[Any]]]:
    """Return shape and elements of every output, as a client reads them."""
    found = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        datatype = DATATYPES[output.datatype]
        if datatype.code:
            elements = list(struct.unpack(f"<{len(raw) // datatype.num_bytes}{datatype.code}", raw))
        else:
            elements, position = [], 0
            while position < len(raw):
                [length] = struct.unpack_from("<I", raw, position)
                elements.append(raw[position + 4 : position + 4 + length].decode())
                position += 4 + length
        found[output.name] = (list(output.shape), elements)
    return found
