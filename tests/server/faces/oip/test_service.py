"""The service on a real gRPC server, with a scripted engine."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo
from grpc_status import rpc_status

from dragoman.inference import inference_pb2 as pb
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.server.faces.grpc import hand
from dragoman.server.faces.grpc.pace import Pace
from dragoman.server.faces.oip.inference import INPUTS, MAX_TEXTS
from dragoman.server.faces.oip.outputs import OUTPUTS
from dragoman.server.faces.oip.service import REASONS
from dragoman.v1.generation_pb2 import GenerateRequest
from tests.server.faces.grpc.conftest import eventually
from tests.system.harness.openinference_messages import asking, outputs, with_parameters, with_tensor

SLOTS = 8
INFER = "/inference.GRPCInferenceService/ModelInfer"


def stub_of(world: Any) -> Any:
    return GRPCInferenceServiceStub(world.channel)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


def test_an_answer_is_that_of_the_native_service(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "return_log_probs": True, "top_log_probs": 2}
            native = await world.stub.Generate(GenerateRequest(text="a", **options))
            response = await stub_of(world).ModelInfer(with_parameters(asking("a", id="mine"), **options))
            found = outputs(response)
            assert (response.model_name, response.model_version, response.id) == ("en-de", "v7", "mine")
            assert found["text_output"] == ([1, 2], [answer.text for answer in native.answers])
            assert found["score"] == ([1, 2], [answer.score for answer in native.answers])
            assert found["finish_reason"] == ([1, 2], ["eos", "eos"])
            assert [json.loads(tokens) for tokens in found["tokens"][1]] == [list(answer.tokens) for answer in native.answers]
            assert found["num_input_tokens"] == ([1], [native.usage.source_tokens])
            assert found["num_output_tokens"] == ([1], [native.usage.generated_tokens])
            assert found["is_truncated"] == ([1], [False])
            for told, answer in zip(found["log_probs"][1], native.answers, strict=True):
                assert [(x["token"], x["log_prob"], len(x["top"])) for x in json.loads(told)] == [
                    (x.token, x.log_prob, 2) for x in answer.log_probs
                ]
            assert "seed" not in found

    asyncio.run(run())


def test_outputs_that_are_named_come_in_that_order(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            request = asking("a", "b", shape=[2, 1], outputs=[{"name": name} for name in ("seed", "text_output", "log_probs")])
            response = await stub_of(world).ModelInfer(with_parameters(request, do_sample=True, seed=7))
            assert [output.name for output in response.outputs] == ["seed", "text_output", "log_probs"]
            found = outputs(response)
            assert found["seed"] == ([2, 1], [7, 7])
            assert found["log_probs"] == ([2, 1], ["[]", "[]"])
            assert not any(output.HasField("contents") for output in response.outputs)

    asyncio.run(run())


def test_texts_join_the_running_batch_each_with_its_own_record(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            request = with_tensor(asking(*map(str, range(40)), id="mine"), "max_new_tokens", list(range(1, 41)))
            call = asyncio.ensure_future(stub_of(world).ModelInfer(request))
            await eventually(lambda: world.engine.num_running == 2 * SLOTS)
            world.engine.gate.set()
            response = await call
            assert world.engine.max_running == 2 * SLOTS
            assert outputs(response)["text_output"][0] == [40]
            assert sorted(x.max_new_tokens for x in world.engine.requests) == list(range(1, 41))
            assert world.records() == {("en-de", "eos"): 40}
            items = [line for line in logged() if line["event"] == "item"]
            assert sorted(line["request_id"] for line in items) == sorted(f"mine#{number}" for number in range(40))
            assert {(line["method"], line["batch_id"], line["code"]) for line in items} == {(INFER, "mine", "OK")}
            [line] = [line for line in logged() if line["event"] == "call"]
            assert (line["request_id"], line["code"]) == ("mine", "OK")
            assert line["generated_tokens"] == sum(item["generated_tokens"] for item in items)

    asyncio.run(run())


def test_one_that_fails_ends_the_others_and_is_named(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            error = await failure(stub_of(world).ModelInfer(asking("a", "b", "c", " ")))
            assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "text_input[3]: text: is blank")
            await eventually(lambda: len(world.engine.cancelled) == 3)
            assert world.engine.num_running == 0
            assert world.records() == {("en-de", "INVALID_ARGUMENT"): 1, ("en-de", "CANCELLED"): 3}

    asyncio.run(run())


@pytest.mark.parametrize("texts", [("a",), ("a", "b", "c")])
def test_a_caller_who_leaves_frees_what_it_had(serve: Any, texts: tuple[str, ...]) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = stub_of(world).ModelInfer(asking(*texts))
            await eventually(lambda: world.engine.num_running == len(texts))
            call.cancel()
            await eventually(lambda: len(world.engine.cancelled) == len(texts))
            await eventually(lambda: world.server.num_running == 0)

    asyncio.run(run())


def test_timeout_and_deadline_hold_the_shorter_one(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            stub = stub_of(world)
            for timeout, deadline, low, high in ((10_000_000, 60, 5, 10), (60_000_000, 10, 5, 10), (0, 10, 5, 10)):
                await stub.ModelInfer(with_parameters(asking("a"), timeout=timeout), timeout=deadline)
                given = world.engine.requests[-1]
                assert low < given.deadline - given.arrival <= high + 1
            await stub.ModelInfer(with_parameters(asking("a"), timeout=2**63 - 1))
            assert world.engine.requests[-1].deadline > 1e12
            error = await failure(stub.ModelInfer(with_parameters(asking("a"), timeout=1)))
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    asyncio.run(run())


def test_errors_have_the_statuses_and_details_of_the_native_service(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            stub, engine = stub_of(world), world.engine
            error = await failure(stub.ModelInfer(asking("a", model="nobody")))
            assert error.code() == grpc.StatusCode.NOT_FOUND
            error = await failure(stub.ModelInfer(with_parameters(asking("a"), num_beams=99)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and error.details().startswith("num_beams: 99 is not in 1 to 8")
            error = await failure(stub.ModelInfer(with_parameters(asking("a"), stream=True)))
            assert error.details() == "stream: goes with ModelStreamInfer only"
            engine.has_places, engine.retry_after_seconds = False, 2.5
            error = await failure(stub.ModelInfer(asking("a", id="mine")))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            [retry, about] = rpc_status.from_call(error).details
            told, info = RetryInfo(), RequestInfo()
            assert retry.Unpack(told) and told.retry_delay.ToMilliseconds() == 2500
            assert about.Unpack(info) and info.request_id == "mine"
            engine.has_places = True
            for reason, code in (("deadline", "DEADLINE_EXCEEDED"), ("step_failed", "INTERNAL"), ("lost", "UNAVAILABLE")):
                engine.reason = reason
                assert (await failure(stub.ModelInfer(asking("a")))).code().name == code
            engine.error = KeyError("a secret")
            error = await failure(stub.ModelInfer(asking("a", "b")))
            assert error.code() == grpc.StatusCode.INTERNAL
            assert error.details().startswith("text_input[") and "secret" not in error.details()

    asyncio.run(run())


def test_an_answer_that_no_message_can_carry_is_refused_before_any_work(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_message_bytes=65536) as world:
            options: dict[str, Any] = {"top_log_probs": 20, "max_new_tokens": 40}
            error = await failure(stub_of(world).ModelInfer(with_parameters(asking("a", "b", "c"), **options)))
            assert "max_message_bytes of the server is" in error.details()
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and not world.engine.requests
            error = await failure(stub_of(world).ModelInfer(asking(*["a"] * 800)))
            assert error.details().startswith("request: its answer takes")

    asyncio.run(run())


def test_models_are_described(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            stub = stub_of(world)
            metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="en-de"))
            assert (metadata.name, metadata.platform, list(metadata.versions)) == ("en-de", "dragoman_onnx", ["en-de"])
            assert [x.name for x in metadata.inputs] == sorted(INPUTS, key=INPUTS.index)
            assert [x.name for x in metadata.outputs] == list(OUTPUTS)
            assert (list(metadata.inputs[0].shape), metadata.inputs[0].datatype) == ([-1, 1], "BYTES")
            config = (await stub.ModelConfig(pb.ModelConfigRequest(name="en-de"))).config
            assert config.model_transaction_policy.decoupled and config.max_batch_size == MAX_TEXTS
            assert [x.name for x in config.input if not x.optional] == ["text_input"]
            assert pb.TYPE_INVALID not in {x.data_type for x in (*config.input, *config.output)}
            server = await stub.ServerMetadata(pb.ServerMetadataRequest())
            assert server.name == "dragoman" and "model_configuration" in server.extensions
            [entry] = (await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
            assert (entry.name, entry.version, entry.state) == ("en-de", "en-de", "READY")
            world.model.outcomes = SimpleNamespace(num_answered=3, num_failed=1, seconds=1.5)
            for name in ("", "en-de"):
                [said] = (await stub.ModelStatistics(pb.ModelStatisticsRequest(name=name))).model_stats
                assert (said.inference_count, said.inference_stats.success.ns, said.inference_stats.fail.count) == (
                    3,
                    1_500_000_000,
                    1,
                )
            world.engine.is_ready = False
            assert not (await stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True))).models
            for ask in (stub.ModelMetadata(pb.ModelMetadataRequest(name="x")), stub.ModelConfig(pb.ModelConfigRequest(name="x"))):
                assert (await failure(ask)).code() == grpc.StatusCode.NOT_FOUND
            assert (await failure(stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="x")))).code().value[0] == 3

    asyncio.run(run())


def test_readiness_is_that_of_health_and_needs_no_caller(serve: Any, tmp_path: Any, make_model: Any) -> None:
    tokens = tmp_path / "callers.toml"
    tokens.write_text('[callers.ours]\ntoken = "secret"\nmodels = ["a"]\n')

    async def run() -> None:
        async with serve(make_model("a"), make_model("b"), auth_tokens_file=tokens) as world:
            stub = stub_of(world)

            async def is_ready(name: str) -> bool:
                return bool((await stub.ModelReady(pb.ModelReadyRequest(name=name))).ready)

            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
            assert [await is_ready(name) for name in ("a", "b", "c", "x" * 1000)] == [True, True, False, False]
            assert (await failure(stub.ModelInfer(asking("a", model="a")))).code() == grpc.StatusCode.UNAUTHENTICATED
            assert (await failure(stub.ServerMetadata(pb.ServerMetadataRequest()))).code() == grpc.StatusCode.UNAUTHENTICATED
            known = {"metadata": (("authorization", "Bearer secret"),)}
            assert (await stub.ModelInfer(asking("a", model="a"), **known)).model_name == "a"
            assert (await failure(stub.ModelInfer(asking("a", model="b"), **known))).code() == grpc.StatusCode.NOT_FOUND
            assert [x.name for x in (await stub.RepositoryIndex(pb.RepositoryIndexRequest(), **known)).models] == ["a"]
            await world.server.drain(0)
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready
            assert not await is_ready("a")
            assert (await failure(stub.ModelInfer(asking("a", model="a"), **known))).code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


@pytest.mark.parametrize("name", REASONS)
def test_what_is_not_offered_says_so(serve: Any, name: str) -> None:
    async def run() -> None:
        async with serve() as world:
            error = await failure(getattr(stub_of(world), name)(getattr(pb, f"{name}Request")()))
            assert (error.code(), error.details()) == (grpc.StatusCode.UNIMPLEMENTED, REASONS[name])

    asyncio.run(run())


def test_every_text_counts_for_its_callers_limits(serve: Any, tmp_path: Any) -> None:
    tokens = tmp_path / "callers.toml"
    tokens.write_text('[callers.ours]\ntoken = "secret"\nmax_requests = 2\n')

    async def run() -> None:
        async with serve(auth_tokens_file=tokens) as world:
            known = {"metadata": (("authorization", "Bearer secret"),)}
            assert outputs(await stub_of(world).ModelInfer(asking("a", "b"), **known))
            world.engine.hold()
            first = stub_of(world).ModelInfer(asking("a", "b", "c"), **known)
            await eventually(lambda: world.engine.num_running == 2)
            error = await failure(stub_of(world).ModelInfer(asking("a", "b"), **known))
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert error.details().startswith("text_input[0]: max_requests: ")
            world.engine.gate.set()
            assert outputs(await first)["text_output"][0] == [3], "its third text has waited for one of the others"

    asyncio.run(run())


def test_messages_of_several_texts_share_what_may_be_in_hand(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand.Allowance.__init__, "__defaults__", (4, hand.MAX_BYTES))

    async def run() -> None:
        async with serve() as world:
            answers = await asyncio.gather(*(stub_of(world).ModelInfer(asking(*["a"] * 10)) for _ in range(5)))
            assert len(answers) == 5 and world.engine.max_running <= 5

    asyncio.run(run())


def test_every_text_counts_for_the_pace_of_a_connection(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    count = Pace.count

    def counting(self: Pace, peer: str, num_messages: int = 1) -> float:
        counted.append(num_messages)
        return count(self, peer, num_messages)

    monkeypatch.setattr(Pace, "count", counting)

    async def run() -> None:
        async with serve(max_messages_per_second=1000) as world:
            await stub_of(world).ModelInfer(asking("a", "b", "c"))
            assert counted == [1, 2]
            [_ async for _ in stub_of(world).ModelStreamInfer(iter([asking("a", "b", "c", "d")]))]
            assert counted == [1, 2, 1, 4]

    asyncio.run(run())
