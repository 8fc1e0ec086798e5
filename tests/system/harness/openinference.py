"""Messages of the Open Inference Protocol, over gRPC and over REST, as its clients make and read them."""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dragoman.inference.inference_pb2 import ModelInferRequest, ModelInferResponse
from tests.system.harness.protocol import Answer, LogProb

NAMES = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES", bytes: "BYTES"}
CODES = {"BOOL": "?", "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d", "BYTES": ""}
CODES |= {"UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q"}
JSON = {"Content-Type": "application/json"}

# gRPC


def raw_bytes(*elements: str | bytes) -> bytes:
    encoded = [element.encode() if isinstance(element, str) else element for element in elements]
    return b"".join(struct.pack("<I", len(element)) + element for element in encoded)


def elements_of(datatype: str, raw: bytes) -> list[Any]:
    """Return the elements of a raw content; those of BYTES as texts."""
    if code := CODES[datatype]:
        return list(struct.unpack(f"<{len(raw) // struct.calcsize(f'<{code}')}{code}", raw))
    elements, position = [], 0
    while position < len(raw):
        [length] = struct.unpack_from("<I", raw, position)
        elements.append(raw[position + 4 : position + 4 + length].decode())
        position += 4 + length
    return elements


def infer_request(
    *texts: str | bytes, shape: Sequence[int] | None = None, model: str = "en-de", **fields: Any
) -> ModelInferRequest:
    request = ModelInferRequest(model_name=model, raw_input_contents=[raw_bytes(*texts)], **fields)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)] if shape is None else shape)
    return request


def with_tensor(
    request: ModelInferRequest, name: str, values: Sequence[Any], datatype: str = "", shape: Sequence[int] | None = None
) -> ModelInferRequest:
    if values and isinstance(values[0], dict):  # terms
        values = [json.dumps(values)]
    datatype = datatype or NAMES[type(values[0])]
    request.inputs.add(name=name, datatype=datatype, shape=[len(values)] if shape is None else shape)
    raw = struct.pack(f"<{len(values)}{CODES[datatype]}", *values) if CODES[datatype] else raw_bytes(*values)
    request.raw_input_contents.append(raw)
    return request


def with_parameters(request: ModelInferRequest, **parameters: bool | int | float | str) -> ModelInferRequest:
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


def grpc_outputs(response: ModelInferResponse) -> dict[str, tuple[list[int], list[Any]]]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {output.name: (list(output.shape), elements_of(output.datatype, raw)) for output, raw in pairs}


def json_tensor(name: str, datatype: str, shape: Sequence[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}


def infer_body(*texts: Any, inputs: Sequence[dict[str, Any]] = (), **more: Any) -> dict[str, Any]:
    return {"inputs": [json_tensor("text_input", "BYTES", [len(texts)], list(texts)), *inputs], **more}


def listed_body(request: ModelInferRequest) -> dict[str, Any]:
    pairs = zip(request.inputs, request.raw_input_contents, strict=True)
    return {
        "id": request.id,
        "inputs": [json_tensor(x.name, x.datatype, x.shape, elements_of(x.datatype, raw)) for x, raw in pairs],
    }


def binary_body(request: ModelInferRequest, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Return body and headers of a request of gRPC with its tensors as bytes behind the JSON."""
    inputs = [
        {"name": x.name, "datatype": x.datatype, "shape": list(x.shape), "parameters": {"binary_data_size": len(raw)}}
        for x, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    ]
    head = json.dumps({"id": request.id, "inputs": inputs, **more}).encode()
    return head + b"".join(request.raw_input_contents), {"Inference-Header-Content-Length": str(len(head))}


def rest_outputs(message: dict[str, Any], rest: bytes = b"") -> dict[str, tuple[list[int], list[Any]]]:
    """Return shape and elements of every output, in the JSON or in the bytes behind it."""
    found, position = {}, 0
    for output in message["outputs"]:
        elements = output.get("data")
        if elements is None:
            end = position + output["parameters"]["binary_data_size"]
            elements, position = elements_of(output["datatype"], rest[position:end]), end
        found[output["name"]] = (output["shape"], list(elements))
    assert position == len(rest)
    return found


def log_prob(token: Mapping[str, Any]) -> LogProb:
    return token["token"], token["piece"], token["log_prob"], tuple(map(log_prob, token.get("top", ())))


def elements(outputs: Mapping[str, tuple[Any, list[Any]]]) -> dict[str, list[Any]]:
    return {name: values for name, (_, values) in outputs.items()}


def answers_of(outputs: Mapping[str, Sequence[Any]], num_texts: int) -> list[Answer]:
    """Return the answer to each text of outputs whose elements are row by row."""

    def row(name: str, number: int) -> list[Any]:
        width = len(outputs[name]) // num_texts
        return list(outputs[name][number * width : (number + 1) * width])

    return [
        Answer(
            texts=row("text_output", number),
            scores=row("score", number),
            tokens=[json.loads(each) for each in row("tokens", number)],
            endings=row("finish_reason", number),
            log_probs=[list(map(log_prob, json.loads(each))) for each in row("log_probs", number)]
            if "log_probs" in outputs
            else None,
            counts=(row("num_input_tokens", number)[0], row("num_output_tokens", number)[0]),
            is_truncated=row("is_truncated", number)[0],
            seed=row("seed", number)[0] if "seed" in outputs else None,
        )
        for number in range(num_texts)
    ]


def joined(pieces: Sequence[Mapping[str, Sequence[Any]]]) -> Answer:
    """Return the answer of a stream, each piece of which has the new text and tokens, and the last one the rest."""
    [answer] = answers_of(pieces[-1], 1)
    if len(pieces) == 1:
        return answer
    tokens = [token for piece in pieces for token in json.loads(piece["tokens"][0])]
    return replace(answer, texts=["".join(piece["text_output"][0] for piece in pieces)], tokens=[tokens])


def project(answer: Answer) -> Answer:
    """Return the part of an answer that is carried: pieces as texts, and no list where no log-probabilities were asked for."""
    if answer.log_probs is None or not any(answer.log_probs):
        return replace(answer, log_probs=None)
    return replace(answer, log_probs=[list(map(_as_text, each)) for each in answer.log_probs])


def _as_text(log_prob: LogProb) -> LogProb:
    token, piece, value, top = log_prob
    assert isinstance(piece, bytes)
    return token, piece.decode(errors="replace"), value, tuple(map(_as_text, top))
