"""Bodies of the Open Inference Protocol's REST, as its clients make them."""

import json
import struct
from collections.abc import Sequence
from typing import Any

from dragoman.inference.inference_pb2 import ModelInferRequest
from dragoman.server.faces.oip.datatypes import DATATYPES, elements_of

JSON = {"Content-Type": "application/json"}


def texts_of(datatype: str, raw: bytes) -> list[Any]:
    """Return elements; those of BYTES as texts."""
    return [x.decode() if isinstance(x, bytes) else x for x in elements_of(DATATYPES[datatype], raw)]


def tensor(name: str, datatype: str, shape: Sequence[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def asking(*texts: str, inputs: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
    """Return a request for texts."""
    return {"inputs": [tensor("text_input", "BYTES", [len(texts)], list(texts)), *inputs], **more}


def with_tensors(message: ModelInferRequest, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request whose tensors are bytes behind the JSON, as those of gRPC are."""
    inputs = [
        {"name": x.name, "datatype": x.datatype, "shape": list(x.shape), "parameters": {"binary_data_size": len(raw)}}
        for x, raw in zip(message.inputs, message.raw_input_contents, strict=True)
    ]
    head = json.dumps({"id": message.id, "inputs": inputs, **more}).encode()
    return head + b"".join(message.raw_input_contents), {"Inference-Header-Content-Length": str(len(head))}


def listed(message: ModelInferRequest) -> dict[str, Any]:
    """Return the same with its tensors in the JSON."""
    inputs = []
    for given, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        inputs.append(tensor(given.name, given.datatype, given.shape, texts_of(given.datatype, raw)))
    return {"id": message.id, "inputs": inputs}


def outputs(told: dict[str, Any], rest: bytes = b"") -> dict[str, tuple[list[int], list[Any]]]:
    """Return shape and elements of every output, as a client reads them."""
    found, position = {}, 0
    for output in told["outputs"]:
        if "data" in output:
            elements = output["data"]
        else:
            end = position + output["parameters"]["binary_data_size"]
            elements = [
                x.decode() if isinstance(x, bytes) else x for x in elements_of(DATATYPES[output["datatype"]], rest[position:end])
            ]
            position = end
        found[output["name"]] = (output["shape"], list(elements))
    assert position == len(rest)
    return found


def raw(*texts: str) -> bytes:
    return b"".join(struct.pack("<I", len(text.encode())) + text.encode() for text in texts)
