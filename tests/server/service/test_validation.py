"""Validation of requests: every field at its limits, the tokens that the engine gets, and the field that a refusal names."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.text.tokenizer import SpecialToken
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine.messages import GREEDY, Scored
from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.service.context import Call, choose_request_id, new_incident
from dragoman.server.service.generate import Generation
from dragoman.server.service.requests import GenerateRequest, ScoreRequest
from dragoman.server.service.score import Scores, to_scores
from dragoman.server.service.validation import Validator

TEXT = "Zwei Männer spielen Fußball."
HUGE = "Schnee " * 100_000
ENGLISH = Language(code="en", source_prefix=[340], source_suffix=[341, 342])
GERMAN = Language(code="de", source_prefix=[350], target_prefix=[351, 352], decoder_start_id=23)
LANGUAGES = Languages(source=[ENGLISH], target=[GERMAN, Language(code="fr", target_prefix=[354])])
GERMAN_ROOM = "max_target_tokens of model en-de less the 2 that its answers begin with"


async def context(remaining: float | None) -> Call:
    call = Call.begin("toy/a")
    call.arrival, call.deadline = 1.0, None if remaining is None else time.monotonic() + remaining
    return call


def prepare(model: Any, text: str = TEXT, remaining: float | None = None, **fields: Any) -> SimpleNamespace:
    """Return a request as the engine gets it, and whether its source was cut."""

    async def validate() -> SimpleNamespace:
        validated = await Validator().validate(GenerateRequest(text=text, **fields), await context(remaining), model)
        return SimpleNamespace(request=validated[0], is_truncated=validated[2])

    return asyncio.run(validate())


def pair(model: Any, text: str, target: str, **fields: Any) -> SimpleNamespace:
    """Return a score request as the engine gets it, and its template."""

    async def validate() -> SimpleNamespace:
        request = ScoreRequest(text=text, target=target, **fields)
        validated = await Validator().validate_score(request, await context(None), model)
        return SimpleNamespace(request=validated[0], template=validated[1])

    return asyncio.run(validate())


def refusal(validate: Callable[..., object], *arguments: Any, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        validate(*arguments, **fields)
    return caught.value.message


def untokenised(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail the test as soon as the model's tokeniser is used."""
    monkeypatch.setattr(model.tokenizers.source, "encode", lambda _: pytest.fail("tokenised"))
    return model


def count(model: Any, text: str) -> int:
    return len(model.tokenizers.source.encode(text))


@pytest.fixture
def model(make_model: Any) -> Any:
    """A model without languages: 64 source tokens, 48 target tokens, 32 by default."""
    return make_model()


@pytest.fixture
def translator(make_model: Callable[..., Any]) -> Any:
    return make_model(languages=LANGUAGES)


@pytest.fixture
def language_model(make_model: Callable[..., Any]) -> Any:
    """A model whose prompt and answer share 48 positions, of which a prompt may have 40."""
    return make_model(has_prompts=True, architecture="decoder", attention_layers=0, max_source_tokens=40)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *[({"text": blank}, "text: is blank") for blank in ("", " ", "\n\t \u3000\u00a0")],
        *[({"max_new_tokens": n}, f"max_new_tokens: {n} is not in 1 to 48, max_target_tokens of model en-de") for n in (0, 49)],
        *[({"priority": n}, f"priority: {n} is not in -10 to 10") for n in (-11, 11, 2**31 - 1)],
        ({"text": "é\ud83d"}, "text: character 2 is half a surrogate pair"),
        ({"forced_prefix": "é\ud83d"}, "forced_prefix: character 2 is half a surrogate pair"),
        ({"text": "x" * 63}, "text: 65 tokens, end-of-sequence included; max_source_tokens of model en-de is 64"),
        ({"forced_prefix": "x" * 10, "max_new_tokens": 38}, "forced_prefix: 11 tokens and max_new_tokens of 38 are more than 48, "),
        ({"forced_prefix": "x" * 47}, "forced_prefix: 48 tokens leave none to generate; max_target_tokens of model en-de is 48"),
        ({"suppressed_tokens": [3] * 257}, "suppressed_tokens: 257 tokens; at most 256 are allowed"),
        ({"max_new_tokens": 6, "min_new_tokens": 6}, "min_new_tokens: 6 is not less than max_new_tokens, which is 6"),
        ({"forced_prefix": "x" * 27, "min_new_tokens": 20}, "min_new_tokens: 20 is not less than max_new_tokens, which is 20"),
    ],
    ids=str,
)
def test_fields_outside_their_limits_are_named(model: Any, fields: dict[str, Any], message: str) -> None:
    assert refusal(prepare, model, **fields).startswith(message)


@pytest.mark.parametrize("text", ["</s>", "\x00", "x" * 62])
def test_any_text_that_fits_is_tokenised_as_it_is(model: Any, text: str) -> None:
    prepared = prepare(model, text)
    ids, eos = prepared.request.source_ids, model.manifest.eos_id
    assert (ids[-1], ids.count(eos), model.tokenizers.target.decode(ids)) == (eos, 1, text)
    assert not prepared.is_truncated and prepare(model, text, truncate=True).request.source_ids == ids


@pytest.mark.parametrize("default", [None, True])
def test_special_tokens_that_a_source_names_are_tokens_where_that_is_asked_for(make_model: Any, default: bool | None) -> None:
    model = make_model(defaults=Defaults(special_tokens_in_text=default), max_source_tokens=4)
    for asked in (None, False):
        assert prepare(model, "Zwei", special_tokens_in_text=asked).request.source_ids[:-1] == model.tokenizers.source.encode(
            "Zwei"
        )
    for validate, arguments in ((prepare, ("Zwei",)), (pair, ("Zwei", "Zwei"))):
        told = refusal(validate, model, *arguments, special_tokens_in_text=True)
        assert told == "special_tokens_in_text: model en-de has no special tokens that a text may name"
    source, name = model.tokenizers.source, "<extra_id_0_of_many>"
    model.tokenizers = Tokenizers(source, source, (SpecialToken(name, 300), SpecialToken("<hl>", 301, lstrip=True, rstrip=True)))
    Generation(cast(Any, SimpleNamespace(all=lambda: [model])), cast(Any, Mock()), *[cast(Any, None)] * 2)
    assert ("encode_with_special_tokens" in vars(model.tokenizers)) is bool(default), "made before there are requests, or by one"
    for text in (name * 3, "<hl>  <hl>\t<hl>"):  # more characters than three tokens of other texts have
        ids = [300] * 3 if text[1] == "e" else [301] * 3
        asked = None if default else True
        assert prepare(model, text, special_tokens_in_text=asked).request.source_ids == [*ids, source.eos_id]
        assert pair(model, text, name, special_tokens_in_text=asked).request.source_ids == [*ids, source.eos_id]
    assert 300 not in pair(make_model(), name, name).request.target_ids
    assert refusal(prepare, model, name, special_tokens_in_text=False).endswith("max_source_tokens of model en-de is 4")


def test_fields_at_their_limits_reach_the_engine(model: Any) -> None:
    for priority in (-10, 0, 10):
        assert prepare(model, priority=priority).request.priority == priority
    assert prepare(model).request.max_new_tokens == 32 and prepare(model).request.search is GREEDY
    assert prepare(model, max_new_tokens=48).request.max_new_tokens == 48 and prepare(model, max_new_tokens=1).request
    prefix = model.tokenizers.target.encode("x" * 10)
    for fields, expected in (({}, 32), ({"max_new_tokens": 37}, 37)):
        request = prepare(model, forced_prefix="x" * 10, **fields).request
        assert (request.search.forced_prefix, request.max_new_tokens) == (prefix, expected)
    assert prepare(model, forced_prefix="x" * 46).request.max_new_tokens == 1
    model.manifest.max_target_tokens = 32
    assert prepare(model, forced_prefix="x" * 10).request.max_new_tokens == 21


def test_texts_may_be_as_long_as_can_be_divided_also_without_a_model() -> None:
    generation = Generation(cast(Any, SimpleNamespace(all=list)), cast(Any, Mock()), *[cast(Any, None)] * 2, max_text_characters=9)
    assert generation.max_characters() == 10


def test_deadlines_are_on_the_monotonic_clock_and_may_not_have_passed(model: Any) -> None:
    before = time.monotonic()
    deadline = prepare(model, remaining=100.0).request.deadline
    assert deadline is not None and before + 100 <= deadline <= time.monotonic() + 100 and prepare(model).request.deadline is None
    with pytest.raises(DeadlineExceeded):
        prepare(model, remaining=0.0)


def test_huge_texts_are_refused_before_they_are_tokenised(model: Any, translator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for side, fields, limit in (("text", {"text": HUGE}, 64), ("forced_prefix", {"forced_prefix": HUGE}, 48)):
        message = refusal(prepare, untokenised(model, monkeypatch), **fields)
        assert message.startswith(f"{side}: more than ") and message.endswith(f"_tokens of model en-de is {limit}")
    assert refusal(pair, model, "a", HUGE).startswith("target: more than ")
    for target, reason in (("xx", "'xx' is no language"), ("", "is missing")):
        message = refusal(prepare, untokenised(translator, monkeypatch), target_language=target, forced_prefix="a")
        assert message.startswith(f"target_language: {reason}")
    assert refusal(pair, translator, "a", "b", source_language="xx").startswith("source_language: 'xx' is no language")


@pytest.mark.parametrize("sentence", [TEXT, "日本語 のテキスト 🐕 "])
@pytest.mark.parametrize("languages", [None, LANGUAGES])
def test_a_huge_source_is_cut_as_if_it_had_been_tokenised_whole(make_model: Any, sentence: str, languages: Any) -> None:
    model = make_model(languages=languages, template=Template(task="übersetze: "))
    before, after = ([350, 340], [1, 341, 342]) if languages else ([], [1])
    ids = model.tokenizers.source.encode("übersetze: " + sentence * 2_000)
    prepared = prepare(model, sentence * 20_000, truncate=True, target_language="de" if languages else "")
    assert prepared.is_truncated
    assert prepared.request.source_ids == [*before, *ids[: 64 - len(before + after)], model.manifest.eos_id, *after[1:]]


def test_a_text_of_which_a_part_was_not_read_counts_as_cut(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tokenisers make one space of many."""
    model = make_model(max_source_tokens=30)
    encode = model.tokenizers.source.encode
    monkeypatch.setattr(model.tokenizers.source, "encode", lambda text: encode(" ".join(text.split())))
    assert not prepare(model, "Zwei   Männer", truncate=True).is_truncated
    prepared = prepare(model, "Zwei" + " " * 100_000 + "Männer", truncate=True)
    assert prepared.is_truncated and prepared.request.source_ids == [*encode("Zwei"), model.manifest.eos_id]


def test_request_ids_come_from_the_request_its_metadata_or_the_server_and_are_harmless_in_logs() -> None:
    theirs = (("x-request-id", "theirs"),)
    assert (choose_request_id("mine", theirs), choose_request_id("", theirs)) == ("mine", "theirs")
    assert choose_request_id("", (("x-request-id", b"bytes"),)) == "bytes"
    assert choose_request_id("", (("x-request-id", ""),)) != choose_request_id("", None)
    for value in ("a", "x" * 128, "A-1 b_~!"):
        assert choose_request_id(value, ()) == value
    for value, reason in (
        ("x" * 129, "129 characters; at most 128"),
        *((bad, "only printable ASCII") for bad in ("a\nb", "é", "\x1b[")),
    ):
        assert refusal(choose_request_id, value, ()).startswith(f"request_id: {reason}")
    assert refusal(choose_request_id, "", (("x-request-id", b"\xff"),)).startswith("x-request-id: ")
    assert len({new_incident() for _ in range(100)}) == 100


# Languages


def test_languages_frame_the_source_and_begin_the_answer(translator: Any) -> None:
    ids, eos = translator.tokenizers.source.encode(TEXT), translator.manifest.eos_id
    german = prepare(translator, target_language="de").request
    assert german.source_ids == [350, 340, *ids, eos, 341, 342]
    assert (german.search.forced_prefix, german.search.num_forced, german.decoder_start_id) == ([351, 352], 2, 23)
    french = prepare(translator, target_language="fr").request
    assert (french.source_ids, french.search.forced_prefix, french.decoder_start_id) == (german.source_ids[1:], [354], None)
    search = prepare(translator, target_language="de", forced_prefix="Zwei").request.search
    assert (search.forced_prefix, search.num_forced) == ([351, 352, *translator.tokenizers.target.encode("Zwei")], 2)
    translator.manifest.max_source_tokens = 5 + len(ids)
    assert not prepare(translator, target_language="de").is_truncated
    translator.manifest.max_source_tokens = 8
    cut = prepare(translator, truncate=True, target_language="de")
    assert cut.is_truncated and cut.request.source_ids == [350, 340, *ids[:3], eos, 341, 342]
    around = "end-of-sequence and what its languages put around a text"
    message = f"text: {len(ids) + 5} tokens, {around} included; max_source_tokens of model en-de is 8"
    assert refusal(prepare, translator, target_language="de") == message


def test_a_task_comes_before_the_text_and_does_not_fill_a_blank_one(make_model: Any) -> None:
    model = make_model(languages=LANGUAGES, template=Template(task="to {target}: "))
    ids = model.tokenizers.source.encode("to de: a")
    assert prepare(model, "a", target_language="de").request.source_ids[2 : 2 + len(ids)] == ids
    assert refusal(prepare, model, " ", target_language="de") == "text: is blank"


def test_forced_tokens_take_room_of_the_answer(translator: Any) -> None:
    def new_tokens(**fields: Any) -> int:
        return prepare(translator, target_language="de", **fields).request.max_new_tokens

    assert (new_tokens(), new_tokens(max_new_tokens=46)) == (32, 46)
    expected = f"max_new_tokens: 47 is not in 1 to 46, {GERMAN_ROOM}"
    assert refusal(new_tokens, max_new_tokens=47) == expected
    translator.manifest.max_target_tokens, num_prefix = 20, count(translator, "Zwei")
    assert (new_tokens(), new_tokens(forced_prefix="Zwei")) == (18, 18 - num_prefix)
    expected = f"forced_prefix: {num_prefix} tokens and max_new_tokens of 18 are more than 18, {GERMAN_ROOM}"
    assert refusal(new_tokens, forced_prefix="Zwei", max_new_tokens=18) == expected
    translator.manifest.max_target_tokens = num_prefix + 2
    expected = f"forced_prefix: {num_prefix} tokens leave none to generate; {GERMAN_ROOM} is {num_prefix}"
    assert refusal(new_tokens, forced_prefix="Zwei") == expected


# Scores


def scores(model: Any, text: str, target: str, weights: np.ndarray[Any, Any] | None = None, **fields: Any) -> Scores:
    """Return what is answered where the engine scores token i with -(i + 1) and counts weights from 0."""
    prepared = pair(model, text, target, target_language="de", **fields)
    num_target, num_source = len(prepared.request.target_ids), len(prepared.request.source_ids)
    found = np.arange(num_target * num_source, dtype=np.float32) if weights is None else weights
    told = Scored(1, "eos", [-1.0 - i for i in range(num_target)], found.tobytes() if prepared.request.is_aligned else b"", 1.0)
    request = ScoreRequest(text=text, target=target, target_language="de", **fields)

    async def answer() -> Scores:
        return to_scores(request, Call.begin("toy/a"), model, prepared.request, prepared.template, told)

    return asyncio.run(answer())


def test_a_target_is_scored_after_its_forced_tokens_which_count_in_the_length_alone(translator: Any) -> None:
    ids = [*translator.tokenizers.target.encode("Zwei"), translator.manifest.eos_id]
    request = pair(translator, "a", "Zwei", target_language="de").request
    assert (request.target_ids, request.decoder_start_id) == ([351, 352, *ids], 23)
    assert (request.source_ids[:2], request.source_ids[-2:]) == ([350, 340], [341, 342])
    found = scores(translator, "a", "Zwei", return_alignment=True)
    assert [(each.token, each.log_prob) for each in found.tokens] == [(token, -3.0 - i) for i, token in enumerate(ids)]
    assert found.log_prob == sum(-3.0 - i for i in range(len(ids)))
    assert found.score == pytest.approx(found.log_prob / (len(ids) + 2))
    num_source = len(request.source_ids)
    assert found.alignment is not None and found.alignment.weights.shape == (len(ids), num_source)
    assert found.alignment.weights[0].tolist() == [2 * num_source + i for i in range(num_source)]
    assert len(found.alignment.source_pieces) == num_source


def test_a_score_has_the_models_length_penalty_unless_the_request_has_one(make_model: Any) -> None:
    model = make_model(languages=LANGUAGES, defaults=Defaults(length_penalty=2.0))
    for fields, penalty in (({}, 2.0), *(({"length_penalty": value}, value) for value in (0.0, 0.5, 1.0, -10.0, 10.0))):
        found = scores(model, "a", "Zwei", **fields)
        assert found.score == pytest.approx(found.log_prob / (len(found.tokens) + 2) ** penalty, rel=1e-12)


@pytest.mark.parametrize("task", ["", "from {source} to {target}: ", "to:"])
def test_aligned_words_are_counted_in_the_callers_text(make_model: Any, task: str) -> None:
    """Attention that is all on one token links the word of that token."""
    model = make_model(languages=LANGUAGES, template=Template(task=task))
    request = pair(model, TEXT, "Schnee Hund", target_language="de", return_word_alignment=True).request
    pieces = [model.tokenizers.source.token_bytes(token) for token in request.source_ids]
    joined = b" " + (task.format(source="en", target="de") + TEXT).encode()
    assert b"".join(pieces) == joined, "what is put around stands for no text"
    place = next(i for i in range(len(pieces)) if len(b"".join(pieces[: i + 1])) > joined.index(b"spielen"))
    weights = np.full((len(request.target_ids), len(pieces)), 0.01, np.float32)
    weights[:, place] = 1
    weights[:, [0, 1, -1, -2]] = 5  # silent tokens attract attention, and are no words
    weights[:2] = 100 * np.eye(2, len(pieces))  # rows of what is forced
    assert scores(model, TEXT, "Schnee Hund", weights, return_word_alignment=True).word_alignment == "2-0 2-1"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": " \n"}, "text: is blank"),
        ({"text": "x" * 63}, "text: 65 tokens, end-of-sequence included; max_source_tokens of model en-de is 64"),
        ({"target": "x" * 47}, "target: 49 tokens, end-of-sequence included; max_target_tokens of model en-de is 48"),
        ({"length_penalty": 10.5}, "length_penalty: 10.5 is not in -10 to 10"),
        ({"length_penalty": float("nan")}, "length_penalty: nan is not in -10 to 10"),
        ({"alignment_layer": 4, "return_alignment": True}, "alignment_layer: 4 is not in 0 to 3, the layers of model en-de that"),
        ({"alignment_layer": 0}, "alignment_layer: goes with return_alignment or return_word_alignment only"),
    ],
    ids=str,
)
def test_fields_of_scores_outside_their_limits_are_named(model: Any, fields: dict[str, Any], message: str) -> None:
    assert refusal(pair, model, **{"text": "a", "target": "b"} | fields).startswith(message)


def test_the_longest_target_and_every_layer_are_accepted(model: Any, translator: Any) -> None:
    assert len(pair(model, "a", "x" * 46).request.target_ids) == 48
    assert pair(model, "a", "").request.target_ids == [model.manifest.eos_id]
    request = pair(model, "a", "b", return_word_alignment=True, alignment_layer=3, priority=-3).request
    assert (request.is_aligned, request.alignment_layer, request.priority) == (True, 3, -3)
    assert not pair(model, "a", "b").request.is_aligned
    model.manifest.attention_layers = 0
    for field, value in (("return_alignment", True), ("return_word_alignment", True), ("alignment_layer", 0)):
        message = f"{field}: model en-de has no attention between source and target to tell"
        assert refusal(pair, model, "a", "b", **{field: value}) == message
    translator.manifest.max_target_tokens = 8 + 3
    assert len(pair(translator, "a", "x" * 7, target_language="de").request.target_ids) == 11
    message = "target: 12 tokens, end-of-sequence and what answers begin with included; max_target_tokens of model en-de is 11"
    assert refusal(pair, translator, "a", "x" * 8, target_language="de") == message


# Prompts of language models


def tokens(num_tokens: int) -> str:
    """Return a text of so many tokens: a space and letters."""
    return "x" * (num_tokens - 1)


def fed(prepared: SimpleNamespace) -> list[int | None]:
    """Return the prompt: the source, and the token that is fed to the decoder."""
    return [*prepared.request.source_ids, prepared.request.decoder_start_id]


def test_a_prompt_is_all_but_its_last_token_which_the_decoder_is_fed(language_model: Any) -> None:
    start, encode = language_model.manifest.decoder_start_id, language_model.tokenizers.source.encode
    for text in (TEXT, "", " \n"):
        assert fed(prepare(language_model, text)) == [start, *(encode(text) if text else [])]
    for num_tokens, num_left in ((16, 32), (17, 31), (39, 9)):
        prepared = prepare(language_model, tokens(num_tokens))
        assert (len(prepared.request.source_ids), prepared.request.max_new_tokens) == (num_tokens, num_left)
        assert not prepared.is_truncated
    huge = "日本語 のテキスト 🐕 " * 20_000 + "end"
    prepared = prepare(language_model, huge, truncate=True, max_new_tokens=8)
    assert prepared.is_truncated and fed(prepared)[1:] == encode(huge)[-39:], "as if it had been tokenised whole"


@pytest.mark.parametrize(
    ("num_tokens", "fields", "message"),
    [
        (30, {"max_new_tokens": 19}, "max_new_tokens: 19 is more than 18, which a prompt of 31 tokens leave of 48, max_target"),
        (
            30,
            {"max_new_tokens": 15, "forced_prefix": " yyy"},
            "max_new_tokens: 15 is more than 14, which a prompt of 31 tokens",
        ),
        (39, {"forced_prefix": " " + "y" * 8}, "text: 40 tokens, the start token included and 9 that are forced, leave none"),
        (40, {}, "text: 41 tokens, the start token included; max_source_tokens of model en-de is 40"),
        (500_000, {}, "text: more than "),
    ],
)
def test_prompt_prefix_and_answer_share_one_room(language_model: Any, num_tokens: int, fields: Any, message: str) -> None:
    assert refusal(prepare, language_model, tokens(num_tokens), **fields).startswith(message)
    text = tokens(30)
    for fields in ({"max_new_tokens": 18}, {"max_new_tokens": 14, "forced_prefix": " yyy"}):
        plain, cut = (prepare(language_model, text, truncate=is_cut, **fields) for is_cut in (False, True))
        assert fed(plain) == fed(cut) and not cut.is_truncated
        assert len(plain.request.source_ids) + len(plain.request.search.forced_prefix) + plain.request.max_new_tokens == 48


@pytest.mark.parametrize(("asked", "num_kept"), [(None, 24), (20, 28), (1, 39), (47, 1), (48, 0)])
def test_the_end_of_a_cut_prompt_is_kept_and_room_for_the_answer(language_model: Any, asked: int | None, num_kept: int) -> None:
    """Where the request does not say how much may follow it is the default, 32, but at most half of the room."""
    text = "".join(chr(97 + i * 7 % 26) for i in range(60))
    ids = language_model.tokenizers.source.encode(text)
    prepared = prepare(language_model, text, truncate=True, max_new_tokens=asked)
    assert prepared.is_truncated and prepared.request.max_new_tokens == (asked or 24)
    assert fed(prepared) == [language_model.manifest.decoder_start_id, *ids[len(ids) - num_kept :]]


def test_prefixes_and_targets_continue_the_prompt(language_model: Any) -> None:
    """With a space a prefix is a word, without one the rest of a word; after nothing it is a text of its own."""
    tokenizer, eos = language_model.tokenizers.target, language_model.manifest.eos_id

    def forced(text: str, prefix: str) -> list[int]:
        return prepare(language_model, text, forced_prefix=prefix, max_new_tokens=1).request.search.forced_prefix

    for prefix in (" runs", "s", ", and", "\nMore", "."):
        assert b"".join(map(tokenizer.token_bytes, forced("A dog", prefix))) == prefix.encode()
        assert tokenizer.decode([*tokenizer.encode("A dog"), *forced("A dog", prefix)]) == "A dog" + prefix
    assert forced("", "A dog") == tokenizer.encode("A dog")
    whole = tokenizer.encode("A dog runs through the snow.")
    assert [*tokenizer.encode("A dog"), *forced("A dog", " runs through the snow.")] == whole
    prepared = pair(language_model, "A dog", " runs through the snow.")
    assert [*fed(prepared)[1:], *prepared.request.target_ids] == [*whole, eos]
    assert pair(language_model, "", "A dog").request.target_ids == [*tokenizer.encode("A dog"), eos]
    assert pair(language_model, tokens(39), "").request.target_ids == [eos]
    text = tokens(30)
    assert len(pair(language_model, text, "y" * 17).request.target_ids) == 18
    assert refusal(pair, language_model, text, "y" * 18) == (
        "target: 19 tokens, end-of-sequence included; a prompt of 31 leaves 18 of 48, max_target_tokens of model en-de"
    )
