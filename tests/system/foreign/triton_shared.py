"""Parts of the two callers with Triton's clients: tensors, rows of answers, refused calls, and a caller who leaves."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

MODEL = "en-de"
NAMES = ("text_output", "score", "finish_reason", "tokens", "num_input_tokens", "num_output_tokens")
JSON = ("tokens", "log_probs")


class Kit:
    """Tensors and calls of one of Triton's clients, `tritonclient.grpc` or `tritonclient.http`."""

    def __init__(self, client: ModuleType, aio: ModuleType, ways: Callable[..., Mapping[str, list[dict[str, Any]]]]) -> None:
        """`ways` returns the arguments of each way to say the same options and texts."""
        self._client, self._aio, self._ways = client, aio, ways

    def tensor(self, name: str, values: Any, **set_options: bool) -> Any:
        array = np.array(values, dtype=np.object_ if isinstance(np.ravel(values)[0], str) else None)
        made = self._client.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array, **set_options)
        return made

    def text(self, *texts: str, **set_options: bool) -> Any:
        return self.tensor("text_input", [[each] for each in texts], **set_options)

    def tensors(self, options: Mapping[str, Any], **set_options: bool) -> list[Any]:
        return [self.tensor(name, value if isinstance(value, list) else [value], **set_options) for name, value in options.items()]

    def run_sync(self, client: Any, asked: Any) -> list[dict[str, Any]]:
        texts = asked["texts"]
        return [
            {way: rows([client.infer(MODEL, **call) for call in calls], len(texts)) for way, calls in ways.items()}
            for ways in (self._ways(options, texts) for options in asked["options"])
        ]

    async def run_aio(self, client: Any, asked: Any) -> list[dict[str, Any]]:
        found = []
        for options in asked["options"]:
            answers = {}
            for way, calls in self._ways(options, asked["texts"]).items():
                results = await asyncio.gather(*(client.infer(MODEL, **call) for call in calls))
                answers[way] = rows(list(results), len(asked["texts"]))
            found.append(answers)
        return found

    def errors(self, client: Any, others: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return status and message of calls that are refused by either protocol, and of others."""
        dog = [self.text("A dog.")]
        attempts: dict[str, Callable[[], Any]] = {
            "blank": lambda: client.infer(MODEL, [self.text("A dog.", " ")]),
            "no model": lambda: client.infer("nobody", dog),
            "no version": lambda: client.infer(MODEL, dog, model_version="17"),
            "unknown input": lambda: client.infer(MODEL, [*dog, self.tensor("beams", [2])]),
            "unknown output": lambda: client.infer(MODEL, dog, outputs=[self._client.InferRequestedOutput("beams")]),
            "unknown parameter": lambda: client.infer(MODEL, dog, parameters={"beams": 2}),
            "timeout": lambda: client.infer(MODEL, dog, timeout=1),
            "shared memory": lambda: client.get_system_shared_memory_status(),
            "load": lambda: client.load_model(MODEL),
            **others,
        }
        found = {}
        for name, attempt in attempts.items():
            try:
                attempt()
            except InferenceServerException as failed:
                found[name] = (failed.status(), failed.message())
        return found

    async def cancel(self, address: str) -> str:
        """Begin many long answers in one message, and leave when told to."""
        async with self._aio.InferenceServerClient(address) as client:
            inputs = [self.text(*["a dog"] * 64), self.tensor("max_new_tokens", [900])]
            call = asyncio.ensure_future(client.infer("alpha", inputs))
            await asyncio.to_thread(sys.stdin.readline)
            call.cancel()
            await asyncio.wait([call])
        return "left"


def is_ready(client: Any) -> list[bool]:
    return [client.is_server_live(), client.is_server_ready(), client.is_model_ready(MODEL), client.is_model_ready("x")]


def rows(results: list[Any], count: int) -> list[dict[str, Any]]:
    """Return what a result for each text, or one result for all of them, says of each."""
    return [_row(result, 0) for result in results] if len(results) > 1 else [_row(results[0], number) for number in range(count)]


def _row(result: Any, number: int) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        values = [value.decode() if isinstance(value, bytes) else value for value in result.as_numpy(name)[number].tolist()]
        found[name] = [json.loads(value) for value in values] if name in JSON else values
    return found
