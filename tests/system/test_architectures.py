"""Models of all architectures in one server: each answers as eager PyTorch does, and to the bit as if it were alone."""

import asyncio
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import InvalidArgument
from dragoman.client.sync import Client
from tests.shelf import Shelf
from tests.system.harness.models import ARCHITECTURES, TRAINING_TEXTS, make_architectures
from tests.system.harness.oracle import ROUNDING, Oracle, agree
from tests.system.harness.protocol import ProtocolClient, Query
from tests.system.harness.protocols import PROTOCOLS
from tests.system.harness.server import Server, serving

pytestmark = pytest.mark.e2e

EACH = pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "tied"])
NUM_NEW = 12
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6},
    "samples": {"do_sample": True, "seed": 7, "num_return_sequences": 3, "top_p": 0.9},
    "alternatives": {"return_alternatives": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "prefix": {"forced_prefix": " the dog"},
}


@pytest.fixture(scope="module")
def folder(shelf: Shelf) -> Path:
    return shelf.get("architectures", make_architectures)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Callable[[str], Oracle]:
    return cache(lambda name: Oracle(folder / "checkpoints" / name))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder / "bundles", "--max-slots", "24") as running:
        yield running


def texts_of(name: str) -> list[str]:
    draws = random.Random(5)
    words = TRAINING_TEXTS[0].split()
    texts = [*TRAINING_TEXTS, "x", " ".join(draws.choices(words, k=9))]
    return texts if name != "language" else ["", *texts, " ".join(draws.choices(words, k=120))]


@EACH
def test_answers_are_pytorchs(client: Client, oracle: Callable[[str], Oracle], name: str) -> None:
    texts, options = texts_of(name), {"model": name, "max_new_tokens": NUM_NEW, "return_log_probs": True}
    for text, expected in zip(texts, oracle(name).greedy(texts, NUM_NEW), strict=True):
        agree(client.generate(text, num_beams=1, **options).answers[0], expected)
    for text, hypotheses in zip(texts, oracle(name).beams(texts, 4, NUM_NEW, 0.6), strict=True):
        found = client.generate(text, **options, **SEARCHES["beams"]).answers
        for answer, expected in zip(found, hypotheses, strict=True):
            agree(answer, expected)
            assert answer.score == pytest.approx(expected.score, abs=ROUNDING)


def test_of_equally_likely_tokens_the_lower_id_wins(client: Client, oracle: Callable[[str], Oracle]) -> None:
    """In this model every token of an even id has a twin, whose logit is the same to the bit."""
    texts, options = texts_of("tied"), {"model": "tied", "max_new_tokens": NUM_NEW}
    for text, expected in zip(texts, oracle("tied").greedy(texts, NUM_NEW), strict=True):
        assert list(client.generate(text, **options).tokens) == expected.ids
        found = client.generate(text, **options, num_beams=4, num_return_sequences=4).answers
        assert [[token % 2 for token in answer.tokens] for answer in found] == [
            [0] * (NUM_NEW - 2) + last for last in ([0, 0], [0, 1], [1, 0], [1, 1])
        ]
        assert len({answer.score for answer in found}) == 1
        for rule in ({"repetition_penalty": 1.7}, {"no_repeat_ngram_size": 1}):
            tokens = client.generate(text, **options, **rule).tokens
            for place, token in enumerate(tokens):  # twins are as likely as each other before either and after both
                assert token % 2 == 0 or (token - 1 in tokens[:place] and token not in tokens[:place])


@EACH
def test_an_answer_goes_on_with_a_prefix_as_in_pytorch(client: Client, oracle: Callable[[str], Oracle], name: str) -> None:
    text = "a dog runs"
    result = client.generate(text, model=name, max_new_tokens=NUM_NEW, forced_prefix=" the dog", return_log_probs=True)
    answer, token_bytes = result.answers[0], oracle(name).tokenizers.target.token_bytes
    num_generated = len(answer.log_probs) - (answer.finish_reason == "eos")
    forced = list(answer.tokens)[: len(answer.tokens) - num_generated]
    [expected] = oracle(name).greedy([text], NUM_NEW, forced)
    assert list(answer.tokens) == [*forced, *expected.ids]
    assert b"".join(map(token_bytes, forced)) == (b" the dog" if name == "language" else b"  the dog")


@EACH
def test_scores_are_pytorchs(client: Client, oracle: Callable[[str], Oracle], name: str) -> None:
    token_bytes = oracle(name).tokenizers.target.token_bytes
    for text in texts_of(name):
        told = client.score(text, " over the grass" if name == "language" else "over the grass", model=name)
        ids = [token.token for token in told.tokens]
        assert b"".join(map(token_bytes, ids)).decode().strip() == "over the grass"
        assert [token.log_prob for token in told.tokens] == pytest.approx(oracle(name).log_probs(text, ids), abs=ROUNDING)


def test_models_tell_their_architecture_and_align_where_there_is_attention(client: Client) -> None:
    told = {model.name: model.architecture for model in client.models()}
    kinds = {"transformer": "transformer", "tied": "transformer", "attentive": "rnn", "forgetful": "rnn", "language": "decoder"}
    assert told == kinds
    for name in ("transformer", "attentive"):
        scored = client.score("a dog runs", "the grass", model=name, return_alignment=True, alignment_layer=0)
        assert scored.alignment is not None
        assert [sum(row) for row in scored.alignment.weights] == pytest.approx([1.0] * len(scored.tokens), abs=ROUNDING)
    for name in ("forgetful", "language"):
        with pytest.raises(InvalidArgument, match=r"return_alignment: model .* has no attention between source and target"):
            client.score("a dog runs", "the grass", model=name, return_alignment=True)


def test_of_a_huge_prompt_every_protocol_keeps_the_end(server: Server, client: Client) -> None:
    """Those of gRPC used to keep the beginning of what is larger than 64 KiB."""
    sentence = TRAINING_TEXTS[0] + " "
    end = " and the grass is green" + " two dogs" * 40
    options: dict[str, Any] = {"truncate": True, "max_new_tokens": NUM_NEW}
    huge, long = sentence * 10_000 + end, sentence * 20 + end
    wanted = Query([long], options, model="language")

    async def answers_of(protocol: type[ProtocolClient]) -> list[str]:
        async with protocol.connect(server) as caller:
            calls = [call for name, (call, _) in caller.methods.items() if caller.supports(name, options)]
            return [(await call(replace(wanted, texts=[text])))[0].texts[0] for call in calls for text in (huge, long)]

    expected = client.generate(long, model="language", **options)
    assert expected.is_truncated
    for protocol in PROTOCOLS:
        assert set(asyncio.run(answers_of(protocol))) <= {expected.text}, protocol.name


def test_answers_have_the_same_bits_alone_and_beside_requests_of_all_kinds_to_all_models(server: Server) -> None:
    kinds = [(name, options) for name in ARCHITECTURES for options in SEARCHES.values()]
    requests = [(text, {"model": name, "max_new_tokens": NUM_NEW, **options}) for name, options in kinds for text in texts_of(name)]

    async def ask_all(order: list[int], concurrency: int) -> dict[int, Any]:
        gate = asyncio.Semaphore(concurrency)
        async with AsyncClient(server.address) as client:

            async def ask(number: int) -> Any:
                async with gate:
                    text, options = requests[number]
                    answers = (await client.generate(text, return_log_probs=True, **options)).answers
                    return [(answer.tokens, [token.log_prob for token in answer.log_probs], answer.score) for answer in answers]

            return dict(zip(order, await asyncio.gather(*map(ask, order)), strict=True))

    order = list(range(len(requests)))
    alone = asyncio.run(ask_all(order, 1))
    for seed in (1, 2):
        random.Random(seed).shuffle(order)
        assert asyncio.run(ask_all(order, 48)) == alone
