"""Languages through the core, with a scripted engine: what the engine is given for a request, and what the caller is told of it."""

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.core.answer_size import TokenSizes
from dragoman.server.core.calls import Call
from dragoman.server.core.generation import Generation
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.scoring import PreparedPair, prepare_pair, to_scores
from dragoman.server.core.validation import Prepared, Validator
from dragoman.server.engine.messages import Scored
from dragoman.server.errors import InvalidRequest

ENGLISH = Language(code="en", source_prefix=[340], source_suffix=[341, 342])
GERMAN = Language(code="de", source_prefix=[350], target_prefix=[351, 352], decoder_start_id=23)
FRENCH = Language(code="fr", target_prefix=[354])
LANGUAGES = Languages(source=[ENGLISH], target=[GERMAN, FRENCH])
TEXT = "Zwei Männer spielen Fußball."


@pytest.fixture
def model(make_model: Callable[..., Any]) -> Any:
    return make_model(languages=LANGUAGES)


def prepare(model: Any, text: str = TEXT, target: str = "de", **fields: Any) -> Prepared:
    request = GenerateRequest(text=text, target_language=target, **fields)
    return asyncio.run(Validator().prepare(request, model, arrival=time.monotonic(), remaining_seconds=None, is_streamed=False))


def pair(model: Any, source: str, target: str, **fields: Any) -> tuple[ScoreRequest, PreparedPair]:
    request = ScoreRequest(text=source, target=target, target_language="de", **fields)
    prepared = asyncio.run(prepare_pair(request, model, Validator(), arrival=time.monotonic(), remaining_seconds=None))
    return request, prepared


def refusal(do: Callable[[], object]) -> str:
    with pytest.raises(InvalidRequest) as caught:
        do()
    return caught.value.message


def test_a_request_is_given_to_the_engine_as_its_languages_say(model: Any) -> None:
    ids = model.tokenizers.source.encode(TEXT)
    german = prepare(model)
    assert german.request.source_ids == [350, 340, *ids, model.manifest.eos_id, 341, 342]
    assert (german.request.search.forced_prefix, german.request.search.num_forced) == ([351, 352], 2)
    assert (german.request.decoder_start_id, german.is_truncated) == (23, False)
    french = prepare(model, target="fr").request
    assert french.source_ids == german.request.source_ids[1:]
    assert (french.search.forced_prefix, french.decoder_start_id) == ([354], None)


def test_the_callers_prefix_comes_after_the_languages_and_is_not_counted_with_it(model: Any) -> None:
    ids = model.tokenizers.target.encode("Zwei")
    search = prepare(model, forced_prefix="Zwei").request.search
    assert (search.forced_prefix, search.num_forced) == ([351, 352, *ids], 2)


def test_a_source_is_cut_between_what_is_around_it(model: Any) -> None:
    ids = model.tokenizers.source.encode(TEXT)
    model.manifest.max_source_tokens = 5 + len(ids)
    assert not prepare(model).is_truncated
    model.manifest.max_source_tokens = 5 + 3
    cut = prepare(model, truncate=True)
    assert cut.is_truncated and cut.request.source_ids == [350, 340, *ids[:3], model.manifest.eos_id, 341, 342]
    around = "end-of-sequence and what its languages put around a text"
    assert (
        refusal(lambda: prepare(model)) == f"text: {len(ids) + 5} tokens, {around} included; max_source_tokens of model en-de is 8"
    )


@pytest.mark.parametrize("sentence", ["Zwei Männer spielen Fußball. ", "日本語 のテキスト 🐕 ", "x"])
def test_a_huge_source_is_cut_as_if_it_had_been_tokenised_whole(make_model: Any, sentence: str) -> None:
    model = make_model(languages=LANGUAGES, template=Template(task="übersetze: "))
    ids = model.tokenizers.source.encode("übersetze: " + sentence * 2_000)
    cut = prepare(model, sentence * 20_000, truncate=True).request.source_ids
    assert cut == [350, 340, *ids[: 64 - 5], model.manifest.eos_id, 341, 342]


def test_a_task_is_put_before_the_text_and_is_not_what_makes_it_blank(make_model: Any) -> None:
    model = make_model(languages=LANGUAGES, template=Template(task="to {target}: "))
    ids = model.tokenizers.source.encode("to de: a")
    assert prepare(model, "a").request.source_ids[2 : 2 + len(ids)] == ids
    assert refusal(lambda: prepare(model, " ")) == "text: is blank"


def test_forced_tokens_take_room_of_the_answer_but_are_not_counted_as_generated(model: Any) -> None:
    assert prepare(model).request.max_new_tokens == 32
    assert prepare(model, max_new_tokens=46).request.max_new_tokens == 46
    room = "max_target_tokens of model en-de less the 2 that its answers begin with"
    assert refusal(lambda: prepare(model, max_new_tokens=47)) == f"max_new_tokens: 47 is not in 1 to 46, {room}"
    model.manifest.max_target_tokens = 20
    assert prepare(model).request.max_new_tokens == 18
    count = len(model.tokenizers.target.encode("Zwei"))
    assert prepare(model, forced_prefix="Zwei").request.max_new_tokens == 18 - count
    message = refusal(lambda: prepare(model, forced_prefix="Zwei", max_new_tokens=18))
    room = "max_target_tokens of model en-de less the 2 that its answers begin with"
    assert message == f"forced_prefix: {count} tokens and max_new_tokens of 18 are more than 18, {room}"
    model.manifest.max_target_tokens = count + 2
    message = refusal(lambda: prepare(model, forced_prefix="Zwei"))
    assert message == f"forced_prefix: {count} tokens leave none to generate; {room} is {count}"


def test_languages_are_looked_at_before_anything_is_tokenised(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.tokenizers.source, "encode", lambda _: pytest.fail("tokenised"))
    assert refusal(lambda: prepare(model, target="xx", forced_prefix="a")).startswith("target_language: 'xx' is no language")
    assert refusal(lambda: prepare(model, target="")).startswith("target_language: is missing")
    assert refusal(lambda: pair(model, "a", "b", source_language="xx")).startswith("source_language: 'xx' is no language")


def test_the_models_default_limit_and_search_are_the_requests(make_model: Any) -> None:
    model = make_model(languages=LANGUAGES, defaults=Defaults(num_beams=3, max_new_tokens=9, min_new_tokens=4))
    request = prepare(model).request
    assert (request.max_new_tokens, request.search.num_beams, request.search.min_new_tokens) == (9, 3, 4)
    small = prepare(model, max_new_tokens=2).request
    assert (small.max_new_tokens, small.search.num_beams, small.search.min_new_tokens) == (2, 3, 1)
    assert prepare(model).request.search is request.search, "made once"


def a_call() -> Call:
    async def begun() -> Call:
        return Call.begin("test")

    return asyncio.run(begun())


def scored(prepared: PreparedPair) -> Scored:
    """The engine's word on a pair: token i has -(i + 1), and weights of the alignment count from 0."""
    num_target, num_source = len(prepared.request.target_ids), len(prepared.request.source_ids)
    alignment = np.arange(num_target * num_source, dtype=np.float32).tobytes() if prepared.request.is_aligned else b""
    return Scored(1, "eos", [-1.0 - i for i in range(num_target)], alignment, 1.0)


def test_a_target_is_scored_after_what_is_forced_of_which_nothing_is_told(model: Any) -> None:
    request, prepared = pair(model, "a", "Zwei", return_alignment=True)
    ids = [*model.tokenizers.target.encode("Zwei"), model.manifest.eos_id]
    assert prepared.request.target_ids == [351, 352, *ids] and prepared.request.decoder_start_id == 23
    assert prepared.request.source_ids[:2] == [350, 340] and prepared.request.source_ids[-2:] == [341, 342]
    scores = to_scores(a_call(), model, request, prepared, scored(prepared))
    assert [told.token for told in scores.tokens] == ids
    assert [told.log_prob for told in scores.tokens] == [-3.0 - i for i in range(len(ids))]
    assert scores.log_prob == sum(-3.0 - i for i in range(len(ids)))
    assert scores.score == pytest.approx(scores.log_prob / (len(ids) + 2)), "they count in the length"
    num_source = len(prepared.request.source_ids)
    assert scores.alignment is not None and scores.alignment.weights.shape == (len(ids), num_source)
    assert scores.alignment.weights[0].tolist() == [2 * num_source + i for i in range(num_source)]
    assert len(scores.alignment.source_pieces) == num_source


def test_a_score_goes_by_the_models_length_penalty_unless_the_request_says(make_model: Any) -> None:
    model = make_model(languages=LANGUAGES, defaults=Defaults(length_penalty=2.0))
    for fields, penalty in (({}, 2.0), ({"length_penalty": 0.5}, 0.5)):
        request, prepared = pair(model, "a", "Zwei", **fields)
        scores = to_scores(a_call(), model, request, prepared, scored(prepared))
        assert scores.score == pytest.approx(scores.log_prob / (len(scores.tokens) + 2) ** penalty)


def test_the_longest_target_leaves_room_for_what_is_forced(model: Any) -> None:
    count = len(model.tokenizers.target.encode("Zwei Männer"))
    model.manifest.max_target_tokens = count + 3
    assert len(pair(model, "a", "Zwei Männer")[1].request.target_ids) == count + 3
    model.manifest.max_target_tokens = count + 2
    expected = f"target: {count + 3} tokens, end-of-sequence and what answers begin with included; max_target_tokens"
    assert refusal(lambda: pair(model, "a", "Zwei Männer")) == f"{expected} of model en-de is {count + 2}"


@pytest.mark.parametrize("task", ["", "from {source} to {target}: ", "{source} >> ", "to:", "\n\n"])
def test_words_are_those_of_the_text_whatever_is_around_it(make_model: Any, task: str) -> None:
    """Attention that is all on one token links the word of that token, by its place in the caller's own text."""
    model = make_model(languages=LANGUAGES, template=Template(task=task))
    text, target = "Zwei Männer spielen Fußball.", "Schnee Hund"
    request, prepared = pair(model, text, target, return_word_alignment=True)
    pieces = [model.tokenizers.source.token_bytes(token) for token in prepared.request.source_ids]
    joined = b" " + (task.format(source="en", target="de") + text).encode()
    assert b"".join(pieces) == joined, "what is put around stands for no text"
    place = next(i for i in range(len(pieces)) if len(b"".join(pieces[: i + 1])) > joined.index(b"spielen"))
    weights = np.full((len(prepared.request.target_ids), len(pieces)), 0.01, np.float32)
    weights[:, place] = 1
    weights[:, [0, 1, -1, -2]] = 5  # silent tokens attract attention, and are no words
    weights[:2] = 100 * np.eye(2, len(pieces))  # rows of what is forced
    told = Scored(1, "eos", [-1.0] * len(weights), weights.tobytes(), 1.0)
    assert to_scores(a_call(), model, request, prepared, told).word_alignment == "2-0 2-1"


def test_the_tokens_of_both_sides_are_measured_before_requests_come(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = make_model(), ByteTokenizer()
    model.tokenizers = Tokenizers(source=text, target=model.tokenizers.target)
    models: Any = SimpleNamespace(all=lambda: [model])
    generation = Generation(models, metrics=SimpleNamespace())  # type: ignore[arg-type]

    def measured(tokenizer: object) -> None:
        raise AssertionError("measured while requests wait")

    monkeypatch.setattr(TokenSizes, "measured", measured)
    assert generation.max_characters() > model.manifest.max_target_tokens
