"""What is put around a text: in which order, by which languages, and what is refused, with words that can be shown."""

from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.server.core.frames import MAX_KEPT, MAX_LANGUAGE_CHARACTERS, Frame, Frames
from dragoman.server.engine.messages import GREEDY, Request, SearchOptions
from dragoman.server.errors import InvalidRequest

EOS, START = 1, 2
GERMAN = Language(
    code="deu_Latn", names=["de", "german"], label="German", source_prefix=[11], source_suffix=[12], target_prefix=[13]
)
FRENCH = Language(code="fra_Latn", names=["fr"], source_prefix=[21, 22], target_prefix=[23, 24], decoder_start_id=25)
ENGLISH = Language(code="eng_Latn", names=["en"], label="English", source_prefix=[31], source_suffix=[32, 33])
TEMPLATE = Template(source_prefix=[41], source_suffix=[42], target_prefix=[43], decoder_start_id=44)


def frames(template: Template = TEMPLATE, defaults: Defaults | None = None, has_prompts: bool = False, **languages: Any) -> Frames:
    given: dict[str, Any] = {"source": [ENGLISH, GERMAN], "target": [GERMAN, FRENCH]} | languages
    manifest: Any = SimpleNamespace(
        name="many",
        eos_id=EOS,
        decoder_start_id=START,
        has_prompts=has_prompts,
        template=template,
        languages=Languages(**given),
        defaults=defaults or Defaults(),
    )
    return Frames(manifest)


def refusal(frames: Frames, source: str = "", target: str = "") -> str:
    with pytest.raises(InvalidRequest) as caught:
        frames.find(source, target)
    return caught.value.message


def test_a_source_has_all_around_it_in_the_order_of_the_contract() -> None:
    """Target language's prefix, source language's, template's, text, end-of-sequence, template's suffix, source language's."""
    assert frames().find("en", "fr").framed([7, 8])[0] == [21, 22, 31, 41, 7, 8, EOS, 42, 32, 33]
    assert frames().find("de", "de").framed([])[0] == [11, 11, 41, EOS, 42, 12]


def test_answers_begin_with_the_templates_tokens_and_then_the_languages() -> None:
    assert frames().find("en", "fr").target_prefix == [43, 23, 24]
    assert frames().find("en", "de").target_prefix == [43, 13]


def test_the_start_token_is_the_languages_or_the_templates_or_the_models() -> None:
    assert frames().find("en", "fr").decoder_start_id == 25
    assert frames().find("en", "de").decoder_start_id == 44
    assert frames(Template()).find("en", "de").decoder_start_id is None


def test_a_task_names_both_languages_by_their_labels() -> None:
    told = frames(Template(task="from {source} to {target}: "))
    assert told.find("de", "fr").task == "from German to fra_Latn: "


@pytest.mark.parametrize("spelling", ["deu_Latn", "DEU-latn", "de", "De", "german", " de ", "de-AT", "de_DE"])
def test_every_spelling_of_a_language_finds_the_same(spelling: str) -> None:
    found = frames().find(spelling, spelling)
    assert (found.source_language, found.target_language) == ("deu_Latn", "deu_Latn")


def test_what_is_not_said_is_the_default() -> None:
    both = frames(default_source="eng_Latn", default_target="fra_Latn")
    assert (both.find().source_language, both.find().target_language) == ("eng_Latn", "fra_Latn")
    assert (both.find("de").source_language, both.find("de").target_language) == ("deu_Latn", "fra_Latn")
    assert (both.find("", "de").source_language, both.find("", "de").target_language) == ("eng_Latn", "deu_Latn")
    assert (both.default_source_language, both.default_target_language) == ("eng_Latn", "fra_Latn")
    only = frames(source=[GERMAN], target=[])
    assert (only.find().source_language, only.find().target_language) == ("deu_Latn", "")
    assert (only.default_source_language, only.default_target_language) == ("deu_Latn", "")


def test_a_language_that_has_to_be_said_is_asked_for() -> None:
    assert refusal(frames()) == "source_language: is missing; model many reads eng_Latn, deu_Latn"
    assert refusal(frames(default_source="eng_Latn")) == "target_language: is missing; model many writes deu_Latn, fra_Latn"
    assert refusal(frames(), target="de").startswith("source_language: is missing")
    assert (frames().default_source_language, frames().default_target_language) == ("", "")


def test_a_source_of_which_the_model_is_told_nothing_need_not_be_named() -> None:
    """MADLAD reads many languages, and is told only which to write; a task may still have a place for the name."""
    silent = {"source": [Language(code="de"), Language(code="fr")]}
    told = frames(**silent)
    assert told.find(target_language="fr").framed([7])[0] == told.find("de", "fr").framed([7])[0]
    assert (told.find(target_language="fr").source_language, told.find("fr", "fr").source_language) == ("", "fr")
    assert frames(default_target="fra_Latn", **silent).find().target_language == "fra_Latn"
    assert refusal(frames(Template(task="{source}: "), **silent), target="fr").startswith("source_language: is missing")
    for said in ({"source_prefix": [1]}, {"source_suffix": [1]}, {"target_prefix": [1]}, {"decoder_start_id": 1}):
        several = frames(source=[Language(code="de"), Language(code="fr", **said)])
        assert refusal(several, target="fr").startswith("source_language: is missing")


def test_a_language_that_the_model_has_not_is_refused_with_those_it_has() -> None:
    assert refusal(frames(), "fr", "de") == (
        "source_language: 'fr' is no language that model many reads, which are eng_Latn, deu_Latn"
    )
    assert refusal(frames(), "en", "en") == (
        "target_language: 'en' is no language that model many writes, which are deu_Latn, fra_Latn"
    )


def test_a_model_without_languages_takes_none() -> None:
    plain = frames(Template(), source=[], target=[])
    assert refusal(plain, "en") == "source_language: model many says no languages that it reads, so a request cannot choose one"
    assert refusal(plain, target="de").startswith("target_language: model many says no languages that it writes")
    reads_none = frames(source=[])
    assert reads_none.find(target_language="de").framed([7])[0] == [11, 41, 7, EOS, 42]
    assert refusal(reads_none, "en", "de").startswith("source_language: model many says no languages")


def test_a_plain_model_puts_end_of_sequence_after_a_text_and_shares_the_greedy_options() -> None:
    plain = frames(Template(), source=[], target=[])
    frame = plain.find()
    assert frame.framed([7, 8])[0] == [7, 8, EOS] and (frame.num_around, frame.target_prefix, frame.task) == (1, [], "")
    assert frame.search is GREEDY and plain.find() is frame


def test_a_template_alone_is_put_around_every_text() -> None:
    frame = frames(source=[], target=[]).find()
    assert frame.framed([7])[0] == [41, 7, EOS, 42]
    assert frame.search == SearchOptions(forced_prefix=[43], num_forced=1)


@pytest.mark.parametrize(
    "asked",
    ["x" * 33, "\0", "a\nb", "\x1b[2J", "\u202eed", "\ud83d", "é" * 128, "_", "-", "  ", "[]", "de,fr", "../../de", "%s%n{0}"],
)
def test_what_callers_send_is_shown_as_plain_text_and_not_at_length(asked: str) -> None:
    message = refusal(frames(), asked, "de")
    assert message.isascii() and message.isprintable() and len(message) < 400
    assert message.startswith("source_language: '")


@pytest.mark.parametrize("count", [129, 1_000_000])
def test_what_is_longer_than_any_name_is_not_looked_at(count: int) -> None:
    for told in (frames(), frames(Template(), source=[], target=[])):
        asked = Unread("x" * count)
        expected = f"{count} characters; at most {MAX_LANGUAGE_CHARACTERS} are allowed"
        assert refusal(told, source=asked) == f"source_language: {expected}"
    assert refusal(frames(), "de", Unread("x" * count)) == f"target_language: {expected}"


class Unread(str):
    """A text of which nothing but its length may be asked."""

    __slots__ = ()

    def casefold(self) -> Any:
        raise AssertionError("looked at")

    __hash__ = None  # type: ignore[assignment]


def test_a_long_list_is_cut_and_says_how_much_is_missing() -> None:
    codes = [f"l{i:03d}_Latn" for i in range(202)]
    many = frames(source=[Language(code=code, source_prefix=[9]) for code in codes])
    for message in (refusal(many), refusal(many, "xx")):
        assert len(message) < 600
        last, more = message.split(", ")[-1].split(" and ")
        assert last in codes and more == f"{202 - codes.index(last) - 1} more"


def test_more_pairs_than_are_remembered_are_still_found() -> None:
    codes = [f"l{i:02d}" for i in range(40)]
    sides = [Language(code=code, source_prefix=[100 + i], target_prefix=[200 + i]) for i, code in enumerate(codes)]
    many = frames(Template(), source=sides, target=sides)
    assert len(codes) ** 2 > MAX_KEPT
    for _ in range(2):
        for i, source in enumerate(codes):
            for j, target in enumerate(codes):
                frame = many.find(source, target)
                assert frame.framed([])[0] == [100 + j, 100 + i, EOS] and frame.search.forced_prefix == [200 + j]
    assert len(many._frames) <= MAX_KEPT


def test_a_pair_is_put_together_once() -> None:
    told = frames()
    first: Frame = told.find("en", "fr")
    assert told.find("ENG-Latn", "fr_FR") is first


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_task_that_names_a_side_without_languages_is_refused_when_loaded(side: str) -> None:
    with pytest.raises(BundleError, match=f"model many: the task of its template needs a {side} language"):
        frames(Template(task=f"to {{{side}}}: "), **{side: []})


def test_languages_are_told_in_the_order_of_their_codes() -> None:
    assert [language.code for language in frames().source_languages] == ["deu_Latn", "eng_Latn"]
    assert [language.code for language in frames().target_languages] == ["deu_Latn", "fra_Latn"]


def test_a_prompt_begins_with_the_start_token_and_its_last_token_is_fed_to_the_decoder() -> None:
    """Nothing ends it: the answer goes on with it."""
    of_prompts = frames(has_prompts=True)
    frame = of_prompts.find("en", "fr")
    assert frame.framed([7, 8]) == ([25, 21, 22, 31, 41, 7, 8, 42, 32], 33)
    assert (frame.num_around, frame.decoder_start_id) == (8, None)
    plain = frames(Template(), has_prompts=True, source=[], target=[]).find()
    assert plain.framed([7, 8]) == ([START, 7], 8) and plain.framed([]) == ([], START)
    request = Request(0, [START, 7], 5, 0.0, decoder_start_id=8)
    assert plain.before(request) == [START, 7, 8] and plain.num_source_tokens(request.source_ids) == 3
    assert frames().find("en", "fr").before(request) == [] and frames().find("en", "fr").num_source_tokens([1, 2]) == 2
