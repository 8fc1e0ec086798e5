"""Sizes of answers, reckoned before any work; conversion of every field of the contract; errors as statuses."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from dragoman.export.proof.report import Parity
from dragoman.model.generation import Defaults, Language, Languages
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest, QueueFull, Unavailable
from dragoman.server.protocols.grpc import interceptors as errors
from dragoman.server.protocols.v1.descriptions import Descriptions
from dragoman.server.protocols.v1.messages import (
    ENVELOPE_BYTES,
    MAX_MESSAGE_BYTES,
    MessageLimit,
    to_generate_request,
    to_message,
    to_score_request,
    to_score_response,
    write_response,
)
from dragoman.server.service import requests
from dragoman.server.service.answers import (
    Answer,
    AnswerShape,
    Generated,
    LogProbs,
    Timings,
    TokenLogProb,
    TokenSizes,
    check_answer,
    check_scores,
)
from dragoman.server.service.score import Alignment, Scores
from dragoman.v1 import generation_pb2
from dragoman.v1.generation_pb2 import Error, GenerateRequest, GenerateResponse, ScoreRequest
from tests.server.scripted import LoadedModels

VOCABULARY = 330
TIMES = Timings(1e300, 1e300, 1e300, 1e300, 1e300)
LARGEST = 2**31 - 1


def generated(tokenizer: ByteLevelTokenizer, answers: list[list[int]], num_top: int, has_log_probs: bool = True) -> Generated:
    """Make an answer of these tokens; the likeliest ones at each position are those with the longest texts."""
    longest = sorted(range(VOCABULARY), key=lambda i: (len(tokenizer.token_bytes(i)), i), reverse=True)[:num_top]
    search = messages.SearchOptions(num_top_log_probs=num_top)

    def answer(ids: list[int]) -> Answer:
        told = messages.Answer(ids, [-1.5] * len(ids), -2.5, "length", [longest] * len(ids), [[-3.5] * num_top] * len(ids))
        return Answer(tokenizer.decode(ids), ids, "length", -2.5, LogProbs(tokenizer, 1, search, told) if has_log_probs else ())

    name = "n" * 128
    return Generated(name, name, name, [answer(ids) for ids in answers], True, 2**31, 2**31, TIMES, 2**64 - 1)


def written(answer: Generated) -> GenerateResponse:
    response = GenerateResponse()
    asyncio.run(write_response(answer, LARGEST, response))
    return response


def bound(tokenizer: ByteLevelTokenizer, num_answers: int, num_tokens: int, num_top: int, has_log_probs: bool = True) -> int:
    """Return the smallest limit that lets such a request through."""
    sizes, search = TokenSizes.measured(tokenizer), messages.SearchOptions(num_answers=num_answers, num_top_log_probs=num_top)

    def check(limit: int) -> None:
        check_answer(search, num_tokens, has_log_probs, sizes, VOCABULARY, MessageLimit(limit))

    with pytest.raises(InvalidRequest) as caught:
        check(1)
    size = int(caught.value.message.partition("may take ")[2].partition(" bytes")[0])
    check(size)
    with pytest.raises(InvalidRequest):
        check(size - 1)
    return size


@pytest.mark.parametrize(("num_top", "has_log_probs"), [(0, False), (0, True), (1, True), (7, True), (20, True)])
def test_no_answer_is_larger_than_was_reckoned(tokenizer: ByteLevelTokenizer, num_top: int, has_log_probs: bool) -> None:
    draw, heaviest = random.Random(num_top), max(range(VOCABULARY), key=lambda i: len(tokenizer.token_bytes(i)))
    for num_answers, num_tokens in ((1, 1), (1, 40), (3, 17), (8, 48)):
        most = bound(tokenizer, num_answers, num_tokens, num_top, has_log_probs)
        broken = [draw.choice(range(3, 259)) for _ in range(num_tokens)]  # bytes, most of which are no text by themselves
        for ids in ([heaviest] * num_tokens, broken, [VOCABULARY - 1] * num_tokens):
            assert written(generated(tokenizer, [ids] * num_answers, num_top, has_log_probs)).ByteSize() <= most
    # A request that is sure to fit is not refused: beyond the heaviest answer are names, times, and numbers of one byte.
    heaviest = max(range(128, VOCABULARY), key=lambda i: len(tokenizer.token_bytes(i)))
    size = written(generated(tokenizer, [[heaviest] * 48] * 8, num_top, has_log_probs)).ByteSize()
    assert size <= bound(tokenizer, 8, 48, num_top, has_log_probs)
    assert num_top < 20 or bound(tokenizer, 8, 48, num_top) <= 1.05 * size + ENVELOPE_BYTES


def test_no_scores_are_larger_than_was_reckoned(tokenizer: ByteLevelTokenizer) -> None:
    for num_source, num_target in ((1, 1), (64, 48), (200, 300)):
        source, target = [VOCABULARY - 1] * num_source, [VOCABULARY - 2] * num_target
        pair, tokenizers = messages.ScoreRequest(1, source, target, 0.0, is_aligned=True), Tokenizers.shared(tokenizer)
        told = [TokenLogProb(i, tokenizer.token_bytes(i), -1.5) for i in target]
        alignment = Alignment(np.ones((num_target, num_source), np.float32), [tokenizer.token_bytes(i) for i in source])
        links = " ".join(f"{num_source}-{i}" for i in range(num_target))
        scores = Scores("r" * 128, "m" * 128, "v" * 128, -1.5, -1.5, told, num_source, alignment, links)
        size = asyncio.run(to_score_response(scores, LARGEST)).ByteSize()
        check_scores(pair, tokenizers, VOCABULARY, MessageLimit(round(1.05 * size) + 2 * ENVELOPE_BYTES + 14 * num_target))
        with pytest.raises(InvalidRequest, match=r"^return_alignment: the scores of .*; max_message_bytes of the server is"):
            check_scores(pair, tokenizers, VOCABULARY, MessageLimit(size - 1))


def test_sizes_of_tokens_and_numbers_are_those_on_the_wire(tokenizer: ByteLevelTokenizer) -> None:
    for seed, num_shortlisted in ((None, 0), (0, 100)):
        answer = Generated("r", "m", "v", [Answer("a", [1], "eos", -1.0)], False, 1, 2, TIMES, seed, num_shortlisted)
        assert (written(answer).HasField("seed"), written(answer).shortlist_tokens) == (seed is not None, num_shortlisted)
    lengths = sorted((len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size)), reverse=True)
    sizes = TokenSizes.measured(tokenizer)
    assert [sizes.longest_together(count) for count in range(21)] == [sum(lengths[:count]) for count in range(21)]
    for count in (64, 100, tokenizer.vocab_size):
        assert sizes.longest_together(count) >= sum(lengths[:count])
    for number in (0, 1, 127, 128, 16_383, 16_384, 2**21 - 1, 2**21):
        exact = GenerateResponse(tokens=[number]).ByteSize() - 2
        sizes_of = [MessageLimit(1).answer_bytes(AnswerShape(1, 1, 0, each)) for each in (0, number)]
        assert sizes_of[1] - sizes_of[0] == 2 * (exact - 1)


async def test_large_answers_are_written_in_slices(tokenizer: ByteLevelTokenizer) -> None:
    turns = 0

    async def neighbour() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(neighbour())
    await write_response(generated(tokenizer, [[300] * 48] * 64, 20), LARGEST, GenerateResponse())
    assert turns >= 64 * 48 * 21 // 4096
    turns = 0
    alignment = Alignment(np.ones((1024, 1024), np.float32), [b""] * 1024)
    await to_score_response(Scores("", "", "", 0.0, 0.0, [], 1, alignment, ""), LARGEST)
    assert turns >= 8
    task.cancel()


# Conversion


@pytest.mark.parametrize(
    ("message", "request_type", "convert"),
    [
        (GenerateRequest, requests.GenerateRequest, to_generate_request),
        (ScoreRequest, requests.ScoreRequest, to_score_request),
    ],
)
def test_every_field_of_the_contract_reaches_the_core(message: Any, request_type: Any, convert: Any) -> None:
    """Absent is absent, and zero is zero."""
    fields = message.DESCRIPTOR.fields
    made = ("indexes", "tag_rules")  # by adapters
    names = [field.name for field in msgspec.structs.fields(request_type) if field.name not in made]
    assert names == [field.name for field in fields]
    assert convert(message()) == request_type()
    for field in fields:
        value = {field.CPPTYPE_STRING: "s", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 2)
        value = (3, 1) if field.name == "suppressed_tokens" else value
        sent: Any = value
        if field.name == "terms":
            sent, value = [{"source": "a", "targets": ["b"], "case_sensitive": True}], (requests.Term("a", ("b",), True),)
        assert convert(message(**{field.name: sent})) == request_type(**{field.name: value}), field.name
        assert (getattr(request_type(), field.name) is None) is field.has_presence, field.name
        if field.has_presence:
            assert getattr(convert(message(**{field.name: 0})), field.name) == 0


@pytest.mark.parametrize(("name", "limit"), [("suppressed_tokens", "tokens; at most 256"), ("terms", "terms; at most 1000")])
def test_lists_are_counted_before_they_are_converted(name: str, limit: str) -> None:
    class Endless(list[int]):
        def __len__(self) -> int:
            return 4_100_000

        def __iter__(self) -> Any:
            raise AssertionError("looked at")

    message: Any = SimpleNamespace(ListFields=lambda: [(SimpleNamespace(name=name), Endless())])
    with pytest.raises(InvalidRequest, match=f"^{name}: 4100000 {limit} are allowed$"):
        to_generate_request(message)


def test_models_are_described_with_defaults_and_limits(make_model: Any) -> None:
    """Hundreds of languages take a millisecond, so they are written once; a description that no message holds is refused."""
    german, defaults = (
        Language(code="deu_Latn", names=["de"]),
        Defaults(num_beams=4, early_stopping=False, max_new_tokens=9, top_k=0),
    )
    bits = {"precision": "int8", "weight_bits": 7, "cache_precision": "int8", "num_choices": 100}
    languages = Languages(source=[german], target=[german])
    model, plain = make_model(languages=languages, defaults=defaults, **bits), make_model("plain", parity=Parity(*[0.0] * 9))
    descriptions = Descriptions(LoadedModels(model, plain), 2**20)
    told = descriptions.of(model)
    assert told.defaults == generation_pb2.Defaults(num_beams=4, early_stopping=False, max_new_tokens=9, top_k=0)
    assert told.defaults.HasField("early_stopping") and not told.defaults.HasField("do_sample")
    assert (told.shortlist_tokens, told.default_max_new_tokens, told.weight_bits, told.cache_precision) == (100, 9, 7, "int8")
    assert (told.num_engines, told.num_threads, told.num_lone_threads) == (3, 1, 4)
    assert {field.name for field in generation_pb2.Defaults.DESCRIPTOR.fields} == set(Defaults.__struct_fields__)
    model.templates.source_languages, model.engine.is_ready = None, False
    second, (third, other) = descriptions.of(model), descriptions.of_all([model, plain]).models
    assert second == third and not second.is_ready and second.source_languages and not other.source_languages
    assert (other.weight_bits, other.cache_precision, other.shortlist_tokens, other.is_ready) == (0, "fp32", 0, True)
    for describe in (lambda small: small.of(plain), lambda small: small.of_all([plain])):
        with pytest.raises(InvalidRequest, match="max_message_bytes of the server is 10"):
            describe(Descriptions(LoadedModels(plain), 10))


# Errors


def test_an_error_is_a_status_of_google_with_its_hint_in_plain_seconds_too() -> None:
    error = to_message(QueueFull("full", retry_after_seconds=0.0125), "r-1")
    status = Status.FromString(error.SerializeToString())
    assert (status.code, status.message) == (8, "full") == (error.code, error.message)
    retry, request = RetryInfo(), RequestInfo()
    assert status.details[0].Unpack(retry) and status.details[1].Unpack(request)
    assert (retry.retry_delay.ToMilliseconds(), request.request_id, error.retry_after_seconds) == (13, "r-1", 0.013)
    assert Error.FromString(status.SerializeToString()) == error, "a proxy that reads a Status keeps the rest"
    for seconds, milliseconds in ((0.0, 1), (0.07, 70), (0.0701, 71), (61.0, 61_000)):
        assert (
            to_message(QueueFull("full", seconds)).details[0].Unpack(retry) and retry.retry_delay.ToMilliseconds() == milliseconds
        )
    trailing = errors.to_status(Unavailable("down", retry_after_seconds=2.5)).trailing_metadata
    assert Error.FromString(trailing[0][1]).retry_after_seconds == 2.5
    plain = to_message(Unavailable("down"))
    assert not plain.details and not plain.HasField("retry_after_seconds")


@pytest.mark.parametrize("character", ["a", "é", "語", "🐕"])
def test_long_messages_are_shortened_to_what_headers_carry(character: str) -> None:
    message = "x" + character * 5000
    kept = errors.to_status(InvalidRequest("text", message)).details.removesuffix("...")
    assert f"text: {message}".startswith(kept) and MAX_MESSAGE_BYTES - 4 < len(kept.encode()) <= MAX_MESSAGE_BYTES
    assert errors.to_status(Unavailable("mod\udcff é: cannot be read")).details == r"mod\udcff é: cannot be read"
