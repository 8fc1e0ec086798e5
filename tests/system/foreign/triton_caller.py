"""A caller with Triton's client as it is; prints what it was answered as JSON. Run by `test_open_inference.py`."""

import asyncio
import json
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

MODEL = "en-de"
JSON = ("tokens", "log_probs")
NAMES = ("text_output", "score", "finish_reason", "tokens", "num_input_tokens", "num_output_tokens")


def tensor(name: str, values: Any) -> Any:
    """Return an input of Triton's."""
    array = np.array(values, dtype=np.object_ if isinstance(np.ravel(values)[0], str) else None)
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def text(*texts: str) -> Any:
    return tensor("text_input", [[each] for each in texts])


def options_as_tensors(options: dict[str, Any]) -> list[Any]:
    return [tensor(name, value if isinstance(value, list) else [value]) for name, value in options.items()]


def row(result: Any, number: int) -> dict[str, Any]:
    """Return what a result says of one text."""
    found = {}
    for name in NAMES:
        values = list(result.as_numpy(name)[number])
        if values and isinstance(values[0], bytes):
            values = [value.decode() for value in values]
        else:
            values = [value.item() for value in values]
        found[name] = [json.loads(value) for value in values] if name in JSON else values
    return found


def ways(options: dict[str, Any], texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the arguments of each way to say the same."""
    plain = {name: value for name, value in options.items() if name not in ("suppressed_tokens", "priority")}
    rest = {name: value for name, value in options.items() if name not in plain}
    document = tensor("sampling_parameters", [json.dumps(options)])
    # Some versions of the client send no fractions as parameters, and none sends a priority as one of its own.
    parameters = {name: json.dumps(value) if isinstance(value, float) else value for name, value in plain.items()}
    return {
        "tensors": [{"inputs": [text(each), *options_as_tensors(options)]} for each in texts],
        "parameters": [{"inputs": [text(each), *options_as_tensors(rest)], "parameters": parameters} for each in texts],
        "sampling_parameters": [{"inputs": [text(each), document]} for each in texts],
        "together": [{"inputs": [text(*texts), *options_as_tensors(options)]}],
    }


def rows(results: list[Any], count: int) -> list[dict[str, Any]]:
    return [row(result, 0) for result in results] if len(results) > 1 else [row(results[0], number) for number in range(count)]


def run_sync(client: Any, asked: dict[str, Any]) -> Any:
    return [
        {
            way: rows([client.infer(MODEL, **call) for call in calls], len(asked["texts"]))
            for way, calls in ways(options, asked["texts"]).items()
        }
        for options in asked["options"]
    ]


async def run_aio(address: str, asked: dict[str, Any]) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        found = []
        for options in asked["options"]:
            said = {}
            for way, calls in ways(options, asked["texts"]).items():
                results = await asyncio.gather(*(client.infer(MODEL, **call) for call in calls))
                said[way] = rows(list(results), len(asked["texts"]))
            found.append(said)
        return found


class Pieces:
    """What came of one request."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.score: list[float] = []
        self.num_final = 0

    def add(self, result: Any) -> None:
        self.texts.append(result.as_numpy("text_output")[0][0].decode())
        if result.get_response().parameters["triton_final_response"].bool_param:
            self.num_final += 1
            self.score = [result.as_numpy("score")[0][0].item()]

    def said(self) -> dict[str, Any]:
        return {"texts": self.texts, "score": self.score, "num_final": self.num_final}


def run_stream(address: str, client: Any, texts: list[str]) -> Any:
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    for number, each in enumerate(texts):
        client.async_stream_infer(MODEL, [text(each)], request_id=str(number), enable_empty_final_response=True)
    client.async_stream_infer(MODEL, [text(" ")], request_id="blank")
    found, error = {str(number): Pieces() for number in range(len(texts))}, ""
    while not error or any(not pieces.num_final for pieces in found.values()):
        result, failed = arrived.get(timeout=120)
        if failed is not None:
            error = str(failed)
        else:
            found[result.get_response().id].add(result)
    client.stop_stream()
    said: dict[str, Any] = {name: pieces.said() for name, pieces in found.items()}
    return said | asyncio.run(run_aio_stream(address, texts)) | {"error": error}


async def run_aio_stream(address: str, texts: list[str]) -> dict[str, Any]:
    async def requests() -> Any:
        for number, each in enumerate(texts):
            yield {"model_name": MODEL, "inputs": [text(each)], "request_id": f"aio-{number}"}

    found = {f"aio-{number}": Pieces() for number in range(len(texts))}
    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].add(result)
    return {name: pieces.said() for name, pieces in found.items()}


def describe(client: Any) -> Any:
    return {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("x")],
        "metadata": client.get_model_metadata(MODEL, as_json=True),
        "config": client.get_model_config(MODEL, as_json=True),
        "index": client.get_model_repository_index(as_json=True),
        "statistics": client.get_inference_statistics(as_json=True),
        "server": client.get_server_metadata(as_json=True),
    }


def errors(client: Any) -> Any:
    attempts: dict[str, Callable[[], Any]] = {
        "blank": lambda: client.infer(MODEL, [text("A dog.", " ")]),
        "no model": lambda: client.infer("nobody", [text("A dog.")]),
        "no version": lambda: client.infer(MODEL, [text("A dog.")], model_version="17"),
        "unknown input": lambda: client.infer(MODEL, [text("A dog."), tensor("beams", [2])]),
        "unknown output": lambda: client.infer(MODEL, [text("A dog.")], outputs=[triton.InferRequestedOutput("beams")]),
        "unknown parameter": lambda: client.infer(MODEL, [text("A dog.")], parameters={"beams": 2}),
        "timeout": lambda: client.infer(MODEL, [text("A dog.")], timeout=1),
        "deadline": lambda: client.infer(MODEL, [text("A dog.")], client_timeout=0.0001),
        "shared memory": lambda: client.get_system_shared_memory_status(),
        "load": lambda: client.load_model(MODEL),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except InferenceServerException as failed:
            found[name] = (failed.status(), failed.message())
    return found


def contract() -> Any:
    """Return what the client's stubs were made of, in two files."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    files = []
    for stubs in (service_pb2, model_config_pb2):
        file = FileDescriptorProto()
        stubs.DESCRIPTOR.CopyToProto(file)
        files.append(file.SerializeToString().hex())
    return files


def cancel(client: Any) -> Any:
    """Begin many long answers in one message, and leave when told to."""
    ended = threading.Event()
    inputs = [text(*["a dog"] * 64), tensor("max_new_tokens", [900])]
    call = client.async_infer("alpha", inputs, callback=lambda result, error: ended.set())
    sys.stdin.readline()
    call.cancel()
    ended.wait(60)
    return "left"


def main(address: str, do: str, *arguments: str) -> None:
    asked = json.loads(arguments[0]) if arguments else {}
    client = triton.InferenceServerClient(address)
    match do:
        case "sync":
            found = run_sync(client, asked)
        case "aio":
            found = asyncio.run(run_aio(address, asked))
        case "stream":
            found = run_stream(address, client, asked["texts"])
        case "describe":
            found = describe(client)
        case "errors":
            found = errors(client)
        case "contract":
            found = contract()
        case _:
            found = cancel(client)
    print(json.dumps(found))


main(*sys.argv[1:])
