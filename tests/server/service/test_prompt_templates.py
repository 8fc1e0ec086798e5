"""Prompt templates: the tokens around a text by its languages, and refusals of languages that can be shown to callers."""

from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.server.engine.messages import GREEDY, Request, SearchOptions
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.languages import MAX_KEPT, PromptTemplates

EOS, START = 1, 2
GERMAN = Language(
    code="deu_Latn", names=["de", "german"], label="German", source_prefix=[11], source_suffix=[12], target_prefix=[13]
)
FRENCH = Language(code="fra_Latn", names=["fr"], source_prefix=[21, 22], target_prefix=[23, 24], decoder_start_id=25)
ENGLISH = Language(code="eng_Latn", names=["en"], label="English", source_prefix=[31], source_suffix=[32, 33])
TEMPLATE = Template(source_prefix=[41], source_suffix=[42], target_prefix=[43], decoder_start_id=44)


def templates(template: Template = TEMPLATE, has_prompts: bool = False, **languages: Any) -> PromptTemplates:
    given: dict[str, Any] = {"source": [ENGLISH, GERMAN], "target": [GERMAN, FRENCH]} | languages
    manifest: Any = SimpleNamespace(
        name="many",
        eos_id=EOS,
        decoder_start_id=START,
        has_prompts=has_prompts,
        template=template,
        languages=Languages(**given),
        defaults=Defaults(),
        max_target_tokens=48,
    )
    return PromptTemplates(manifest)


def refusal(templates: PromptTemplates, source: str = "", target: str = "") -> str:
    with pytest.raises(InvalidRequest) as caught:
        templates.find(source, target)
    return caught.value.message


def test_the_order_around_a_source_is_that_of_the_contract() -> None:
    """Target language's prefix, source language's, template's, text, end-of-sequence, template's suffix, source language's."""
    assert templates().find("en", "fr").surround([7, 8])[0] == [21, 22, 31, 41, 7, 8, EOS, 42, 32, 33]
    assert templates().find("de", "de").surround([])[0] == [11, 11, 41, EOS, 42, 12]
    found = [(template.target_prefix, template.decoder_start_id) for template in map(templates().find, ("en", "en"), ("fr", "de"))]
    assert found == [([43, 23, 24], 25), ([43, 13], 44)]
    assert templates(Template()).find("en", "de").decoder_start_id is None
    assert templates(Template(task="from {source} to {target}: ")).find("de", "fr").task == "from German to fra_Latn: "
    plain = templates(Template(), source=[], target=[]).find()
    assert (plain.surround([7, 8])[0], plain.num_around, plain.target_prefix, plain.task) == ([7, 8, EOS], 1, [], "")
    templated = templates(source=[], target=[]).find()
    assert (templated.surround([7])[0], plain.search) == ([41, 7, EOS, 42], GREEDY)
    assert templated.search == SearchOptions(forced_prefix=[43], num_forced=1)


@pytest.mark.parametrize("spelling", ["deu_Latn", "DEU-latn", "de", "De", "german", " de ", "de-AT", "de_DE"])
def test_every_spelling_of_a_language_finds_the_same(spelling: str) -> None:
    found = templates().find(spelling, spelling)
    assert (found.source_language, found.target_language) == ("deu_Latn", "deu_Latn")


def test_languages_of_the_request_come_before_the_models_defaults() -> None:
    def found(templates: PromptTemplates, *asked: str) -> tuple[str, str]:
        template = templates.find(*asked)
        return template.source_language, template.target_language

    both = templates(default_source="eng_Latn", default_target="fra_Latn")
    assert (both.default_source_language, both.default_target_language) == found(both) == ("eng_Latn", "fra_Latn")
    assert (found(both, "de"), found(both, "", "de")) == (("deu_Latn", "fra_Latn"), ("eng_Latn", "deu_Latn"))
    only = templates(source=[GERMAN], target=[])
    assert (only.default_source_language, only.default_target_language) == found(only) == ("deu_Latn", "")
    assert (templates().default_source_language, templates().default_target_language) == ("", "")
    assert [language.code for language in templates().source_languages] == ["deu_Latn", "eng_Latn"]
    assert [language.code for language in templates().target_languages] == ["deu_Latn", "fra_Latn"]


def test_missing_and_unknown_languages_are_refused_with_the_list() -> None:
    assert refusal(templates()) == "source_language: is missing; model many reads eng_Latn, deu_Latn"
    assert refusal(templates(), target="de").startswith("source_language: is missing")
    assert refusal(templates(default_source="eng_Latn")) == "target_language: is missing; model many writes deu_Latn, fra_Latn"
    for asked, side, verb, codes in (
        ("fr", "source", "reads", "eng_Latn, deu_Latn"),
        ("en", "target", "writes", "deu_Latn, fra_Latn"),
    ):
        message = refusal(templates(), asked if side == "source" else "en", asked if side == "target" else "de")
        assert message == f"{side}_language: '{asked}' is no language that model many {verb}, which are {codes}"
    plain = templates(Template(), source=[], target=[])
    assert refusal(plain, "en") == "source_language: model many says no languages that it reads, so a request cannot choose one"
    assert refusal(plain, target="de").startswith("target_language: model many says no languages that it writes")
    reads_none = templates(source=[])
    assert reads_none.find(target_language="de").surround([7])[0] == [11, 41, 7, EOS, 42]
    assert refusal(reads_none, "en", "de").startswith("source_language: model many says no languages")


def test_a_source_language_without_tokens_need_not_be_named() -> None:
    """MADLAD reads many languages, and is told only which to write; a task may still have a place for the name."""
    silent = {"source": [Language(code="de"), Language(code="fr")]}
    told = templates(**silent)
    assert told.find(target_language="fr").surround([7])[0] == told.find("de", "fr").surround([7])[0]
    assert (told.find(target_language="fr").source_language, told.find("fr", "fr").source_language) == ("", "fr")
    assert templates(default_target="fra_Latn", **silent).find().target_language == "fra_Latn"
    assert refusal(templates(Template(task="{source}: "), **silent), target="fr").startswith("source_language: is missing")
    for said in ({"source_prefix": [1]}, {"source_suffix": [1]}, {"target_prefix": [1]}, {"decoder_start_id": 1}):
        several = templates(source=[Language(code="de"), Language(code="fr", **said)])
        assert refusal(several, target="fr").startswith("source_language: is missing")


@pytest.mark.parametrize(
    "asked",
    ["x" * 33, "a\nb", "\u202eed", "\ud83d", "é" * 128, "_", "  ", "%s%n{0}"],
)
def test_names_that_callers_send_are_shown_as_plain_text_and_not_at_length(asked: str) -> None:
    message = refusal(templates(), asked, "de")
    assert message.isascii() and message.isprintable() and len(message) < 400
    assert message.startswith("source_language: '")
    for side in ("source", "target"):
        message = refusal(templates(), **{"source": "de", side: "x" * 129})
        assert message == f"{side}_language: 129 characters; at most 128 are allowed"


def test_a_long_list_of_languages_is_cut_with_the_number_left_out() -> None:
    codes = [f"l{i:03d}_Latn" for i in range(202)]
    many = templates(source=[Language(code=code, source_prefix=[9]) for code in codes])
    for message in (refusal(many), refusal(many, "xx")):
        last, more = message.split(", ")[-1].split(" and ")
        assert len(message) < 600 and last in codes and more == f"{202 - codes.index(last) - 1} more"


def test_pairs_are_put_together_once_and_more_than_are_kept_are_still_found() -> None:
    told = templates()
    assert told.find("ENG-Latn", "fr_FR") is told.find("en", "fr")
    codes = [f"l{i:02d}" for i in range(40)]
    sides = [Language(code=code, source_prefix=[100 + i], target_prefix=[200 + i]) for i, code in enumerate(codes)]
    many = templates(Template(), source=sides, target=sides)
    assert len(codes) ** 2 > MAX_KEPT
    for _ in range(2):
        for i, source in enumerate(codes):
            for j, target in enumerate(codes):
                template = many.find(source, target)
                assert template.surround([])[0] == [100 + j, 100 + i, EOS] and template.search.forced_prefix == [200 + j]
    assert len(many._templates) <= MAX_KEPT


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_task_that_names_a_side_without_languages_is_refused_at_the_start(side: str) -> None:
    with pytest.raises(BundleError, match=f"model many: the task of its template needs a {side} language"):
        templates(Template(task=f"to {{{side}}}: "), **{side: []})


def test_a_prompt_begins_with_the_start_token_and_its_last_token_is_fed_to_the_decoder() -> None:
    """Nothing ends it: the answer continues it."""
    template = templates(has_prompts=True).find("en", "fr")
    assert template.surround([7, 8]) == ([25, 21, 22, 31, 41, 7, 8, 42, 32], 33)
    assert (template.num_around, template.decoder_start_id) == (8, None)
    plain = templates(Template(), has_prompts=True, source=[], target=[]).find()
    assert plain.surround([7, 8]) == ([START, 7], 8) and plain.surround([]) == ([], START)
    request = Request(0, [START, 7], 5, 0.0, decoder_start_id=8)
    assert plain.before(request) == [START, 7, 8] and plain.num_source_tokens(request.source_ids) == 3
    assert templates().find("en", "fr").before(request) == [] and templates().find("en", "fr").num_source_tokens([1, 2]) == 2
