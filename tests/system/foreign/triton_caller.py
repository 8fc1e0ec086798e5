"""A caller with Triton's gRPC client as it is; prints what it was answered as JSON. Run by `test_open_inference.py`."""

import asyncio
import json
import queue
import sys
from typing import Any

import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from triton_shared import MODEL, Kit, is_ready


def ways(options: dict[str, Any], texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    # No version of the client sends a list or a priority of ours as a parameter, and some send no fractions.
    plain = {name: value for name, value in options.items() if name not in ("suppressed_tokens", "priority")}
    rest = {name: value for name, value in options.items() if name not in plain}
    document = kit.tensor("sampling_parameters", [json.dumps(options)])
    parameters = {name: json.dumps(value) if isinstance(value, float) else value for name, value in plain.items()}
    return {
        "tensors": [{"inputs": [kit.text(each), *kit.tensors(options)]} for each in texts],
        "parameters": [{"inputs": [kit.text(each), *kit.tensors(rest)], "parameters": parameters} for each in texts],
        "sampling_parameters": [{"inputs": [kit.text(each), document]} for each in texts],
        "together": [{"inputs": [kit.text(*texts), *kit.tensors(options)]}],
    }


kit = Kit(triton, triton_aio, ways)


async def run_aio(address: str, asked: dict[str, Any]) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        return await kit.run_aio(client, asked)


class Pieces:
    """Parts of the answer to one request of a stream."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.score: list[float] = []
        self.num_final = 0

    def add(self, result: Any) -> None:
        self.texts.append(result.as_numpy("text_output")[0][0].decode())
        if result.get_response().parameters["triton_final_response"].bool_param:
            self.num_final += 1
            self.score = [result.as_numpy("score")[0][0].item()]


def run_stream(address: str, client: Any, texts: list[str]) -> Any:
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    for number, each in enumerate(texts):
        client.async_stream_infer(MODEL, [kit.text(each)], request_id=str(number), enable_empty_final_response=True)
    client.async_stream_infer(MODEL, [kit.text(" ")], request_id="blank")
    found, error = {str(number): Pieces() for number in range(len(texts))}, ""
    while not error or any(not pieces.num_final for pieces in found.values()):
        result, failed = arrived.get(timeout=120)
        if failed is not None:
            error = str(failed)
        else:
            found[result.get_response().id].add(result)
    client.stop_stream()
    found |= asyncio.run(run_aio_stream(address, texts))
    return {name: vars(pieces) for name, pieces in found.items()} | {"error": error}


async def run_aio_stream(address: str, texts: list[str]) -> dict[str, Pieces]:
    async def requests() -> Any:
        for number, each in enumerate(texts):
            yield {"model_name": MODEL, "inputs": [kit.text(each)], "request_id": f"aio-{number}"}

    found = {f"aio-{number}": Pieces() for number in range(len(texts))}
    async with triton_aio.InferenceServerClient(address) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].add(result)
    return found


def describe(client: Any) -> Any:
    return {
        "ready": is_ready(client),
        "metadata": client.get_model_metadata(MODEL, as_json=True),
        "config": client.get_model_config(MODEL, as_json=True),
        "index": client.get_model_repository_index(as_json=True),
        "statistics": client.get_inference_statistics(as_json=True),
        "server": client.get_server_metadata(as_json=True),
    }


def contract() -> Any:
    """Return what the client's stubs were made of, in two files."""
    from tritonclient.grpc import model_config_pb2, service_pb2

    files = []
    for stubs in (service_pb2, model_config_pb2):
        file = FileDescriptorProto()
        stubs.DESCRIPTOR.CopyToProto(file)
        files.append(file.SerializeToString().hex())
    return files


def main(address: str, do: str, *arguments: str) -> None:
    asked = json.loads(arguments[0]) if arguments else {}
    client = triton.InferenceServerClient(address)
    match do:
        case "sync":
            found: Any = kit.run_sync(client, asked)
        case "aio":
            found = asyncio.run(run_aio(address, asked))
        case "stream":
            found = run_stream(address, client, asked["texts"])
        case "describe":
            found = describe(client)
        case "errors":
            late = {"deadline": lambda: client.infer(MODEL, [kit.text("A dog.")], client_timeout=0.0001)}
            found = kit.errors(client, late)
        case "contract":
            found = contract()
        case _:
            found = asyncio.run(kit.cancel(address))
    print(json.dumps(found))


main(*sys.argv[1:])
