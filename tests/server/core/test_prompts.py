"""Requests for a model with prompts: what is split, what fits, what is cut, and what goes on with what."""

import asyncio
import time
from typing import Any

import pytest

from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.scoring import PreparedPair, prepare_pair
from dragoman.server.core.validation import Prepared, Validator
from dragoman.server.errors import InvalidRequest

TEXT = "Zwei Männer spielen Fußball."


@pytest.fixture
def model(make_model: Any) -> Any:
    """A model of 48 positions, prompt and answer together, of which a prompt may have 40."""
    return make_model(has_prompts=True, architecture="decoder", attention_layers=0, max_source_tokens=40)


def prepare(model: Any, text: str = TEXT, **fields: Any) -> Prepared:
    request = GenerateRequest(text=text, **fields)
    return asyncio.run(Validator().prepare(request, model, arrival=time.monotonic(), remaining_seconds=None, is_streamed=False))


def pair(model: Any, text: str, target: str, **fields: Any) -> PreparedPair:
    request = ScoreRequest(text=text, target=target, **fields)
    return asyncio.run(prepare_pair(request, model, Validator(), arrival=time.monotonic(), remaining_seconds=None))


def refusal(model: Any, text: str = TEXT, **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prepare(model, text, **fields)
    return caught.value.message


def text_of(model: Any, num_tokens: int) -> str:
    """Return a text of so many tokens."""
    text = "x" * (num_tokens - 1)
    assert len(model.tokenizers.source.encode(text)) == num_tokens, "a space and the letters"
    return text


def test_a_prompt_is_all_but_its_last_token_and_that_is_what_the_decoder_is_fed(model: Any) -> None:
    request = prepare(model).request
    start, ids = model.manifest.decoder_start_id, model.tokenizers.source.encode(TEXT)
    assert [*request.source_ids, request.decoder_start_id] == [start, *ids]
    assert model.manifest.eos_id not in request.source_ids


def test_an_empty_prompt_is_the_start_token_alone(model: Any) -> None:
    request = prepare(model, "").request
    assert (request.source_ids, request.decoder_start_id) == ([], model.manifest.decoder_start_id)
    blank = prepare(model, " \n").request
    assert [*blank.source_ids, blank.decoder_start_id][1:] == model.tokenizers.source.encode(" \n")


@pytest.mark.parametrize(("num_tokens", "num_left"), [(10, 32), (16, 32), (17, 31), (39, 9)])
def test_the_default_is_what_the_prompt_leaves(model: Any, num_tokens: int, num_left: int) -> None:
    """The start token and the text's are one more than the source, of which the last one is fed to the decoder."""
    prepared = prepare(model, text_of(model, num_tokens))
    assert prepared.request.max_new_tokens == num_left and not prepared.is_truncated
    assert len(prepared.request.source_ids) == num_tokens


def test_prompt_prefix_and_answer_share_a_room(model: Any) -> None:
    text, prefix = text_of(model, 30), " " + "y" * 3
    request = prepare(model, text, max_new_tokens=18).request
    assert len(request.source_ids) + request.max_new_tokens == 48
    message = refusal(model, text, max_new_tokens=19)
    assert (
        message == "max_new_tokens: 19 is more than 18, which a prompt of 31 tokens leave of 48, max_target_tokens of model en-de"
    )
    request = prepare(model, text, max_new_tokens=14, forced_prefix=prefix).request
    assert len(request.search.forced_prefix) == 4
    message = refusal(model, text, max_new_tokens=15, forced_prefix=prefix)
    assert message.startswith("max_new_tokens: 15 is more than 14, which a prompt of 31 tokens and 4 that are forced leave of 48")
    message = refusal(model, text_of(model, 39), forced_prefix=" " + "y" * 8)
    assert message.startswith("text: 40 tokens, the start token included and 9 that are forced, leave none to generate")


def test_a_prompt_over_its_own_limit_is_refused_with_it(model: Any) -> None:
    assert refusal(model, text_of(model, 40)) == (
        "text: 41 tokens, the start token included; max_source_tokens of model en-de is 40"
    )
    assert refusal(model, "Schnee " * 100_000).startswith("text: more than ")


@pytest.mark.parametrize(("asked", "num_kept"), [(None, 24), (20, 28), (1, 39), (47, 1), (48, 0)])
def test_of_a_prompt_that_is_cut_the_end_is_kept_and_room_for_what_follows(model: Any, asked: int | None, num_kept: int) -> None:
    """Where the request does not say how much may follow it is the default, 32, but at most half of the room."""
    text = "".join(chr(97 + i * 7 % 26) for i in range(60))
    ids = model.tokenizers.source.encode(text)
    prepared = prepare(model, text, truncate=True, max_new_tokens=asked)
    request = prepared.request
    assert prepared.is_truncated and request.max_new_tokens == (asked or 24)
    assert [*request.source_ids, request.decoder_start_id] == [model.manifest.decoder_start_id, *ids[len(ids) - num_kept :]]


def test_truncate_cuts_only_what_would_be_refused(model: Any) -> None:
    for text, asked in ((text_of(model, 39), None), (text_of(model, 30), 18)):
        plain, cut = (prepare(model, text, truncate=is_cut, max_new_tokens=asked) for is_cut in (False, True))
        assert not cut.is_truncated
        assert (plain.request.source_ids, plain.request.max_new_tokens) == (cut.request.source_ids, cut.request.max_new_tokens)


def test_a_huge_prompt_is_cut_as_if_it_had_been_tokenised_whole(model: Any) -> None:
    text = "日本語 のテキスト 🐕 " * 20_000 + "end"
    prepared = prepare(model, text, truncate=True, max_new_tokens=8)
    whole = model.tokenizers.source.encode(text)
    assert prepared.is_truncated
    assert [*prepared.request.source_ids, prepared.request.decoder_start_id][1:] == whole[-39:]


def test_a_prefix_goes_on_with_the_prompt(model: Any) -> None:
    """With a space it is a word, without one the rest of a word; after nothing it is a text of its own."""
    tokenizer = model.tokenizers.target
    for prefix in (" runs", "s", ", and", "\nMore", "."):
        forced = prepare(model, "A dog", forced_prefix=prefix, max_new_tokens=1).request.search.forced_prefix
        assert b"".join(map(tokenizer.token_bytes, forced)) == prefix.encode()
        assert tokenizer.decode([*tokenizer.encode("A dog"), *forced]) == "A dog" + prefix
    assert prepare(model, "", forced_prefix="A dog").request.search.forced_prefix == tokenizer.encode("A dog")
    words = prepare(model, "A dog", forced_prefix=" runs through the snow.", max_new_tokens=1).request.search.forced_prefix
    assert [*tokenizer.encode("A dog"), *words] == tokenizer.encode("A dog runs through the snow."), "as in the middle of a text"


def test_a_target_goes_on_with_the_prompt_and_ends_the_text(model: Any) -> None:
    tokenizer, eos = model.tokenizers.target, model.manifest.eos_id
    prepared = pair(model, "A dog", " runs through the snow.")
    request = prepared.request
    whole = [model.manifest.decoder_start_id, *tokenizer.encode("A dog runs through the snow."), eos]
    assert [*request.source_ids, request.decoder_start_id, *request.target_ids] == whole
    assert pair(model, "", "A dog").request.target_ids == [*tokenizer.encode("A dog"), eos]
    assert pair(model, text_of(model, 39), "").request.target_ids == [eos]


def test_a_target_has_the_room_that_the_prompt_leaves(model: Any) -> None:
    text = text_of(model, 30)
    assert len(pair(model, text, "y" * 17).request.target_ids) == 18
    with pytest.raises(InvalidRequest) as caught:
        pair(model, text, "y" * 18)
    assert caught.value.message == (
        "target: 19 tokens, end-of-sequence included; a prompt of 31 leaves 18 of 48, max_target_tokens of model en-de"
    )


@pytest.mark.parametrize("field", ["return_alignment", "return_word_alignment", "alignment_layer"])
def test_an_alignment_is_refused_by_name_where_nothing_attends_to_a_source(model: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pair(model, "A dog", " runs", **{field: 0 if field == "alignment_layer" else True})
    assert caught.value.message == f"{field}: model en-de has no attention between source and target to tell"


def test_layers_of_an_alignment_are_those_that_attend_to_a_source(make_model: Any) -> None:
    model = make_model(attention_layers=1)
    assert pair(model, "a", "b", return_alignment=True, alignment_layer=0).request.alignment_layer == 0
    with pytest.raises(InvalidRequest, match="1 is not in 0 to 0"):
        pair(model, "a", "b", return_alignment=True, alignment_layer=1)
