"""What the OpenAPI document says of the Open Inference Protocol's REST is so."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.faces.http.documents import document
from dragoman.server.faces.http.inference.reading import _read_generate, _read_infer
from tests.server.faces.http.conftest import events
from tests.system.harness.openinference_bodies import asking, tensor

jsonschema = pytest.importorskip("jsonschema")
TOLD = json.loads(document())
MODEL = "/v2/models/{model}"
OPTIONS = {
    "num_beams": 2,
    "num_return_sequences": 2,
    "top_log_probs": 1,
    "temperature": 0.5,
    "suppressed_tokens": [5],
    "timeout": 0,
}
BODIES: dict[str, Any] = {
    "/v2/repository/index": {"ready": True},
    f"{MODEL}/infer": asking(
        "a", "b", id="mine", inputs=[tensor("seed", "UINT64", [1], [7])], parameters={"do_sample": True}, outputs=[{"name": "seed"}]
    ),
    f"{MODEL}/generate": {"text_input": ["a", "b"], "parameters": {"sampling_parameters": {"n": 1}}, "do_sample": True},
    f"{MODEL}/generate_stream": {"text_input": "a dog"},
}
PATHS = [path for path in TOLD["paths"] if path.startswith("/v2")]


def check(schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": TOLD["components"]}).validate(value)


def schema_of(body: dict[str, Any]) -> Any:
    return body["content"]["application/json"]["schema"]


@pytest.mark.parametrize("path", PATHS)
def test_answers_are_what_the_document_says(serve_http: Any, path: str) -> None:
    [(method, told)] = TOLD["paths"][path].items()
    body = BODIES.get(path.replace("/versions/{version}", ""))

    async def ask(world: Any, model: str) -> tuple[int, Any]:
        url = world.url(path.format(model=model, version="v7"))
        async with world.session.request(method, url, json=body) as response:
            if response.content_type == "text/event-stream":
                return response.status, [event async for _, event in events(response)]
            return response.status, await response.json()

    async def run() -> None:
        async with serve_http() as world:
            world.model.outcomes = SimpleNamespace(num_answered=3, num_failed=1, seconds=1.5)
            if body is not None:
                check(schema_of(told["requestBody"]), body)
            status, answer = await ask(world, "en-de")
            assert status == 200
            if "text/event-stream" in told["responses"]["200"]["content"]:
                for event in answer:
                    check({"$ref": "#/components/schemas/TextResponse"}, event)
            else:
                check(schema_of(told["responses"]["200"]), answer)
            status, answer = await ask(world, "nobody")
            if "{model}" in path:
                reference = told["responses"][str(status)]["$ref"]
                check(schema_of(TOLD["components"]["responses"][reference.rpartition("/")[2]]), answer)

    asyncio.run(run())


def test_every_parameter_is_described_and_read() -> None:
    model = ("en-de", "")
    described = TOLD["components"]["schemas"]["TextRequest"]["properties"]
    for name, value in OPTIONS.items():
        assert name in described
        for body in ({"text_input": "a", name: value}, {"text_input": "a", "parameters": {name: value}}):
            check({"$ref": "#/components/schemas/TextRequest"}, body)
            _read_generate(json.dumps(body).encode(), model, None)
        body = asking("a", parameters={name: value})
        check({"$ref": "#/components/schemas/InferenceRequest"}, body)
        _read_infer(json.dumps(body).encode(), None, model, None)
    for name in described.keys() - {"text_input", "id", "parameters"}:
        with pytest.raises(Exception, match=name):
            _read_generate(json.dumps({"text_input": "a", name: [None]}).encode(), model, None)
