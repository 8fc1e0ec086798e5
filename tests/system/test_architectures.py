"""Models of all architectures in one server: each answers as eager PyTorch does, and to the bit as if it were alone."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.client.aio import AsyncClient
from dragoman.client.errors import InvalidArgument
from dragoman.client.sync import Client
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import Hypothesis, Start, beam_search, greedy_search
from dragoman.model.errors import InputError
from dragoman.model.networks.architectures import network
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.core.requests import GenerateRequest
from dragoman.server.offline import OfflineTranslator
from tests.shelf import Shelf
from tests.system.harness.protocol import ProtocolClient, Query
from tests.system.harness.protocols import PROTOCOLS

pytestmark = pytest.mark.e2e

ROUNDING = 1e-4
NUM_NEW = 12
SENTENCES = ["a dog runs over the grass", "the grass is green", "two dogs, and a cat", "Zwei Hunde laufen über das Gras."]
MODELS: dict[str, dict[str, Any]] = {
    "transformer": {"num_encoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_heads": 4},
    "attentive": {"architecture": "rnn", "num_encoder_layers": 2},
    "forgetful": {"architecture": "rnn", "num_encoder_layers": 1, "attention": "none"},
    "language": {
        "architecture": "decoder",
        "num_heads": 2,
        "decoder_ffn_dim": 40,
        "positions": "rotary",
        "norm": "pre",
        "max_source_positions": 200,
        "max_target_positions": 240,
    },
}

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.6},
    "samples": {"do_sample": True, "seed": 7, "num_return_sequences": 3, "top_p": 0.9},
    "alternatives": {"return_alternatives": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "prefix": {"forced_prefix": " the dog"},
}


def make(folder: Path) -> None:
    """Export random models; no parameter is 0 or 1."""
    tokenizers = Tokenizers.shared(ByteLevelTokenizer.train(SENTENCES, 300))
    for seed, (name, fields) in enumerate(MODELS.items()):
        size = tokenizers.source.vocab_size
        sizes = {"source_vocab_size": size, "target_vocab_size": size, "d_model": 32, "num_decoder_layers": 2}
        positions = {"max_source_positions": 64, "max_target_positions": 48}
        config = ModelConfig(**(sizes | positions | fields))
        torch.manual_seed(seed)
        model = network(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in sorted(model.named_parameters()):
                parameter.normal_(float(key.endswith("norm.weight")), 0.25, generator=generator)
        Checkpoint(name, model, tokenizers).save(folder / "checkpoints" / name)
        export_checkpoint(folder / "checkpoints" / name, folder / "bundles" / name)


@pytest.fixture(scope="module")
def folder(shelf: Shelf) -> Path:
    return shelf.get("architectures", make)


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Callable[[str], Checkpoint]:
    loaded = {name: Checkpoint.load(folder / "checkpoints" / name) for name in MODELS}
    return loaded.__getitem__


@pytest.fixture(scope="module")
def server(folder: Path, serve: Callable[..., Any]) -> Iterator[Any]:
    """Pieces of prompts are 8 tokens long: a quarter of what is read between two steps."""
    with serve(folder / "bundles", "--prefill-tokens-per-step", "32", "--max-slots", "24") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Client]:
    with Client(server.address) as opened:
        yield opened


def texts_of(name: str) -> list[str]:
    """Return texts for a model; prompts may be empty, and long."""
    random_ = random.Random(5)
    words = SENTENCES[0].split()
    texts = [*SENTENCES, "x", " ".join(random_.choices(words, k=9))]
    return texts if name != "language" else ["", *texts, " ".join(random_.choices(words, k=120))]


def ids_of(checkpoint: Checkpoint, texts: Sequence[str]) -> list[list[int]]:
    return checkpoint.tokenizers.source.encode_batch(texts)


def agree(told: Any, expected: Hypothesis) -> None:
    """Compare an answer with the oracle's, which has no forced tokens."""
    assert list(told.tokens) == expected.ids
    assert [token.log_prob for token in told.log_probs] == pytest.approx(expected.log_probs, abs=ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_pytorchs(client: Client, checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    texts = texts_of(name)
    expected = greedy_search(checkpoint(name).model, ids_of(checkpoint(name), texts), NUM_NEW)
    for text, hypothesis in zip(texts, expected, strict=True):
        result = client.generate(text, model=name, max_new_tokens=NUM_NEW, return_log_probs=True, num_beams=1)
        agree(result.answers[0], hypothesis)


@pytest.mark.parametrize("name", MODELS)
def test_beams_are_pytorchs(client: Client, checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    texts = texts_of(name)
    expected = beam_search(checkpoint(name).model, ids_of(checkpoint(name), texts), 4, NUM_NEW, 0.6)
    for text, hypotheses in zip(texts, expected, strict=True):
        result = client.generate(text, model=name, max_new_tokens=NUM_NEW, return_log_probs=True, **KINDS["beams"])
        for answer, hypothesis in zip(result.answers, hypotheses, strict=True):
            agree(answer, hypothesis)
            assert answer.score == pytest.approx(hypothesis.score, abs=ROUNDING)


@pytest.mark.parametrize("name", MODELS)
def test_an_answer_goes_on_with_a_prefix_as_in_pytorch(client: Client, checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    text = "a dog runs"
    result = client.generate(text, model=name, max_new_tokens=NUM_NEW, forced_prefix=" the dog", return_log_probs=True)
    (ids,) = ids_of(checkpoint(name), [text])
    tokenizer = checkpoint(name).tokenizers.target
    answer = result.answers[0]
    num_generated = len(answer.log_probs) - (answer.finish_reason == "eos")
    forced = list(answer.tokens)[: len(answer.tokens) - num_generated]
    (expected,) = greedy_search(checkpoint(name).model, [ids], NUM_NEW, Start(forced=[forced]))
    assert list(answer.tokens) == [*forced, *expected.ids]
    assert b"".join(map(tokenizer.token_bytes, forced)) == (b" the dog" if name == "language" else b"  the dog")


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_pytorchs(client: Client, checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    """And of a language model's target that goes on with the prompt."""
    tokenizer, model = checkpoint(name).tokenizers.target, checkpoint(name).model
    for text in texts_of(name):
        target = " over the grass" if name == "language" else "over the grass"
        told = client.score(text, target, model=name)
        ids = [token.token for token in told.tokens]
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == "over the grass"
        (source,) = ids_of(checkpoint(name), [text])
        whole, first = model.prompt(source)
        hidden = model.observe(whole, [first, *ids[:-1]]).hidden
        expected = model.decoder.log_probs(hidden)[torch.arange(len(ids)), torch.tensor(ids)].tolist()
        assert [token.log_prob for token in told.tokens] == pytest.approx(expected, abs=ROUNDING)


def test_alignments_are_told_where_there_is_attention_and_refused_where_there_is_none(client: Client) -> None:
    for name in ("transformer", "attentive"):
        told = client.score("a dog runs", "the grass", model=name, return_alignment=True, alignment_layer=0)
        assert told.alignment is not None
        assert [sum(row) for row in told.alignment.weights] == pytest.approx([1.0] * len(told.tokens), abs=ROUNDING)
    for name in ("forgetful", "language"):
        with pytest.raises(InvalidArgument, match=r"return_alignment: model .* has no attention between source and target"):
            client.score("a dog runs", "the grass", model=name, return_alignment=True)


def test_of_a_huge_prompt_every_face_keeps_the_end(server: Any, client: Client) -> None:
    """Those of gRPC used to keep the beginning of what is larger than 64 KiB."""
    sentence = SENTENCES[0] + " "
    end = " and the grass is green" + " two dogs" * 40
    options: dict[str, Any] = {"truncate": True, "max_new_tokens": NUM_NEW}
    huge, long = sentence * 10_000 + end, sentence * 20 + end
    wanted = Query([long], options, model="language")

    async def answers_of(face: type[ProtocolClient]) -> list[str]:
        async with face.connect(server) as caller:
            ways = [way for name, way in caller.methods.items() if caller.supports(name, options)]
            return [(await way.ask(replace(wanted, texts=[text])))[0].texts[0] for way in ways for text in (huge, long)]

    expected = client.generate(long, model="language", **options)
    assert expected.is_truncated
    for face in PROTOCOLS:
        assert set(asyncio.run(answers_of(face))) <= {expected.text}, face.name


def test_prompt_and_answer_are_one_text(client: Client, checkpoint: Callable[[str], Checkpoint]) -> None:
    tokenizer = checkpoint("language").tokenizers.target
    for text in texts_of("language"):
        result = client.generate(text, model="language", max_new_tokens=NUM_NEW, do_sample=True, seed=3, num_return_sequences=3)
        for answer in result.answers:
            assert text + answer.text == tokenizer.decode([*tokenizer.encode(text), *answer.tokens])
        assert result.usage.source_tokens == len(tokenizer.encode(text)) + 1
        pieces = list(client.stream(text, model="language", max_new_tokens=NUM_NEW, do_sample=True, seed=3))
        assert "".join(piece.text for piece in pieces) == result.answers[0].text


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_without_a_server_answers_alike(client: Client, folder: Path, name: str) -> None:
    translator = OfflineTranslator(folder / "bundles" / name, max_slots=4, num_threads=1)
    texts = texts_of(name)
    told = [client.generate(text, model=name, num_beams=2).text for text in texts]
    assert translator.translate(texts, wanted=GenerateRequest(num_beams=2)) == told


def test_without_a_server_a_prompt_that_leaves_too_little_is_refused_by_its_number(folder: Path) -> None:
    translator = OfflineTranslator(folder / "bundles" / "language", max_slots=4, num_threads=1)
    long = texts_of("language")[-1]
    count = len(translator.tokenizers.source.encode(long)) + 1
    most = 240 - (count - 1)
    assert most < 200, "the text is long enough to matter"
    assert len(translator.translate(["", long], most)) == 2
    with pytest.raises(InputError) as caught:
        translator.translate(["", long], most + 1)
    assert str(caught.value) == (
        f"text 2: a prompt of {count} tokens leaves {most} to generate, not {most + 1}; max_target_tokens of model language is 240"
    )
    for count in (0, 241):
        with pytest.raises(InputError, match=f"max_new_tokens: {count} is not in 1 to 240"):
            translator.run([[]], count)


def test_every_model_tells_its_architecture(client: Client) -> None:
    told = {model.name: model.architecture for model in client.models()}
    assert told == {"transformer": "transformer", "attentive": "rnn", "forgetful": "rnn", "language": "decoder"}


def asked() -> list[tuple[str, str, dict[str, Any]]]:
    """Return all kinds of requests to all models."""
    return [
        (name, text, {"max_new_tokens": NUM_NEW, **options})
        for name in MODELS
        for text in texts_of(name)
        for options in KINDS.values()
    ]


async def together(address: str, requests: list[tuple[str, str, dict[str, Any]]], concurrency: int) -> list[Any]:
    """Ask for all, so many at once."""
    gate = asyncio.Semaphore(concurrency)
    async with AsyncClient(address) as client:

        async def ask(name: str, text: str, options: dict[str, Any]) -> Any:
            async with gate:
                return await client.generate(text, model=name, return_log_probs=True, **options)

        return await asyncio.gather(*(ask(*request) for request in requests))


def bits(result: Any) -> Any:
    return [(answer.tokens, [token.log_prob for token in answer.log_probs], answer.score) for answer in result.answers]


def test_answers_have_the_same_bits_alone_and_beside_requests_of_all_kinds_to_all_models(server: Any) -> None:
    """Long prompts are read in pieces meanwhile."""
    requests = asked()
    alone = [bits(result) for result in asyncio.run(together(server.address, requests, 1))]
    for seed in (1, 2):
        order = list(range(len(requests)))
        random.Random(seed).shuffle(order)
        found = asyncio.run(together(server.address, [requests[i] for i in order], 48))
        for place, result in zip(order, found, strict=True):
            assert bits(result) == alone[place], requests[place]


def test_a_stream_goes_on_while_long_prompts_are_read(server: Any, client: Client) -> None:
    """Of a long prompt 8 tokens are read an iteration: a stream beside it gets a token in each."""
    long = texts_of("language")[-1]

    async def go() -> tuple[int, int]:
        async with AsyncClient(server.address) as both:
            num_pieces, tasks, at_end = 0, [], 0
            async for _ in both.stream("a dog", model="language", max_new_tokens=200, suppressed_tokens=[1]):
                num_pieces += 1
                if num_pieces == 5:
                    tasks.append(asyncio.ensure_future(both.generate(long, model="language", max_new_tokens=2)))
                if tasks and tasks[0].done() and not at_end:
                    at_end = num_pieces
            await tasks[0]
            return num_pieces, at_end

    num_pieces, at_end = asyncio.run(go())
    assert num_pieces > 100 and at_end > 5, "the answer to the long prompt came while the stream went on"
