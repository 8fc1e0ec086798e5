import asyncio
import time
from typing import Any

import pytest

from dragoman.server.core import validation
from dragoman.server.core.ids import check_request_id
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.core.validation import Validator
from dragoman.server.engine import messages
from dragoman.server.errors import DeadlineExceeded, InvalidRequest


def prepare(request: GenerateRequest, model: Any, remaining_seconds: float | None = None) -> validation.Prepared:
    return asyncio.run(
        Validator().prepare(request, model, arrival=time.monotonic(), remaining_seconds=remaining_seconds, is_streamed=False)
    )


def refusal(request: GenerateRequest, model: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        prepare(request, model)
    return caught.value.message


@pytest.mark.parametrize("text", ["", " ", "\n\t \u3000\u00a0"])
def test_blank_text_is_refused(make_model: Any, text: str) -> None:
    assert refusal(GenerateRequest(text=text), make_model()) == "text: is blank"


@pytest.mark.parametrize("text", [".", "</s>", "\u200b", "\x00", "a\u0301", "\U0010ffff"])
def test_odd_text_is_served(make_model: Any, text: str) -> None:
    model = make_model()
    ids = prepare(GenerateRequest(text=text), model).request.source_ids
    assert ids[-1] == model.tokenizers.target.eos_id
    assert ids.count(model.tokenizers.target.eos_id) == 1
    assert model.tokenizers.target.decode(ids) == text


@pytest.mark.parametrize("field", ["text", "forced_prefix"])
@pytest.mark.parametrize("length", [1, validation.MAX_INLINE_CHARACTERS])
def test_half_a_surrogate_pair_is_refused(make_model: Any, field: str, length: int) -> None:
    """JSON can say it, UTF-8 cannot."""
    model = make_model(max_source_tokens=10_000, max_target_tokens=10_000)
    request = GenerateRequest(**{"text": "a", field: "é" * length + "\ud83d"})  # type: ignore[arg-type]
    assert refusal(request, model) == f"{field}: character {length + 1} is half a surrogate pair"


def test_longest_source_fits_and_one_token_more_does_not(make_model: Any) -> None:
    model = make_model()
    text = "A dog runs through the snow."
    count = len(model.tokenizers.source.encode(text)) + 1
    model.manifest.max_source_tokens = count
    fitting = prepare(GenerateRequest(text=text, truncate=True), model)
    assert len(fitting.request.source_ids) == count
    assert not fitting.is_truncated
    model.manifest.max_source_tokens = count - 1
    message = refusal(GenerateRequest(text=text), model)
    assert message == f"text: {count} tokens, end-of-sequence included; max_source_tokens of model en-de is {count - 1}"


def test_truncation_keeps_the_first_tokens_and_says_so(make_model: Any) -> None:
    model = make_model(max_source_tokens=5)
    text = "Zwei Männer spielen Fußball."
    prepared = prepare(GenerateRequest(text=text, truncate=True), model)
    assert prepared.is_truncated
    assert prepared.request.source_ids == [*model.tokenizers.source.encode(text)[:4], model.tokenizers.target.eos_id]


def test_huge_text_is_refused_without_tokenising_it(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(max_source_tokens=10)
    monkeypatch.setattr(model.tokenizers.source, "encode", lambda text: pytest.fail("tokenised"))
    message = refusal(GenerateRequest(text="Schnee " * 100_000), model)
    assert message.startswith("text: more than ")
    assert message.endswith("max_source_tokens of model en-de is 10")


def test_text_that_long_tokens_just_fit_is_not_refused_unread(make_model: Any) -> None:
    model = make_model(max_source_tokens=10)
    longest = max(range(model.tokenizers.target.vocab_size), key=lambda i: len(model.tokenizers.target.token_bytes(i)))
    text = (model.tokenizers.target.token_bytes(longest) * 9).decode()
    assert len(prepare(GenerateRequest(text=text, truncate=True), model).request.source_ids) <= 10


@pytest.mark.parametrize("sentence", ["Zwei Männer spielen Fußball. ", "日本語 のテキスト 🐕 ", "x"])
def test_huge_text_is_cut_as_if_it_had_been_tokenised_whole(make_model: Any, sentence: str) -> None:
    model = make_model(max_source_tokens=30)
    text = sentence * 20_000
    prepared = prepare(GenerateRequest(text=text, truncate=True), model)
    assert prepared.is_truncated
    assert prepared.request.source_ids == [*model.tokenizers.source.encode(text)[:29], model.tokenizers.target.eos_id]


def test_a_text_of_which_a_part_was_not_read_is_cut_however_few_tokens_it_has(
    make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenisers make one space of many."""
    model = make_model(max_source_tokens=30)
    encode = model.tokenizers.source.encode
    monkeypatch.setattr(model.tokenizers.source, "encode", lambda text: encode(" ".join(text.split())))
    assert not prepare(GenerateRequest(text="Zwei   Männer", truncate=True), model).is_truncated
    prepared = prepare(GenerateRequest(text="Zwei" + " " * 100_000 + "Männer", truncate=True), model)
    assert prepared.is_truncated and prepared.request.source_ids == [*encode("Zwei"), model.manifest.eos_id]


def test_long_text_is_tokenised_on_a_thread_and_short_text_inline(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(max_source_tokens=100_000)
    threads: list[Any] = []

    async def to_thread(function: Any, *arguments: Any) -> Any:
        threads.append(function)
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    prepare(GenerateRequest(text="a " * (validation.MAX_INLINE_CHARACTERS // 2)), model)
    assert threads == []
    prepare(GenerateRequest(text="a " * validation.MAX_INLINE_CHARACTERS), model)
    assert threads == [model.tokenizers.source.encode]


def test_number_of_new_tokens_is_the_models_default_unless_given(make_model: Any) -> None:
    assert prepare(GenerateRequest(text="a"), make_model()).request.max_new_tokens == 32
    assert prepare(GenerateRequest(text="a", max_new_tokens=48), make_model()).request.max_new_tokens == 48


@pytest.mark.parametrize("count", [0, 49, 2**32 - 1])
def test_impossible_number_of_new_tokens_is_refused(make_model: Any, count: int) -> None:
    message = refusal(GenerateRequest(text="a", max_new_tokens=count), make_model())
    assert message == f"max_new_tokens: {count} is not in 1 to 48, max_target_tokens of model en-de"


def test_prefix_is_tokenised_as_a_target_and_shortens_the_default(make_model: Any) -> None:
    model = make_model()
    ids = model.tokenizers.source.encode("Zwei Männer spielen")
    assert len(ids) < 16
    request = prepare(GenerateRequest(text="a", forced_prefix="Zwei Männer spielen"), model).request
    assert (request.search.forced_prefix, request.max_new_tokens) == (ids, 32)
    model.manifest.max_target_tokens = 32
    request = prepare(GenerateRequest(text="a", forced_prefix="Zwei Männer spielen"), model).request
    assert request.max_new_tokens == 32 - len(ids)


def test_prefix_and_new_tokens_must_fit_together(make_model: Any) -> None:
    model = make_model()
    count = len(model.tokenizers.source.encode("Zwei Männer"))
    fitting = GenerateRequest(text="a", forced_prefix="Zwei Männer", max_new_tokens=48 - count)
    assert prepare(fitting, model).request.max_new_tokens == 48 - count
    message = refusal(GenerateRequest(text="a", forced_prefix="Zwei Männer", max_new_tokens=49 - count), model)
    both = f"{count} tokens and max_new_tokens of {49 - count}"
    assert message == f"forced_prefix: {both} are more than 48, max_target_tokens of model en-de"


def test_prefix_must_leave_a_token_to_generate(make_model: Any) -> None:
    model = make_model()
    count = len(model.tokenizers.source.encode("Zwei Männer"))
    model.manifest.max_target_tokens = count + 1
    assert prepare(GenerateRequest(text="a", forced_prefix="Zwei Männer"), model).request.max_new_tokens == 1
    model.manifest.max_target_tokens = count
    message = refusal(GenerateRequest(text="a", forced_prefix="Zwei Männer"), model)
    assert message.startswith(f"forced_prefix: {count} tokens leave none to generate; max_target_tokens of model en-de is {count}")


def test_huge_prefix_is_refused_without_tokenising_it(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(model.tokenizers.source, "encode", lambda text: pytest.fail("tokenised"))
    message = refusal(GenerateRequest(text="a", forced_prefix="Schnee " * 100_000), model)
    assert message.startswith("forced_prefix: more than ")
    assert message.endswith("max_target_tokens of model en-de is 48")


def test_least_number_of_new_tokens_is_compared_with_what_a_prefix_leaves(make_model: Any) -> None:
    model = make_model(max_target_tokens=32)
    count = len(model.tokenizers.source.encode("Zwei Männer"))
    message = refusal(GenerateRequest(text="a", forced_prefix="Zwei Männer", min_new_tokens=32 - count), model)
    assert message == f"min_new_tokens: {32 - count} is not less than max_new_tokens, which is {32 - count}"


@pytest.mark.parametrize("priority", [-10, 0, 10])
def test_priority_reaches_the_engine(make_model: Any, priority: int) -> None:
    assert prepare(GenerateRequest(text="a", priority=priority), make_model()).request.priority == priority


@pytest.mark.parametrize("priority", [-11, 11, 2**31 - 1])
def test_priority_out_of_range_is_refused(make_model: Any, priority: int) -> None:
    assert refusal(GenerateRequest(text="a", priority=priority), make_model()) == f"priority: {priority} is not in -10 to 10"


@pytest.mark.parametrize(("fields", "expected"), [({}, False), ({"return_log_probs": True}, True), ({"top_log_probs": 1}, True)])
def test_log_probabilities_are_told_when_asked_for(make_model: Any, fields: Any, expected: bool) -> None:
    assert prepare(GenerateRequest(text="a", **fields), make_model()).has_log_probs is expected


def test_plain_request_carries_the_shared_greedy_options(make_model: Any) -> None:
    assert prepare(GenerateRequest(text="a", max_new_tokens=3), make_model()).request.search is messages.GREEDY


def test_deadline_is_on_the_monotonic_clock(make_model: Any) -> None:
    before = time.monotonic()
    request = prepare(GenerateRequest(text="a"), make_model(), remaining_seconds=100.0).request
    assert request.deadline is not None
    assert before + 100 <= request.deadline <= time.monotonic() + 100


def test_passed_deadline_is_refused(make_model: Any) -> None:
    with pytest.raises(DeadlineExceeded):
        prepare(GenerateRequest(text="a"), make_model(), remaining_seconds=0.0)


def test_longest_token_is_looked_up_once_a_tokeniser(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    calls: list[int] = []
    original = model.tokenizers.target.token_bytes
    monkeypatch.setattr(model.tokenizers.source, "token_bytes", lambda i: calls.append(i) or original(i))
    validator = Validator()

    async def twice() -> None:
        for _ in range(2):
            await validator.prepare(GenerateRequest(text="a"), model, arrival=0.0, remaining_seconds=None, is_streamed=False)

    asyncio.run(twice())
    assert len(calls) == model.tokenizers.target.vocab_size


@pytest.mark.parametrize("value", ["a", "x" * 128, "A-1 b_~!"])
def test_printable_ids_are_kept(value: str) -> None:
    assert check_request_id("request_id", value) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("x" * 129, "129 characters; at most 128"),
        ("a\nb", "printable ASCII"),
        ("é", "printable ASCII"),
        ("\x1b[2J", "printable ASCII"),
    ],
)
def test_harmful_ids_are_refused(value: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"request_id: .*{reason}"):
        check_request_id("request_id", value)
