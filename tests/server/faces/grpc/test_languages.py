"""Languages, defaults and shortlists on the wire: what a model is described with, what requests may say, how they are refused."""

import asyncio
from typing import Any

import grpc
import pytest

from dragoman.model.generation import Defaults, Language, Languages
from dragoman.server.faces.v1.descriptions import Descriptions
from dragoman.v1 import generation_pb2
from dragoman.v1.generation_pb2 import GenerateRequest, GetModelRequest, ListModelsRequest, ScoreRequest
from tests.server.scripted import LoadedModels

ENGLISH = Language(code="eng_Latn", names=["en", "en_gb"], source_prefix=[340])
GERMAN = Language(code="deu_Latn", names=["de"], source_prefix=[341], target_prefix=[342])
LANGUAGES = Languages(source=[ENGLISH, GERMAN], target=[GERMAN], default_source="eng_Latn")


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


def test_a_model_tells_its_languages_its_defaults_and_its_shortlist(serve: Any, make_model: Any) -> None:
    defaults = Defaults(num_beams=4, early_stopping=False, length_penalty=0.5, max_new_tokens=9, suppressed_tokens=[7, 5], top_k=0)

    async def run() -> None:
        async with serve(make_model(languages=LANGUAGES, defaults=defaults, num_choices=100)) as world:
            told = await world.stub.GetModel(GetModelRequest())
            assert [(x.code, list(x.names)) for x in told.source_languages] == [("deu_Latn", ["de"]), ("eng_Latn", ["en", "en_gb"])]
            assert [(x.code, list(x.names)) for x in told.target_languages] == [("deu_Latn", ["de"])]
            assert (told.default_source_language, told.default_target_language) == ("eng_Latn", "deu_Latn")
            assert told.defaults == generation_pb2.Defaults(
                num_beams=4, early_stopping=False, length_penalty=0.5, max_new_tokens=9, suppressed_tokens=[7, 5], top_k=0
            )
            assert told.defaults.HasField("early_stopping") and not told.defaults.HasField("do_sample")
            assert (told.shortlist_tokens, told.default_max_new_tokens) == (100, 9)
            assert list((await world.stub.ListModels(ListModelsRequest())).models) == [told]

    asyncio.run(run())


def test_languages_are_written_once_and_what_changes_each_time(make_model: Any) -> None:
    """Hundreds of languages take a millisecond, in which no request would be answered."""
    model, other = make_model(languages=LANGUAGES), make_model("plain")
    descriptions = Descriptions(LoadedModels(model, other), 2**20)
    model.engine.is_ready = True
    first = descriptions.of(model)
    assert [language.code for language in first.source_languages] == ["deu_Latn", "eng_Latn"]
    model.frames.source_languages = model.frames.target_languages = Unreadable()
    model.engine.is_ready = False
    second, (third, plain) = descriptions.of(model), descriptions.of_all([model, other]).models
    assert second == third != first and not second.is_ready and not plain.source_languages
    first.is_ready = False
    assert first == second
    del first.source_languages[:]
    assert descriptions.of(model) == second, "each has its own"


class Unreadable:
    """Languages that must not be looked at again."""

    def __iter__(self) -> Any:
        raise AssertionError("written again")


def test_a_description_that_no_message_holds_is_refused_with_the_setting(serve: Any, make_model: Any) -> None:
    many = Languages(source=[Language(code=f"x{i:03}", names=[f"name of {i}".replace(" ", "_")]) for i in range(50)])

    async def run() -> None:
        async with serve(make_model(languages=many), max_message_bytes=1536) as world:
            for ask in (world.stub.GetModel(GetModelRequest()), world.stub.ListModels(ListModelsRequest())):
                error = await failure(ask)
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "max_message_bytes of the server is 1536" in (error.details() or "")
            assert (await world.stub.Generate(GenerateRequest(text="a"))).text

    asyncio.run(run())


def test_every_default_of_a_bundle_has_its_field_in_the_contract() -> None:
    assert {field.name for field in generation_pb2.Defaults.DESCRIPTOR.fields} == set(Defaults.__struct_fields__)


def test_a_model_without_any_of_it_says_so(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            told = await world.stub.GetModel(GetModelRequest())
            assert not told.source_languages and not told.target_languages and not told.shortlist_tokens
            assert told.defaults == generation_pb2.Defaults()
            assert (told.default_source_language, told.default_target_language) == ("", "")
            assert (await world.stub.Generate(GenerateRequest(text="a"))).shortlist_tokens == 0

    asyncio.run(run())


def test_an_answer_tells_the_shortlist_that_it_was_chosen_from(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model(num_choices=100)) as world:
            assert (await world.stub.Generate(GenerateRequest(text="a"))).shortlist_tokens == 100

    asyncio.run(run())


def test_every_way_of_asking_takes_languages(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model(languages=LANGUAGES)) as world:
            stub, fields = world.stub, {"text": "a", "source_language": "de-AT", "target_language": "DE"}
            whole = await stub.Generate(GenerateRequest(**fields))
            pieces = [piece async for piece in stub.GenerateStream(GenerateRequest(**fields))]
            batch = [x async for x in stub.GenerateBatch(iter([GenerateRequest(request_id="r", **fields)]))]
            scored = await stub.Score(ScoreRequest(target="b", **fields))
            requests, (pair,) = world.engine.requests, world.engine.pairs
            assert len(requests) == 3 and {tuple(x.source_ids) for x in (*requests, pair)} == {tuple(requests[0].source_ids)}
            assert requests[0].source_ids[:2] == [341, 341]
            assert {(tuple(x.search.forced_prefix), x.search.num_forced) for x in requests} == {((342,), 1)}
            assert list(whole.tokens) == [342, *world.engine.answer] == list(batch[0].response.tokens)
            assert whole.text == "Fußball 🐕 日本", "what is forced is silent"
            assert "".join(piece.text for piece in pieces) == whole.text
            assert [token for piece in pieces for token in piece.tokens] == list(whole.tokens)
            assert pair.target_ids[0] == 342 and [told.token for told in scored.tokens] == pair.target_ids[1:]

    asyncio.run(run())


def test_a_language_that_there_is_not_is_refused_with_the_list(serve: Any, make_model: Any) -> None:
    many = Languages(source=[Language(code=f"x{i:03d}_Latn", source_prefix=[341]) for i in range(202)], target=[GERMAN])

    async def run() -> None:
        async with serve(make_model(languages=many), make_model("plain")) as world:
            for asked, reason in (
                ("xx", "is no language that model en-de reads"),
                ("", "is missing; model en-de reads x000_Latn, "),
            ):
                wanted = {"model": "en-de", "text": "a", "source_language": asked}
                for call in (world.stub.Generate, world.stub.GenerateStream):
                    error = await failure(call(GenerateRequest(**wanted)))
                    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                    assert (error.details() or "").startswith("source_language: ") and reason in (error.details() or "")
                    assert (error.details() or "").endswith(" more")
                [item] = [x async for x in world.stub.GenerateBatch(iter([GenerateRequest(request_id="r", **wanted)]))]
                assert item.error.message == error.details()
                error = await failure(world.stub.Score(ScoreRequest(target="b", **wanted)))
                assert error.details() == item.error.message
            error = await failure(world.stub.Generate(GenerateRequest(model="plain", text="a", target_language="de")))
            assert (error.details() or "").startswith("target_language: model plain says no languages")
            assert world.engine.requests == []

    asyncio.run(run())


def test_absent_fields_are_the_models_and_what_is_zero_is_said(serve: Any, make_model: Any) -> None:
    defaults = Defaults(num_beams=3, early_stopping=True, no_repeat_ngram_size=2, min_new_tokens=4)

    async def run() -> None:
        async with serve(make_model(defaults=defaults)) as world:
            await world.stub.Generate(GenerateRequest(text="a"))
            await world.stub.Generate(
                GenerateRequest(text="a", early_stopping=False, no_repeat_ngram_size=0, min_new_tokens=0, num_beams=2)
            )
            first, second = (request.search for request in world.engine.requests)
            assert (first.num_beams, first.is_stopped_early, first.no_repeat_ngram_size, first.min_new_tokens) == (3, True, 2, 4)
            assert (second.num_beams, second.is_stopped_early, second.no_repeat_ngram_size, second.min_new_tokens) == (
                2,
                False,
                0,
                0,
            )

    asyncio.run(run())
