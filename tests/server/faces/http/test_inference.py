"""The Open Inference Protocol's REST says what its gRPC service says, and fails as HTTP does."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.inference import inference_pb2 as pb
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.server.faces.http.inference.api import NOT_OFFERED, WITHOUT_OPERATORS
from dragoman.server.faces.oip.inference import INPUTS, MAX_TEXTS
from dragoman.server.faces.oip.outputs import OUTPUTS
from tests.server.faces.grpc.conftest import eventually
from tests.server.faces.http.conftest import events
from tests.system.harness import openinference_messages as messages
from tests.system.harness.openinference_bodies import asking, outputs, tensor, with_tensors

SLOTS = 8
INFER, GENERATE, STREAM = (f"/v2/models/en-de/{what}" for what in ("infer", "generate", "generate_stream"))
OPTIONS: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "return_log_probs": True, "top_log_probs": 2}
TEXT = tensor("text_input", "BYTES", [1], ["a"])


def stub_of(world: Any) -> Any:
    return GRPCInferenceServiceStub(world.channel)


async def get(world: Any, path: str, **more: Any) -> tuple[int, Any]:
    async with world.session.get(world.url(path), **more) as response:
        return response.status, await response.json()


def error_of(told: tuple[int, Any]) -> tuple[int, str]:
    status, body = told
    assert list(body) == ["error"]
    return status, body["error"]


def test_an_answer_is_that_of_grpc_in_json_and_in_bytes(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            request = messages.with_parameters(messages.asking("a", "b", shape=[2, 1], id="mine"), **OPTIONS)
            response = await stub_of(world).ModelInfer(request)
            expected = messages.outputs(response)
            body = asking("a", "b", id="mine", parameters=OPTIONS)
            body["inputs"][0] |= {"shape": [2, 1], "data": [["a"], ["b"]]}
            status, told = await world.ask(INFER, body)
            assert status == 200
            assert (told["id"], told["model_name"], told["model_version"]) == ("mine", "en-de", "v7")
            assert outputs(told) == expected
            sent, headers = with_tensors(request, parameters=OPTIONS | {"binary_data_output": True})
            async with world.session.post(world.url(INFER), data=sent, headers=headers) as answer:
                assert (answer.status, answer.content_type) == (200, "application/octet-stream")
                found, head = await answer.read(), int(answer.headers["Inference-Header-Content-Length"])
            assert outputs(json.loads(found[:head]), found[head:]) == expected
            first, second, *_ = (x.search for x in world.engine.requests[::2])
            assert first == second

    asyncio.run(run())


def test_each_output_comes_as_it_is_wanted(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            wanted = [{"name": "score"}, {"name": "text_output", "parameters": {"binary_data": True}}, {"name": "num_input_tokens"}]
            async with world.post(INFER, asking("a", "b", outputs=wanted)) as answer:
                found, head = await answer.read(), int(answer.headers["Inference-Header-Content-Length"])
            told = json.loads(found[:head])
            assert [(x["name"], "data" in x) for x in told["outputs"]] == [
                ("score", True),
                ("text_output", False),
                ("num_input_tokens", True),
            ]
            expected = messages.outputs(await stub_of(world).ModelInfer(messages.asking("a", "b")))
            assert outputs(told, found[head:]) == {x["name"]: expected[x["name"]] for x in wanted}

    asyncio.run(run())


def test_texts_join_the_running_batch_each_with_its_own_record(serve_http: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            limits = tensor("max_new_tokens", "UINT32", [40], list(range(1, 41)))
            call = asyncio.create_task(world.ask(INFER, asking(*map(str, range(40)), inputs=[limits], id="mine")))
            await eventually(lambda: world.engine.num_running == 2 * SLOTS)
            world.engine.gate.set()
            status, told = await call
            assert status == 200 and outputs(told)["text_output"][0] == [40]
            assert world.engine.max_running == 2 * SLOTS
            assert sorted(x.max_new_tokens for x in world.engine.requests) == list(range(1, 41))
            assert world.records() == {("en-de", "eos"): 40}
            items = [line for line in logged() if line["event"] == "item"]
            assert sorted(line["request_id"] for line in items) == sorted(f"mine#{number}" for number in range(40))
            [line] = [line for line in logged() if line["event"] == "call"]
            assert (line["method"], line["request_id"], line["code"]) == ("POST /v2/models/{model}/infer", "mine", "OK")
            assert line["generated_tokens"] == sum(item["generated_tokens"] for item in items)

    asyncio.run(run())


@pytest.mark.parametrize("limit", ["max_requests", "max_waiting"])
def test_texts_wait_for_each_other_where_their_callers_limits_let_few_in(serve_http: Any, tmp_path: Path, limit: str) -> None:
    callers = tmp_path / "callers.toml"
    callers.write_text(f'[callers.small]\ntoken = "a-token"\n{limit} = 3\n')
    headers = {"Authorization": "Bearer a-token"}

    async def run() -> None:
        async with serve_http(auth_tokens_file=callers) as world:
            await answered_late(world, world.ask(INFER, asking(*"abcdefgh"), headers=headers))
            await answered_late(world, ask_grpc(world))
            assert len(world.engine.requests) == 16 and world.engine.max_running == 3
            assert world.records() == {("en-de", "eos"): 16}

    async def answered_late(world: Any, asked: Any) -> None:
        world.engine.hold()
        call = asyncio.create_task(asked)
        await eventually(lambda: world.engine.num_running >= 3 or call.done())
        world.engine.gate.set()
        await call

    async def ask_grpc(world: Any) -> Any:
        message = messages.asking(*"abcdefgh")
        return await stub_of(world).ModelInfer(message, metadata=[("authorization", "Bearer a-token")])

    asyncio.run(run())


def test_one_that_fails_ends_the_others_and_is_named(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            assert error_of(await world.ask(INFER, asking("a", "b", " "))) == (400, "text_input[2]: text: is blank")
            await eventually(lambda: len(world.engine.cancelled) == 2)
            assert world.engine.num_running == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "num_running"),
    [
        (INFER, asking("a"), 1),
        (INFER, asking("a", "b", "c"), 3),
        (GENERATE, {"text_input": "a"}, 1),
        (STREAM, {"text_input": ["a", "b"]}, 2),
    ],
)
def test_a_caller_who_leaves_frees_what_it_had(serve_http: Any, path: str, body: Any, num_running: int) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            call = asyncio.create_task(world.ask(path, body))
            await eventually(lambda: world.engine.num_running == num_running)
            call.cancel()
            await eventually(lambda: len(world.engine.cancelled) == num_running)
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "CANCELLED"): num_running}

    asyncio.run(run())


def test_a_caller_who_leaves_a_stream_frees_its_slot(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.hold()
            async with world.post(STREAM, {"text_input": "a dog"}) as response:
                first = await anext(event async for event in events(response))
                assert first[1]["text_output"]
                response.close()
            await eventually(lambda: len(world.engine.cancelled) == 1)
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "CANCELLED"): 1}

    asyncio.run(run())


def test_timeout_and_the_header_hold_the_shorter_one(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            for timeout, header, low, high in ((10_000_000, "60S", 5, 10), (60_000_000, "10S", 5, 10), (0, "10S", 5, 10)):
                body = asking("a", parameters={"timeout": timeout})
                assert (await world.ask(INFER, body, headers={"Grpc-Timeout": header}))[0] == 200
                given = world.engine.requests[-1]
                assert low < given.deadline - given.arrival <= high + 1
            for path in (GENERATE, STREAM):
                assert (await world.ask(path, {"text_input": "a", "timeout": 1}))[0] == 504

    asyncio.run(run())


def test_generate_has_each_output_by_its_name(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            expected = messages.outputs(await stub_of(world).ModelInfer(messages.asking("a")))
            bodies: list[dict[str, Any]] = [
                {"text_input": "a", "id": "mine"},
                {"text_input": ["a"], "parameters": {"stream": False}, "id": "mine"},
            ]
            for body in bodies:
                status, told = await world.ask("/v2/models/en-de/versions/v7/generate", body)
                assert status == 200
                assert (told.pop("id"), told.pop("model_name"), told.pop("model_version")) == ("mine", "en-de", "v7")
                assert told == {name: value for name, (_, [value]) in expected.items()}
            _, told = await world.ask(GENERATE, {"text_input": ["a", "b"], "num_beams": 2, "num_return_sequences": 2})
            assert len(told["text_output"]) == 4 and len(told["num_input_tokens"]) == 2

    asyncio.run(run())


def test_a_stream_has_the_pieces_of_grpc(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            async with world.post(STREAM, {"text_input": "a dog", "id": "mine"}) as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")
                assert response.headers["X-Request-Id"] == "mine"
                told = [piece async for name, piece in events(response)]

            async def requests() -> Any:
                yield messages.asking("a dog", id="mine")

            expected = [messages.outputs(x.infer_response) async for x in stub_of(world).ModelStreamInfer(requests())]
            assert len(told) == len(expected) > 1
            for piece, wanted in zip(told, expected, strict=True):
                assert (piece.pop("id"), piece.pop("model_name")) == ("mine", "en-de")
                assert piece.pop("model_version", "v7") == "v7"
                assert piece == {name: value for name, (_, [value]) in wanted.items()}
            assert set(told[-1]) > {"score", "finish_reason"}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "num_texts"),
    [
        ({"text_input": "a", "stream": False}, 1),
        ({"text_input": "a", "num_beams": 2, "num_return_sequences": 2}, 2),
        ({"text_input": ["a", "b"]}, 2),
    ],
)
def test_what_has_no_pieces_is_one_event(serve_http: Any, body: Any, num_texts: int) -> None:
    async def run() -> None:
        async with serve_http() as world, world.post(STREAM, body) as response:
            [(name, told)] = [event async for event in events(response)]
            texts = told["text_output"] if num_texts > 1 else [told["text_output"]]
            assert name == "" and len(texts) == num_texts

    asyncio.run(run())


def test_a_stream_that_fails_ends_with_its_error(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            assert error_of(await world.ask(STREAM, {"text_input": " "})) == (400, "text: is blank")
            world.engine.error = RuntimeError("secret")
            async with world.post(STREAM, {"text_input": "a dog"}) as response:
                told = [event async for event in events(response)]
            assert response.status == 200 and len(told) > 1
            name, last = told[-1]
            assert name == "" and list(last) == ["error"] and "secret" not in last["error"]

    asyncio.run(run())


REFUSED: dict[str, tuple[str, Any, int, str]] = {
    "no model": ("/v2/models/nobody/infer", asking("a"), 404, "model"),
    "pieces": (INFER, asking("a", parameters={"stream": True}), 400, "stream: goes with generate_stream only"),
    "pieces of a whole": (GENERATE, {"text_input": "a", "stream": True}, 400, "stream: goes with generate_stream only"),
    "pieces of two": (STREAM, {"text_input": ["a", "b"], "stream": True}, 400, "stream: goes with one text only"),
    "too many texts": (INFER, asking(*["a"] * (MAX_TEXTS + 1)), 400, "text_input: its shape [1025] has 1025 elements"),
    "nothing there": ("/v2/nowhere", {}, 404, "nothing is at this path"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_has_its_status_and_reason(serve_http: Any, name: str) -> None:
    path, body, status, message = REFUSED[name]

    async def run() -> None:
        async with serve_http() as world:
            found = error_of(await world.ask(path, body))
            assert found[0] == status and message in found[1]
            assert not world.engine.requests

    asyncio.run(run())


def test_a_method_that_is_not_for_a_path_is_told_so(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            assert error_of(await get(world, INFER)) == (405, "GET is not for this path; POST is")

    asyncio.run(run())


def test_a_full_queue_says_when_to_come_back(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.has_places = False
            async with world.post(INFER, asking("a")) as response:
                assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
                assert response.headers["Content-Type"] == "application/json"

    asyncio.run(run())


@pytest.mark.parametrize(("method", "path", "reason"), [*NOT_OFFERED, *WITHOUT_OPERATORS])
def test_what_is_not_offered_says_why(serve_http: Any, method: str, path: str, reason: str) -> None:
    async def run() -> None:
        async with serve_http() as world:
            url = world.url(path.format(model="en-de", region="mine"))
            async with world.session.request(method, url) as response:
                assert (response.status, await response.json()) == (501, {"error": reason})

    asyncio.run(run())


def test_models_and_the_server_are_described_as_by_grpc(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.model.outcomes = SimpleNamespace(num_answered=3, num_failed=1, seconds=1.5)
            _, server = await get(world, "/v2")
            assert server["name"] == "dragoman" and {"statistics", "binary_tensor_data"} <= set(server["extensions"])
            assert await get(world, "/v2/models") == (200, {"models": ["en-de"]})
            for path in ("/v2/models/en-de", "/v2/models/en-de/versions/v7"):
                _, metadata = await get(world, path)
                expected = await stub_of(world).ModelMetadata(pb.ModelMetadataRequest(name="en-de"))
                assert metadata["versions"] == list(expected.versions)
                assert [x["name"] for x in metadata["inputs"]] == list(INPUTS)
                assert [(x["name"], x["shape"]) for x in metadata["outputs"]] == [(x.name, list(x.shape)) for x in expected.outputs]
                _, config = await get(world, f"{path}/config")
                assert config["max_batch_size"] == MAX_TEXTS and config["model_transaction_policy"] == {"decoupled": True}
                assert config["input"][0] == {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1], "optional": False}
                assert len(config["output"]) == len(OUTPUTS)
            for path in ("/v2/models/stats", "/v2/models/en-de/stats", "/v2/models/en-de/versions/v7/stats"):
                status, told = await get(world, path)
                assert status == 200, (path, told)
                [model] = told["model_stats"]
                assert (model["name"], model["inference_count"]) == ("en-de", 3)
                assert model["inference_stats"] == {"success": {"count": 3, "ns": 1_500_000_000}, "fail": {"count": 1, "ns": 0}}
            assert (await get(world, "/v2/models/nobody/config"))[0] == 404

    asyncio.run(run())


def test_the_index_has_every_version_and_may_be_asked_for_without_a_body(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            [expected] = (await stub_of(world).RepositoryIndex(pb.RepositoryIndexRequest())).models
            entry = {"name": "en-de", "version": expected.version, "state": "READY", "reason": ""}
            async with world.session.post(world.url("/v2/repository/index")) as response:
                assert (response.status, await response.json()) == (200, [entry])
            world.engine.is_ready = False
            assert (await world.ask("/v2/repository/index", {"ready": True})) == (200, [])
            assert (await world.ask("/v2/repository/index", {"repository_name": "x"}))[0] == 400

    asyncio.run(run())


def test_probes_need_no_token_and_are_answered_during_a_drain(serve_http: Any, tmp_path: Path, logged: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("caller: a-token-of-more-than-sixteen-characters\n")

    async def run() -> None:
        async with serve_http(auth_tokens_file=tokens) as world:
            assert await get(world, "/v2/health/live") == (200, {"live": True})
            assert await get(world, "/v2/health/ready") == (200, {"ready": True})
            assert await get(world, "/v2/models/en-de/ready") == (200, {"name": "en-de", "ready": True})
            assert error_of(await get(world, "/v2/models/nobody/ready")) == (503, "the model is not ready")
            assert (await get(world, "/v2"))[0] == 401
            assert (await world.ask(INFER, asking("a")))[0] == 401
            headers = {"Authorization": "Bearer a-token-of-more-than-sixteen-characters"}
            assert (await world.ask(INFER, asking("a"), headers=headers))[0] == 200
            world.server.core.calls.draining.set()
            assert await get(world, "/v2/health/live") == (200, {"live": True})
            assert error_of(await get(world, "/v2/health/ready")) == (503, "the server is not ready")
            assert (await get(world, "/v2/models/en-de/versions/v7/ready"))[0] == 503
            assert not [line for line in logged() if "ready" in line.get("method", "")]

    asyncio.run(run())


def test_a_page_of_another_origin_sends_nothing_unasked(serve_http: Any) -> None:
    """Triton's client does not say what its body is; a page that does the same is answered only if it may be."""

    async def run() -> None:
        async with serve_http() as world:
            body, evil = json.dumps(asking("a")).encode(), {"Origin": "https://elsewhere.example"}
            for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
                headers = {} if kind is None else {"Content-Type": kind}
                sent = {"data": body, "skip_auto_headers": ["Content-Type"]}
                async with world.session.post(world.url(INFER), headers=headers, **sent) as response:
                    assert response.status == 200
                async with world.session.post(world.url(INFER), headers=headers | evil, **sent) as response:
                    assert response.status == 403 and "Origin" in (await response.json())["error"]

    asyncio.run(run())


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_bodies_are_refused(serve_http: Any, encoding: str) -> None:
    async def run() -> None:
        async with serve_http() as world:
            told = await world.ask(INFER, asking("a"), headers={"Content-Encoding": encoding})
            assert error_of(told)[0] == 415

    asyncio.run(run())


def test_large_bodies_are_read_and_answered_beside_others_work(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            texts = ["a dog " * 20] * MAX_TEXTS
            status, told = await world.ask(INFER, asking(*texts, parameters={"truncate": True}))
            assert status == 200 and len(outputs(told)["text_output"][1]) == MAX_TEXTS

    asyncio.run(run())
