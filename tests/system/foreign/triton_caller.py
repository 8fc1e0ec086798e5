"""Triton's client over gRPC or HTTP, as it is; prints what it was answered as JSON.

python triton_caller.py PROTOCOL ADDRESS (everything | cancel | operate) [ARGUMENT ...]
"""

import asyncio
import importlib
import json
import queue
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PROTOCOL, ADDRESS, *ARGUMENTS = sys.argv[1:]
IS_HTTP = PROTOCOL == "http"
triton = importlib.import_module(f"tritonclient.{PROTOCOL}")
triton_aio = importlib.import_module(f"tritonclient.{PROTOCOL}.aio")
MODEL = "en-de"
NAMES = ("text_output", "score", "finish_reason", "tokens", "num_input_tokens", "num_output_tokens")
IN_JSON = {"binary_data": False} if IS_HTTP else {}


def tensor(name: str, values: Any, **set_options: bool) -> Any:
    array = np.array(values, dtype=np.object_ if isinstance(np.ravel(values)[0], str) else None)
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, **set_options)
    return made


def text(*texts: str, **set_options: bool) -> Any:
    return tensor("text_input", [[each] for each in texts], **set_options)


def tensors(options: Mapping[str, Any], **set_options: bool) -> list[Any]:
    return [tensor(name, value if isinstance(value, list) else [value], **set_options) for name, value in options.items()]


def ways(options: dict[str, Any], texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the arguments of each way to say the same options and texts."""
    # The client keeps `priority` for itself; over gRPC none of its versions sends a list, and some send no fractions.
    rest = {name: value for name, value in options.items() if name == "priority" or (isinstance(value, list) and not IS_HTTP)}
    plain = {name: value for name, value in options.items() if name not in rest}
    if not IS_HTTP:
        plain = {name: json.dumps(value) if isinstance(value, float) else value for name, value in plain.items()}
    document = tensor("sampling_parameters", [json.dumps(options)], **IN_JSON)
    found: dict[str, list[dict[str, Any]]] = {
        "tensors": [{"inputs": [text(each), *tensors(options)]} for each in texts],
        "parameters": [{"inputs": [text(each, **IN_JSON), *tensors(rest)], "parameters": plain} for each in texts],
        "sampling_parameters": [{"inputs": [text(each), document]} for each in texts],
        "together": [{"inputs": [text(*texts), *tensors(options)]}],
    }
    if IS_HTTP:
        listed = [triton.InferRequestedOutput(name, binary_data=False) for name in NAMES]
        mixed = [triton.InferRequestedOutput(name, binary_data=number % 2 == 0) for number, name in enumerate(NAMES)]
        for call in found["parameters"]:
            call["outputs"] = mixed
        in_json = [[text(each, **IN_JSON), *tensors(options, **IN_JSON)] for each in texts]
        found["json"] = [{"inputs": inputs, "outputs": listed} for inputs in in_json]
        found["together in json"] = [{"inputs": [text(*texts, **IN_JSON), *tensors(options)], "outputs": listed}]
    return found


def rows(results: list[Any], count: int) -> list[dict[str, Any]]:
    """Return the answer to each text, from a result for each or one result for all."""
    places = [(result, 0) for result in results] if len(results) > 1 else [(results[0], number) for number in range(count)]
    return [{name: elements(result, name, number) for name in NAMES} for result, number in places]


def elements(result: Any, name: str, number: int) -> list[Any]:
    values = [value.decode() if isinstance(value, bytes) else value for value in result.as_numpy(name)[number].tolist()]
    return [json.loads(value) for value in values] if name == "tokens" else values


def is_ready(client: Any) -> list[Any]:
    return [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("x")]


async def ask_aio(options: list[dict[str, Any]], texts: list[str]) -> Any:
    async with triton_aio.InferenceServerClient(ADDRESS) as client:
        found = []
        for each in options:
            results = {}
            for way, calls in ways(each, texts).items():
                results[way] = await asyncio.gather(*(client.infer(MODEL, **call) for call in calls))
            found.append({way: rows(list(answers), len(texts)) for way, answers in results.items()})
        return found, await asyncio.gather(*is_ready(client))


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def told(results: list[Any]) -> dict[str, Any]:
    """Return the parts of the answer to one request of a stream."""
    texts = [result.as_numpy("text_output")[0][0].decode() for result in results]
    return {"texts": texts, "score": [results[-1].as_numpy("score")[0][0].item()], "num_final": sum(map(is_final, results))}


def stream(client: Any, texts: list[str]) -> Any:
    """Return the pieces of each text from both clients, and the error of a blank text."""
    arrived: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    for number, each in enumerate(texts):
        client.async_stream_infer(MODEL, [text(each)], request_id=str(number), enable_empty_final_response=True)
    client.async_stream_infer(MODEL, [text(" ")], request_id="blank")
    found, error = asyncio.run(stream_aio(texts)), ""
    num_running = len(texts)
    while not error or num_running:
        result, failed = arrived.get(timeout=120)
        if failed is not None:
            error = str(failed)
        else:
            found[result.get_response().id].append(result)
            num_running -= is_final(result)
    client.stop_stream()
    return {name: told(results) for name, results in found.items()} | {"error": error}


async def stream_aio(texts: list[str]) -> defaultdict[str, list[Any]]:
    async def requests() -> Any:
        for number, each in enumerate(texts):
            yield {"model_name": MODEL, "inputs": [text(each)], "request_id": f"aio-{number}"}

    found = defaultdict(list)
    async with triton_aio.InferenceServerClient(ADDRESS) as client:
        async for result, error in client.stream_infer(requests()):
            assert error is None
            found[result.get_response().id].append(result)
    return found


def describe(client: Any) -> Any:
    as_json = {} if IS_HTTP else {"as_json": True}
    return {
        "ready": is_ready(client),
        "metadata": client.get_model_metadata(MODEL, **as_json),
        "config": client.get_model_config(MODEL, **as_json),
        "index": client.get_model_repository_index(**as_json),
        "statistics": client.get_inference_statistics(**as_json),
        "server": client.get_server_metadata(**as_json),
    }


def refusal(attempt: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[str, str]:
    """Return status and message of a call that is refused; `done` if it is not."""
    try:
        attempt(*arguments, **options)
    except InferenceServerException as failed:
        return str(failed.status()), failed.message()
    except Exception as failed:  # of the library that carries the client's calls
        return type(failed).__name__, ""
    return "done", ""


def errors(client: Any) -> dict[str, tuple[str, str]]:
    dog, infer = [text("A dog.")], client.infer
    found = {
        "blank": refusal(infer, MODEL, [text("A dog.", " ")]),
        "no model": refusal(infer, "nobody", dog),
        "no version": refusal(infer, MODEL, dog, model_version="17"),
        "unknown input": refusal(infer, MODEL, [*dog, tensor("beams", [2])]),
        "unknown output": refusal(infer, MODEL, dog, outputs=[triton.InferRequestedOutput("beams")]),
        "unknown parameter": refusal(infer, MODEL, dog, parameters={"beams": 2}),
        "timeout": refusal(infer, MODEL, dog, timeout=1),
        "shared memory": refusal(client.get_system_shared_memory_status),
        "load": refusal(client.load_model, MODEL),
    }
    if IS_HTTP:
        found["settings"] = refusal(client.get_log_settings)
        hasty = triton.InferenceServerClient(ADDRESS, network_timeout=0.001)
        found["deadline of its own"] = refusal(hasty.infer, MODEL, [*dog, tensor("max_new_tokens", [64])])
    else:
        found["deadline of its own"] = refusal(infer, MODEL, dog, client_timeout=0.0001)
    return found


def contract() -> list[str]:
    from tritonclient.grpc import model_config_pb2, service_pb2

    files = [FileDescriptorProto(), FileDescriptorProto()]
    for stubs, file in zip((service_pb2, model_config_pb2), files, strict=True):
        stubs.DESCRIPTOR.CopyToProto(file)
    return [file.SerializeToString().hex() for file in files]


def everything(client: Any, asked: dict[str, Any]) -> dict[str, Any]:
    texts, options = asked["texts"], asked["options"]
    found: dict[str, Any] = {"describe": describe(client), "errors": errors(client)}
    found["sync"] = [
        {way: rows([client.infer(MODEL, **call) for call in calls], len(texts)) for way, calls in ways(each, texts).items()}
        for each in options
    ]
    found["aio"], found["ready"] = asyncio.run(ask_aio(options, texts))
    if IS_HTTP:
        pending = [client.async_infer(MODEL, [text(each)]) for each in texts]
        for way in ("gzip", "deflate"):
            compressed = [client.infer(MODEL, [text(each)], request_compression_algorithm=way) for each in texts]
            found["sync"][0][way] = rows(compressed, len(texts))
        found["later"] = rows([each.get_result() for each in pending], len(texts))
        found["id"] = client.infer(MODEL, [text("A dog.")], request_id="mine", model_version="").get_response()["id"]
    else:
        found |= {"stream": stream(client, texts), "contract": contract()}
    return found


async def cancel() -> str:
    async with triton_aio.InferenceServerClient(ADDRESS) as client:
        inputs = [text(*["a dog"] * 64), tensor("max_new_tokens", [900])]
        call = asyncio.ensure_future(client.infer("alpha", inputs))
        await asyncio.to_thread(sys.stdin.readline)
        call.cancel()
        await asyncio.wait([call])
    return "left"


def operate(client: Any, token: str, model: str) -> dict[str, tuple[str, str]]:
    mine = {"headers": {"authorization": f"Bearer {token}"}}
    return {
        "without a token": refusal(client.unload_model, model),
        "unload": refusal(client.unload_model, model, **mine),
        "otherwise": refusal(client.load_model, model, config="{}", **mine),
        "another": refusal(client.load_model, "none", **mine),
        "load": refusal(client.load_model, model, **mine),
    }


def main(do: str, *arguments: str) -> None:
    client = triton.InferenceServerClient(ADDRESS)
    match do:
        case "everything":
            found: Any = everything(client, json.loads(arguments[0]))
        case "operate":
            found = operate(client, *arguments)
        case _:
            found = asyncio.run(cancel())
    client.close()
    print(json.dumps(found))


main(*ARGUMENTS)
