"""Callers' limits over gRPC: what is let in, and what those are told who are not."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from dragoman.server.core.ports import Traits
from dragoman.server.telemetry.sampling import BURST
from dragoman.v1.generation_pb2 import GenerateRequest, GetModelRequest, ListModelsRequest, ScoreRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.certificates import make_certificates
from tests.server.faces.grpc.conftest import eventually

BEARER = (("authorization", "Bearer s3cret"),)
TEXT = "A dog runs."


@pytest.fixture
def limited(tmp_path: Path) -> Any:
    """Write a file with one caller that has these limits; return the setting."""

    def write(limits: str = "") -> dict[str, Path]:
        path = tmp_path / "callers.toml"
        path.write_text(f'[callers.web]\ntoken = "s3cret"\n{limits}\n')
        return {"auth_tokens_file": path}

    return write


async def refused(call: Any) -> tuple[str, str, float | None]:
    """Return the status, the message and the seconds after which to come back."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    retry = None
    for detail in (await rpc_status.aio.from_call(call)).details:
        info = RetryInfo()
        if detail.Unpack(info):
            retry = info.retry_delay.ToTimedelta().total_seconds()
    return caught.value.code().name, caught.value.details() or "", retry


def generate(world: Any, **fields: Any) -> Any:
    return world.stub.Generate(GenerateRequest(text=TEXT, **fields), metadata=BEARER)


def test_a_rate_is_told_with_its_name_and_when_to_come_back(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("requests_per_second = 0.01")) as world:
            await generate(world)
            code, message, retry = await refused(generate(world))
            assert (code, message) == (
                "RESOURCE_EXHAUSTED",
                "requests_per_second: 0.01 are allowed; it is a limit of caller web",
            )
            assert retry is not None and 90 < retry <= 100
            assert world.records() == {("en-de", "eos"): 1, ("", "RESOURCE_EXHAUSTED"): 1}
            assert world.count("requests_rejected_total", model="", reason="limit") == 1
            assert world.count("caller_refusals_total", caller="web", limit="requests_per_second") == 1

    asyncio.run(run())


def test_tokens_of_answers_and_of_pairs_are_used_up(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("tokens_per_second = 0.01\ntokens_burst = 20")) as world:
            answer = await generate(world)
            used = answer.usage.source_tokens + answer.usage.generated_tokens
            pair = await world.stub.Score(ScoreRequest(text=TEXT, target="Ein Hund läuft."), metadata=BEARER)
            used += pair.usage.source_tokens + len(pair.tokens)
            assert used > 20
            code, message, retry = await refused(generate(world))
            assert (code, message.partition(":")[0]) == ("RESOURCE_EXHAUSTED", "tokens_per_second")
            assert retry == pytest.approx((used - 20) * 100, rel=0.01)
            read = pair.usage.source_tokens + len(pair.tokens) + answer.usage.source_tokens
            assert world.count("caller_tokens_total", caller="web", kind="source") == read
            assert world.count("caller_tokens_total", caller="web", kind="generated") == answer.usage.generated_tokens

    asyncio.run(run())


def test_what_a_stream_has_had_is_used_up_though_its_caller_leaves(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("tokens_per_second = 1")) as world:
            world.engine.hold()
            call = world.stub.GenerateStream(GenerateRequest(text=TEXT), metadata=BEARER)
            for _ in world.engine.answer:
                await call.read()
            call.cancel()
            await asyncio.wait_for(world.engine.left.wait(), 10)
            async with asyncio.timeout(60):
                while world.server.num_running:
                    await asyncio.sleep(0.005)
            assert world.count("caller_tokens_total", caller="web", kind="generated") == len(world.engine.answer)

    asyncio.run(run())


def test_requests_under_way_are_bounded_and_free_their_place(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("max_requests = 1")) as world:
            world.engine.hold()
            first = asyncio.ensure_future(generate(world))
            await asyncio.wait_for(world.engine.arrived.wait(), 10)
            code, message, retry = await refused(generate(world))
            assert (code, retry) == ("RESOURCE_EXHAUSTED", 1.0)
            assert message.startswith("max_requests: 1 are under way")
            first.cancel()
            await asyncio.wait_for(world.engine.left.wait(), 10)
            async with asyncio.timeout(60):
                while world.count("caller_requests_running", caller="web"):
                    await asyncio.sleep(0.005)
            world.engine.gate.set()
            await generate(world)

    asyncio.run(run())


def test_each_request_of_a_stream_is_one_and_the_others_are_unharmed(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("requests_per_second = 0.01\nrequests_burst = 3")) as world:
            requests = [GenerateRequest(text=TEXT, request_id=str(i)) for i in range(4)]
            answers = [each async for each in world.stub.GenerateBatch(iter(requests), metadata=BEARER)]
            # The stream itself is the first of the three.
            codes = {each.request_id: each.error.code for each in answers}
            assert codes == {"0": 0, "1": 0, "2": 8, "3": 8}
            error = next(each.error for each in answers if each.request_id == "3")
            assert error.message.startswith("requests_per_second: ") and error.retry_after_seconds > 90
            assert world.count("caller_requests_running", caller="web") == 0

    asyncio.run(run())


def test_engines_are_told_whose_a_request_is(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("weight = 3\nmax_slots = 2\nmax_waiting = 5")) as world:
            await generate(world)
            await world.stub.Score(ScoreRequest(text=TEXT), metadata=BEARER)
            requests = iter([GenerateRequest(text=TEXT, request_id="x")])
            assert [each async for each in world.stub.GenerateBatch(requests, metadata=BEARER)]
            shares = [each.share for each in (*world.engine.requests, *world.engine.pairs)]
            assert {(each.caller, each.weight, each.max_slots, each.max_waiting) for each in shares} == {("web", 3.0, 2, 5)}
            assert len(shares) == 3
            code, message, _ = await refused(generate(world, num_beams=3))
            assert (code, message) == ("INVALID_ARGUMENT", "num_beams: 3 slots are needed; max_slots of caller web is 2")

    asyncio.run(run())


def test_a_place_that_the_engine_refuses_has_the_name_of_its_limit(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("max_waiting = 5")) as world:
            world.engine.reason, world.engine.limit, world.engine.retry_after_seconds = "queue_full", "max_waiting", 2.5
            assert await refused(generate(world)) == (
                "RESOURCE_EXHAUSTED",
                "max_waiting: too many requests are waiting; it is a limit of caller web",
                2.5,
            )
            assert world.count("caller_refusals_total", caller="web", limit="max_waiting") == 1

    asyncio.run(run())


def test_a_place_that_is_refused_before_the_engine_is_asked_is_counted_for_its_caller_too(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("max_waiting = 5")) as world:
            world.engine.has_places, world.engine.limit, world.engine.retry_after_seconds = False, "max_waiting", 2.5
            assert await refused(generate(world)) == (
                "RESOURCE_EXHAUSTED",
                "max_waiting: too many requests are waiting; it is a limit of caller web",
                2.5,
            )
            assert world.count("caller_refusals_total", caller="web", limit="max_waiting") == 1
            assert world.count("requests_rejected_total", model="en-de", reason="limit") == 1

    asyncio.run(run())


def test_a_request_that_needs_more_slots_than_its_caller_may_have_by_now_is_told_so(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("max_slots = 4")) as world:
            world.engine.reason, world.engine.limit = "queue_full", "max_slots"
            message = "max_slots: the request needs more slots; it is a limit of caller web"
            assert (await refused(generate(world)))[:2] == ("RESOURCE_EXHAUSTED", message)

    asyncio.run(run())


def test_a_priority_above_a_models_highest_is_refused(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model("a"), make_model("b")) as world:
            world.models.by_name["a"].traits = Traits(max_priority=2)
            for priority, model in ((2, "a"), (-3, "a"), (3, "b")):
                await generate(world, model=model, priority=priority)
            code, message, _ = await refused(generate(world, model="a", priority=3))
            assert (code, message) == ("INVALID_ARGUMENT", "priority: 3 is above 2, max_priority of model a")
            score = world.stub.Score(ScoreRequest(model="a", text=TEXT, priority=3), metadata=BEARER)
            assert (await refused(score))[:2] == (code, message)

    asyncio.run(run())


def test_a_priority_above_a_callers_highest_is_refused(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("max_priority = 0")) as world:
            await generate(world, priority=0)
            code, message, _ = await refused(generate(world, priority=1))
            assert (code, message) == ("INVALID_ARGUMENT", "priority: 1 is above 0, max_priority of caller web")
            score = world.stub.Score(ScoreRequest(text=TEXT, priority=1), metadata=BEARER)
            assert (await refused(score))[0] == "INVALID_ARGUMENT"

    asyncio.run(run())


def test_of_models_that_a_caller_may_not_use_it_is_not_told(serve: Any, limited: Any, make_model: Any) -> None:
    async def run() -> None:
        models = make_model("en-de"), make_model("en-fr")
        async with serve(*models, **limited('models = ["en-de"]')) as world:
            hidden = await refused(generate(world, model="en-fr"))
            unknown = await refused(generate(world, model="en-xx"))
            assert hidden == ("NOT_FOUND", "model: 'en-fr' is not loaded; loaded: en-de", None)
            assert unknown == ("NOT_FOUND", "model: 'en-xx' is not loaded; loaded: en-de", None)
            listed = await world.stub.ListModels(ListModelsRequest(), metadata=BEARER)
            assert [each.name for each in listed.models] == ["en-de"]
            assert (await refused(world.stub.GetModel(GetModelRequest(model="en-fr"), metadata=BEARER)))[0] == "NOT_FOUND"
            assert (await generate(world)).model == "en-de"

    asyncio.run(run())


def test_an_expired_caller_is_told_so(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("expires = 2001-01-01T00:00:00Z")) as world:
            code, message, _ = await refused(generate(world))
            assert (code, message) == ("UNAUTHENTICATED", "authorization: caller 'web' expired at 2001-01-01T00:00:00Z")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("settings", "limits", "timeout", "seconds", "limit"),
    [
        ({"default_deadline_seconds": 7}, "", None, 7, "default_deadline_seconds of 7"),
        ({"default_deadline_seconds": 7}, "", 90, 90, ""),
        ({"max_deadline_seconds": 9}, "", None, 9, "max_deadline_seconds of 9"),
        ({"max_deadline_seconds": 9}, "", 90, 9, "max_deadline_seconds of 9"),
        ({"max_deadline_seconds": 9}, "", 5, 5, ""),
        ({"default_deadline_seconds": 7, "max_deadline_seconds": 9}, "", None, 7, "default_deadline_seconds of 7"),
        ({"max_deadline_seconds": 9}, "max_deadline_seconds = 30", 90, 30, "max_deadline_seconds of 30"),
        ({"max_deadline_seconds": 9}, "max_deadline_seconds = 0", 90, 90, ""),
        ({"default_deadline_seconds": 7}, "max_deadline_seconds = 3", None, 3, "max_deadline_seconds of 3"),
        ({}, "default_deadline_seconds = 4", None, 4, "default_deadline_seconds of 4"),
        ({}, "", None, None, ""),
    ],
)
def test_the_servers_deadlines_are_the_engines_and_are_told_by_name(
    serve: Any, limited: Any, settings: Any, limits: str, timeout: float | None, seconds: float | None, limit: str
) -> None:
    async def run() -> None:
        async with serve(**settings, **limited(limits)) as world:
            world.engine.reason = "deadline"
            calls = [
                world.stub.Generate(GenerateRequest(text=TEXT), metadata=BEARER, timeout=timeout),
                world.stub.Score(ScoreRequest(text=TEXT), metadata=BEARER, timeout=timeout),
            ]
            whose = f"the server's deadline ({limit} seconds) passed" if limit else "the deadline passed"
            for call in calls:
                code, message, _ = await refused(call)
                assert (code, message.startswith(whose)) == ("DEADLINE_EXCEEDED", True)
            for request in (*world.engine.requests, *world.engine.pairs):
                if seconds is None:
                    assert request.deadline is None
                else:
                    assert request.deadline - time.monotonic() == pytest.approx(seconds, abs=3)

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Score"])
def test_the_servers_deadline_holds_for_a_request_that_never_comes(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve(default_deadline_seconds=0.05) as world:
            call = world.channel.stream_stream(f"/dragoman.v1.Generation/{method}")()  # of which nothing is sent
            assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.DEADLINE_EXCEEDED
            limit = "default_deadline_seconds of 0.05 seconds"
            assert await call.details() == f"the server's deadline ({limit}) passed before the request came"
            await eventually(lambda: not world.server.num_running)
            assert world.records() == {("", "DEADLINE_EXCEEDED"): 1}

    asyncio.run(run())


def test_requests_of_a_stream_have_the_servers_deadline_each(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_deadline_seconds=60) as world:
            requests = [GenerateRequest(text=TEXT, request_id=str(i)) for i in range(2)]
            assert len([each async for each in world.stub.GenerateBatch(iter(requests))]) == 2
            for request in world.engine.requests:
                assert request.deadline - request.arrival == pytest.approx(60, abs=1e-3)

    asyncio.run(run())


@pytest.fixture
def by_certificate(tmp_path: Path) -> tuple[dict[str, Path], Any]:
    """Know one caller by its certificate; return the settings, and what opens a channel with a certificate."""
    folder = make_certificates(
        tmp_path, {"server": "DNS:localhost,IP:127.0.0.1", "web": "DNS:web.example.org", "other": "DNS:other"}
    )
    callers = tmp_path / "callers.toml"
    callers.write_text('[callers.web]\ncertificates = ["web.example.org"]\n')
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem", "auth_tokens_file": callers.name}

    def channel(world: Any, name: str) -> grpc.aio.Channel:
        contents = [(folder / file).read_bytes() for file in ("ca.pem", f"{name}.key", f"{name}.pem")]
        return grpc.aio.secure_channel(f"127.0.0.1:{world.server.port}", grpc.ssl_channel_credentials(*contents))

    return {setting: folder / file for setting, file in files.items()}, channel


def test_a_certificates_name_is_a_caller(serve: Any, by_certificate: Any) -> None:
    settings, channel = by_certificate

    async def run() -> None:
        async with serve(**settings) as world, channel(world, "web") as ours, channel(world, "other") as theirs:
            assert (await GenerationStub(ours).Generate(GenerateRequest(text=TEXT), timeout=20)).text
            assert world.engine.requests[0].share.caller == "web"
            code, message, _ = await refused(GenerationStub(theirs).Generate(GenerateRequest(text=TEXT), timeout=20))
            assert code == "UNAUTHENTICATED"
            assert message == "authorization: a client certificate with a name that this server knows is needed"

    asyncio.run(run())


def test_who_has_no_certificate_that_is_known_is_refused_before_a_message_is_read(serve: Any, by_certificate: Any) -> None:
    """Its message never comes, and it is refused all the same, by unknown methods too; who is known is told what they are."""
    settings, channel = by_certificate

    async def run() -> None:
        async with serve(**settings) as world, channel(world, "web") as ours, channel(world, "other") as theirs:
            for method in ("/dragoman.v1.Generation/Generate", "/dragoman.v1.Generation/GenerateStream"):
                call = theirs.stream_stream(method)()  # of which nothing is sent
                assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAUTHENTICATED
            unknown = "/no.such.Service/Method"
            assert await theirs.unary_unary(unknown)(b"", timeout=20).code() is grpc.StatusCode.UNAUTHENTICATED
            assert await ours.unary_unary(unknown)(b"", timeout=20).code() is grpc.StatusCode.UNIMPLEMENTED

    asyncio.run(run())


def test_an_expired_caller_is_refused_before_its_message_is_read_and_counted_once(serve: Any, limited: Any) -> None:
    async def run() -> None:
        async with serve(**limited("expires = 2001-01-01T00:00:00Z")) as world:
            call = world.channel.stream_stream("/dragoman.v1.Generation/Generate")(metadata=BEARER)
            assert await asyncio.wait_for(call.code(), 20) is grpc.StatusCode.UNAUTHENTICATED
            assert world.count("caller_refusals_total", caller="web", limit="expires") == 1
            assert world.records() == {("", "UNAUTHENTICATED"): 1}

    asyncio.run(run())


def test_a_storm_of_refusals_writes_some_lines_and_tells_how_many_it_did_not(serve: Any, limited: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve(**limited()) as world:
            for _ in range(BURST + 60):
                with pytest.raises(grpc.aio.AioRpcError):
                    await world.stub.Generate(GenerateRequest(text=TEXT))
            await generate(world)
            world.server.core.calls.records.tell_suppressed()
            lines = logged()
            codes = [line["code"] for line in lines if line["event"] == "call"]
            assert codes[-1] == "OK"
            [told] = [line for line in lines if line["event"] == "lines of failed calls not written"]
            assert told["kind"] == "unauthenticated"
            assert codes.count("UNAUTHENTICATED") + told["suppressed"] == BURST + 60
            assert told["suppressed"] > 0
            assert world.records()["", "UNAUTHENTICATED"] == BURST + 60

    asyncio.run(run())
