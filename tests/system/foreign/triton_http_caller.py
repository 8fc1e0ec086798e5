"""A caller with Triton's HTTP client as it is; prints what it was answered as JSON. Run by `test_open_inference_rest.py`."""

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

MODEL = "en-de"
JSON = ("tokens", "log_probs")
NAMES = ("text_output", "score", "finish_reason", "tokens", "num_input_tokens", "num_output_tokens")


def tensor(name: str, values: Any, is_binary: bool = True) -> Any:
    """Return an input of Triton's."""
    array = np.array(values, dtype=np.object_ if isinstance(np.ravel(values)[0], str) else None)
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array, binary_data=is_binary)
    return made


def text(*texts: str, is_binary: bool = True) -> Any:
    return tensor("text_input", [[each] for each in texts], is_binary)


def options_as_tensors(options: dict[str, Any], is_binary: bool = True) -> list[Any]:
    return [tensor(name, value if isinstance(value, list) else [value], is_binary) for name, value in options.items()]


def row(result: Any, number: int) -> dict[str, Any]:
    """Return what a result says of one text."""
    found = {}
    for name in NAMES:
        values = [value.decode() if isinstance(value, bytes) else value for value in result.as_numpy(name)[number].tolist()]
        found[name] = [json.loads(value) for value in values] if name in JSON else values
    return found


def ways(options: dict[str, Any], texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the arguments of each way to say the same."""
    # The client keeps the name of a priority for itself, for levels of Triton's own.
    plain = {name: value for name, value in options.items() if name != "priority"}
    rest = {name: value for name, value in options.items() if name not in plain}
    document = json.dumps(options)
    listed = [triton.InferRequestedOutput(name, binary_data=False) for name in NAMES]
    mixed = [triton.InferRequestedOutput(name, binary_data=number % 2 == 0) for number, name in enumerate(NAMES)]
    return {
        "bytes": [{"inputs": [text(each), *options_as_tensors(options)]} for each in texts],
        "json": [
            {"inputs": [text(each, is_binary=False), *options_as_tensors(options, is_binary=False)], "outputs": listed}
            for each in texts
        ],
        "parameters": [
            {"inputs": [text(each, is_binary=False), *options_as_tensors(rest)], "parameters": plain, "outputs": mixed}
            for each in texts
        ],
        "sampling_parameters": [{"inputs": [text(each), tensor("sampling_parameters", [document], False)]} for each in texts],
        "together": [{"inputs": [text(*texts), *options_as_tensors(options)]}],
        "together in json": [{"inputs": [text(*texts, is_binary=False), *options_as_tensors(options)], "outputs": listed}],
    }


def rows(results: list[Any], count: int) -> list[dict[str, Any]]:
    return [row(result, 0) for result in results] if len(results) > 1 else [row(results[0], number) for number in range(count)]


def run_sync(client: Any, asked: dict[str, Any]) -> Any:
    texts = asked["texts"]
    found = [
        {way: rows([client.infer(MODEL, **call) for call in calls], len(texts)) for way, calls in ways(options, texts).items()}
        for options in asked["options"]
    ]
    pending = [client.async_infer(MODEL, [text(each)]) for each in texts]
    return {"waited for": found, "later": rows([each.get_result() for each in pending], len(texts))}


async def run_aio(address: str, asked: dict[str, Any]) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        found = []
        for options in asked["options"]:
            said = {}
            for way, calls in ways(options, asked["texts"]).items():
                results = await asyncio.gather(*(client.infer(MODEL, **call) for call in calls))
                said[way] = rows(list(results), len(asked["texts"]))
            found.append(said)
        ready = [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready(MODEL)]
        return {"waited for": found, "ready": ready}


def describe(client: Any) -> Any:
    return {
        "ready": [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("x")],
        "metadata": client.get_model_metadata(MODEL),
        "config": client.get_model_config(MODEL),
        "index": client.get_model_repository_index(),
        "statistics": [client.get_inference_statistics(), client.get_inference_statistics(MODEL)],
        "server": client.get_server_metadata(),
        "id": client.infer(MODEL, [text("A dog.")], request_id="mine", model_version="").get_response()["id"],
    }


def errors(address: str, client: Any) -> Any:
    hasty = triton.InferenceServerClient(address, network_timeout=0.001)
    attempts: dict[str, Callable[[], Any]] = {
        "blank": lambda: client.infer(MODEL, [text("A dog.", " ")]),
        "no model": lambda: client.infer("nobody", [text("A dog.")]),
        "no version": lambda: client.infer(MODEL, [text("A dog.")], model_version="17"),
        "unknown input": lambda: client.infer(MODEL, [text("A dog."), tensor("beams", [2])]),
        "unknown output": lambda: client.infer(MODEL, [text("A dog.")], outputs=[triton.InferRequestedOutput("beams")]),
        "unknown parameter": lambda: client.infer(MODEL, [text("A dog.")], parameters={"beams": 2}),
        "timeout": lambda: client.infer(MODEL, [text("A dog.")], timeout=1),
        "compressed": lambda: client.infer(MODEL, [text("A dog.")], request_compression_algorithm="gzip"),
        "shared memory": lambda: client.get_system_shared_memory_status(),
        "load": lambda: client.load_model(MODEL),
        "settings": lambda: client.get_log_settings(),
    }
    found = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except InferenceServerException as failed:
            found[name] = (failed.status(), failed.message())
    try:
        hasty.infer(MODEL, [text("A dog."), tensor("max_new_tokens", [64])])
    except Exception as failed:
        found["deadline of its own"] = (type(failed).__name__, "")
    return found


async def cancel(address: str) -> Any:
    """Begin many long answers in one message, and leave when told to."""
    async with triton_aio.InferenceServerClient(address) as client:
        inputs = [text(*["a dog"] * 64), tensor("max_new_tokens", [900])]
        call = asyncio.create_task(client.infer("alpha", inputs))
        await asyncio.to_thread(sys.stdin.readline)
        call.cancel()
        await asyncio.wait([call])
    return "left"


def main(address: str, do: str, *arguments: str) -> None:
    asked = json.loads(arguments[0]) if arguments else {}
    client = triton.InferenceServerClient(address)
    match do:
        case "sync":
            found = run_sync(client, asked)
        case "aio":
            found = asyncio.run(run_aio(address, asked))
        case "describe":
            found = describe(client)
        case "errors":
            found = errors(address, client)
        case _:
            found = asyncio.run(cancel(address))
    client.close()
    print(json.dumps(found))


main(*sys.argv[1:])
