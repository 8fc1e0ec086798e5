"""Requests that name languages and no model, among models of one pair, of many, and of none."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.model.checkpoint_folder import CheckpointFolder
from dragoman.model.generation import Language, Languages
from dragoman.server.config import ServerConfig
from dragoman.server.core.access import read_callers
from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.core.deadlines import NO_DEADLINES
from dragoman.server.core.language_routing import choose_model, pairs_of
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.errors import InvalidRequest, UnknownModel, UnknownPair
from dragoman.server.telemetry.metrics import Metrics
from tests.server.scripted import LoadedModels

ROOT = Path(__file__).resolve().parents[3]
NAMES = {"en": ["eng", "english"], "de": ["deu", "german"], "fr": ["fra"], "cs": ["ces"]}


def language(code: str, token: int | None = None) -> Language:
    return Language(code=code, names=NAMES.get(code, []), source_prefix=[] if token is None else [token])


def languages(sources: str, targets: str, token: int | None = None, **defaults: str) -> Languages:
    sides = [[language(code, token) for code in side.split()] for side in (sources, targets)]
    return Languages(source=sides[0], target=sides[1], **defaults)


@pytest.fixture
def models(make_model: Callable[..., Any]) -> list[Any]:
    """Two of one pair, one of many that has to be told both, one that reads whatever there is, and one that tells nothing."""
    return [
        make_model("captions"),
        make_model("en-de", languages=languages("en", "de")),
        make_model("en-fr", languages=languages("en", "fr")),
        make_model("many", languages=languages("en de cs", "en de fr cs", 340)),
        make_model("reader", languages=languages("", "cs", 341)),
    ]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("en", "de", "en-de"),
        ("ENG", "de-AT", "en-de"),
        ("en", "fr", "en-fr"),
        ("de", "fr", "many"),
        ("english", "ces", "many"),
        ("", "de", "en-de"),
        ("", "fr", "en-fr"),
        ("", "cs", "reader"),
    ],
)
def test_the_model_that_translates_a_pair_is_chosen(models: list[Any], source: str, target: str, expected: str) -> None:
    assert choose_model(models, source, target).name == expected


def test_of_several_none_is_guessed(models: list[Any], make_model: Any) -> None:
    twice = [*models, make_model("en-de-rnn", languages=languages("en", "de"))]
    for source, shown in (("en", "from 'en' to 'de'"), ("", "to 'de'")):
        with pytest.raises(InvalidRequest) as caught:
            choose_model(twice, source, "de")
        assert caught.value.message == f"model: is missing; 2 translate {shown}: en-de, en-de-rnn"
    many = [make_model(name, languages=languages("en de", "en de", default_source="en")) for name in ("a", "b")]
    with pytest.raises(InvalidRequest, match="2 translate from 'en' to 'de': a, b"):
        choose_model(many, "en", "de")
    assert choose_model([*many, models[1]], "en", "de").name == "en-de", "what does this pair alone goes first"
    with pytest.raises(InvalidRequest, match="3 translate to 'de': a, b, en-de"):
        choose_model([*many, models[1]], "", "de")


def test_a_pair_that_none_translates_is_answered_with_those_there_are(models: list[Any]) -> None:
    for source, target in (("fr", "en"), ("", "tlh"), ("fr", "cs")):
        with pytest.raises(UnknownPair) as caught:
            choose_model(models, source, target)
        asked = f"from {source!r} to {target!r}" if source else f"to {target!r}"
        there = "en to de (en-de); en to fr (en-fr); cs, de, en to cs, de, en, fr (many); anything to cs (reader)"
        assert caught.value.message == f"target_language: no model translates {asked}; there: {there}"
    with pytest.raises(UnknownPair, match="there: none that tells its languages"):
        choose_model(models[:1], "en", "de")
    with pytest.raises(InvalidRequest, match="target_language: 200 characters"):
        choose_model(models, "en", "x" * 200)


def test_a_list_of_pairs_is_never_long(make_model: Any) -> None:
    codes = " ".join(f"x{number}" for number in range(300))
    many = [make_model(f"m{number:03}", languages=languages(codes, codes)) for number in range(30)]
    told = pairs_of(many)
    assert len(told) < 1000 and told.endswith("; and those of 28 more") and "x0, x1" in told and "more to x0" in told


def core_of(tmp_path: Path, models: list[Any], callers: str = "") -> Core:
    metrics = Metrics(CollectorRegistry(), (1.0,))
    for model in models:
        metrics.add_model(model.name, model.version, "fp32", "cpu", 8)
    fields = {}
    if callers:
        (tmp_path / "callers.toml").write_text(callers)
        fields["auth_tokens_file"] = tmp_path / "callers.toml"
    config = ServerConfig(models=tmp_path, **fields)
    return Core(LoadedModels(*models), metrics, None, read_callers(config, metrics, NO_DEADLINES))


def test_generation_streams_and_scores_go_to_the_model_for_their_languages(tmp_path: Path, models: list[Any]) -> None:
    core = core_of(tmp_path, models)

    async def run() -> None:
        asked = {"text": "a dog", "source_language": "en", "target_language": "fr"}
        assert (await core.generation.generate(GenerateRequest(**asked), Call.begin("generate"))).model == "en-fr"
        async with core.generation.stream(GenerateRequest(**asked), Call.begin("stream")) as pieces:
            last = [piece async for piece in pieces][-1]
        assert last.result is not None and last.result.model == "en-fr"
        scores = await core.generation.score(ScoreRequest(target="un chien", **asked), Call.begin("score"))
        assert scores.model == "en-fr"
        named = GenerateRequest(model="many", **{**asked, "source_language": "de"})
        assert (await core.generation.generate(named, Call.begin("named"))).model == "many"
        with pytest.raises(InvalidRequest, match="source_language: 'de' is no language that model en-fr reads"):
            await core.generation.generate(GenerateRequest(model="en-fr", **{**asked, "source_language": "de"}), Call.begin("x"))
        with pytest.raises(UnknownModel, match="model: is missing"):
            await core.generation.generate(GenerateRequest(text="a dog", source_language="en"), Call.begin("no target"))

    asyncio.run(run())


def test_a_model_that_is_alone_is_meant_whatever_it_tells(tmp_path: Path, models: list[Any]) -> None:
    async def run() -> None:
        alone = core_of(tmp_path, models[1:2]).generation
        assert (await alone.generate(GenerateRequest(text="a dog", target_language="de"), Call.begin("x"))).model == "en-de"
        with pytest.raises(InvalidRequest, match="target_language: 'fr' is no language that model en-de writes"):
            await alone.generate(GenerateRequest(text="a dog", target_language="fr"), Call.begin("x"))

    asyncio.run(run())


def test_a_caller_is_led_to_models_that_it_may_use_and_told_of_no_others(tmp_path: Path, models: list[Any]) -> None:
    told = '[callers.some]\ntokens = ["secret"]\nmodels = ["many", "en-fr"]\n'
    core = core_of(tmp_path, models, told)

    async def run() -> None:
        assert core.callers is not None
        caller = core.callers.identify([("authorization", "Bearer secret")])

        def begin() -> Call:
            call = Call.begin("x")
            call.caller = caller
            return call

        asked = GenerateRequest(text="a dog", source_language="en", target_language="de")
        assert (await core.generation.generate(asked, begin())).model == "many"
        with pytest.raises(UnknownPair) as caught:
            await core.generation.generate(GenerateRequest(text="a dog", target_language="tlh"), begin())
        assert "en-de" not in caught.value.message and "reader" not in caught.value.message

    asyncio.run(run())


@pytest.mark.parametrize(("name", "pair"), [("en-de", "en de"), ("en-de-rnn", "en de"), ("en-fr", "en fr"), ("en-captions", None)])
def test_shipped_models_tell_what_they_translate(name: str, pair: str | None) -> None:
    folder = ROOT / "model/pretrained" / name
    told = CheckpointFolder.load(folder).languages
    assert pair is None or (told is not None and f"{told.source[0].code} {told.target[0].code}" == pair)
    assert (told is None) == (pair is None) == ("languages" not in json.loads((folder / "config.json").read_text()))
