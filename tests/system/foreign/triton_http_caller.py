"""A caller with Triton's HTTP client as it is; prints what it was answered as JSON. Run by `test_open_inference.py`."""

import asyncio
import json
import sys
from typing import Any

import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from triton_shared import MODEL, NAMES, Kit, is_ready, rows


def ways(options: dict[str, Any], texts: list[str]) -> dict[str, list[dict[str, Any]]]:
    # The client keeps the name of a priority for itself, for levels of Triton's own.
    plain = {name: value for name, value in options.items() if name != "priority"}
    rest = {name: value for name, value in options.items() if name not in plain}
    document = kit.tensor("sampling_parameters", [json.dumps(options)], binary_data=False)
    in_json: dict[str, bool] = {"binary_data": False}
    listed = [triton.InferRequestedOutput(name, binary_data=False) for name in NAMES]
    mixed = [triton.InferRequestedOutput(name, binary_data=number % 2 == 0) for number, name in enumerate(NAMES)]
    return {
        "bytes": [{"inputs": [kit.text(each), *kit.tensors(options)]} for each in texts],
        "json": [{"inputs": [kit.text(each, **in_json), *kit.tensors(options, **in_json)], "outputs": listed} for each in texts],
        "parameters": [
            {"inputs": [kit.text(each, **in_json), *kit.tensors(rest)], "parameters": plain, "outputs": mixed} for each in texts
        ],
        "sampling_parameters": [{"inputs": [kit.text(each), document]} for each in texts],
        "together": [{"inputs": [kit.text(*texts), *kit.tensors(options)]}],
        "together in json": [{"inputs": [kit.text(*texts, **in_json), *kit.tensors(options)], "outputs": listed}],
    }


kit = Kit(triton, triton_aio, ways)


def run_sync(client: Any, asked: dict[str, Any]) -> Any:
    found = kit.run_sync(client, asked)
    pending = [client.async_infer(MODEL, [kit.text(each)]) for each in asked["texts"]]
    return {"waited for": found, "later": rows([each.get_result() for each in pending], len(pending))}


async def run_aio(address: str, asked: dict[str, Any]) -> Any:
    async with triton_aio.InferenceServerClient(address) as client:
        found = await kit.run_aio(client, asked)
        ready = [await client.is_server_live(), await client.is_server_ready(), await client.is_model_ready(MODEL)]
        return {"waited for": found, "ready": ready}


def describe(client: Any) -> Any:
    return {
        "ready": is_ready(client),
        "metadata": client.get_model_metadata(MODEL),
        "config": client.get_model_config(MODEL),
        "index": client.get_model_repository_index(),
        "statistics": [client.get_inference_statistics(), client.get_inference_statistics(MODEL)],
        "server": client.get_server_metadata(),
        "id": client.infer(MODEL, [kit.text("A dog.")], request_id="mine", model_version="").get_response()["id"],
    }


def errors(address: str, client: Any) -> Any:
    compressed = {"request_compression_algorithm": "gzip"}
    others = {
        "compressed": lambda: client.infer(MODEL, [kit.text("A dog.")], **compressed),
        "settings": lambda: client.get_log_settings(),
    }
    found = kit.errors(client, others)
    try:
        hasty = triton.InferenceServerClient(address, network_timeout=0.001)
        hasty.infer(MODEL, [kit.text("A dog."), kit.tensor("max_new_tokens", [64])])
    except Exception as failed:
        found["deadline of its own"] = (type(failed).__name__, "")
    return found


def main(address: str, do: str, *arguments: str) -> None:
    asked = json.loads(arguments[0]) if arguments else {}
    client = triton.InferenceServerClient(address)
    match do:
        case "sync":
            found: Any = run_sync(client, asked)
        case "aio":
            found = asyncio.run(run_aio(address, asked))
        case "describe":
            found = describe(client)
        case "errors":
            found = errors(address, client)
        case _:
            found = asyncio.run(kit.cancel(address))
    client.close()
    print(json.dumps(found))


main(*sys.argv[1:])
