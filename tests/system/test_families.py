"""Models of other libraries, from the folder that Transformers writes to a real server's answers, which are those of `generate`.

By default one variant of each kind that can fail differently; every one with `TEST_LONG=1`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import InvalidArgument
from dragoman.client.sync import Client
from dragoman.export.exporter import export_checkpoint
from dragoman.model.importers.importing import ImportOptions, import_checkpoint
from dragoman.model.importers.languages import PromptOptions
from dragoman.v1 import generation_pb2 as pb
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.oracles.checkpoints import make_checkpoint
from tests.oracles.reference import Answer, Question, Reference, questions
from tests.oracles.variants import VARIANTS
from tests.shelf import Shelf
from tests.system.harness.grpc_client import NativeGrpc
from tests.system.harness.protocol import Query
from tests.system.harness.protocols import PROTOCOLS, query
from tests.system.harness.server import LONG, Server, serving

pytestmark = pytest.mark.e2e

SHORT = ("marian-two-vocabularies", "marian-multilingual", "nllb", "bart", "mbart", "t5-translation", "byt5", "umt5")
NAMES = tuple(VARIANTS) if LONG else SHORT
NUM_QUESTIONS = 48 if LONG else 6
# The model that reads special tokens that a text names where a request does not say.
READING = "t5-translation"
# Asked for where a checkpoint states no length.
NEW_TOKENS = 24
TIMEOUT_SECONDS = 600.0
# Largest error of a log-probability in single precision.
ROUNDING = 1e-4
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "2 of 4": {"num_beams": 4, "num_return_sequences": 2},
    "defaults": {},
}
TARGETS = ("the notice", "Subject to the terms and conditions of this License")
WITH_LANGUAGES = [name for name in NAMES if VARIANTS[name].said]


@pytest.fixture(scope="module")
def folders(shelf: Shelf) -> Callable[[str], Path]:
    """Return the folder of a variant: `foreign` as Transformers writes it, and its bundle, under its name."""

    def make(name: str, folder: Path) -> None:
        # Every other one has its tokeniser as Transformers writes it today.
        layout = "transformers" if list(VARIANTS).index(name) % 2 else "hub"
        make_checkpoint(folder / "foreign", name, layout=layout)
        order = ImportOptions(name=name, prompts=PromptOptions(task=VARIANTS[name].task), reads_special_tokens=name == READING)
        import_checkpoint(folder / "foreign", folder / "checkpoint", order)
        export_checkpoint(folder / "checkpoint", folder / name)

    return cache(lambda name: shelf.get(f"family-{name}", lambda folder: make(name, folder)))


@pytest.fixture(scope="module")
def server(folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("families")
    for name in NAMES:
        (models / name).symlink_to(folders(name) / name)
    with serving(models) as started:
        yield started


@pytest.fixture(scope="module")
def references(folders: Callable[[str], Path]) -> Callable[[str], Reference]:
    return cache(lambda name: Reference(folders(name) / "foreign", name))


def languages(question: Question) -> dict[str, str]:
    return {"source_language": question.source or "", "target_language": question.target or ""}


def request(model: str, question: Question, name: str, **settings: Any) -> pb.GenerateRequest:
    fields: dict[str, Any] = languages(question) | settings
    return pb.GenerateRequest(model=model, text=question.text, request_id=name, top_log_probs=5, **fields)


def ask_together(stub: GenerationStub, requests: Sequence[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    found = {}
    for message in stub.GenerateBatch(iter(requests), timeout=TIMEOUT_SECONDS):
        assert not message.HasField("error"), message
        found[message.request_id] = message.response
    return [found[request.request_id] for request in requests]


def bits(response: pb.GenerateResponse) -> list[bytes]:
    return [answer.SerializeToString(deterministic=True) for answer in response.answers]


def answers(response: pb.GenerateResponse, is_end_forced: bool) -> list[Answer]:
    """Return hypotheses as `Reference` has them: where the model forces the end at its limit, that counts as ended."""
    return [
        Answer(tuple(answer.tokens), is_end_forced or answer.finish_reason == pb.FINISH_REASON_EOS, answer.score)
        for answer in response.answers
    ]


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_generate(name: str, stub: GenerationStub, references: Callable[[str], Reference]) -> None:
    """With the checkpoint's defaults and languages, and with other searches; alone, and together on one stream."""
    reference, asked = references(name), questions(name, NUM_QUESTIONS)
    limit = {} if reference.has_max_length else {"max_new_tokens": NEW_TOKENS}
    for search, settings in SEARCHES.items():
        told = limit | settings
        requests = [request(name, question, f"{i}", **told) for i, question in enumerate(asked)]
        together = ask_together(stub, requests)
        for i in (0, 1):
            assert bits(stub.Generate(requests[i], timeout=TIMEOUT_SECONDS)) == bits(together[i]), search
        ours = [answers(response, "forced_eos_token_id" in reference.defaults) for response in together]
        theirs = reference.generate(asked, **told)
        ties, others = reference.differences(asked, ours, theirs, ROUNDING, **told)
        assert others == [], f"{search}: {[(asked[i], ours[i], theirs[i]) for i in others]}"
        assert len(ties) <= max(1, len(asked) // 12), search


@pytest.mark.parametrize("name", NAMES)
def test_pieces_add_up_and_targets_score_as_transformers_does(
    name: str, client: Client, references: Callable[[str], Reference]
) -> None:
    reference = references(name)
    for question, target in zip(questions(name, len(TARGETS)), TARGETS, strict=True):
        said: dict[str, Any] = {"model": name, **languages(question)}
        with client.stream(question.text, max_new_tokens=NEW_TOKENS, **said) as stream:
            pieces = [piece.text for piece in stream]
            assert "".join(pieces) == stream.result.text
        assert stream.result.text == client.generate(question.text, max_new_tokens=NEW_TOKENS, **said).text
        scored, expected = client.score(question.text, target, length_penalty=1.0, **said), reference.score(question, target)
        assert [token.token for token in scored.tokens] == reference.target_ids(target)
        assert [token.log_prob for token in scored.tokens] == pytest.approx(expected, abs=ROUNDING)
        assert scored.log_prob == pytest.approx(sum(expected), abs=ROUNDING * len(expected))
        assert scored.score == pytest.approx(sum(expected) / (len(expected) + len(reference.forced(question))), abs=ROUNDING)


def test_models_and_languages_mix_in_one_stream(stub: GenerationStub) -> None:
    requests = [
        request(name, question, f"{name} {i}", num_beams=1 + i % 3, max_new_tokens=8)
        for name in WITH_LANGUAGES
        for i, question in enumerate(questions(name, 6))
    ]
    requests = requests[::2] + requests[1::2]
    alone = [stub.Generate(request, timeout=TIMEOUT_SECONDS) for request in requests]
    assert list(map(bits, ask_together(stub, requests))) == list(map(bits, alone))


@pytest.mark.parametrize("name", WITH_LANGUAGES)
def test_languages_change_the_answer(name: str, client: Client) -> None:
    """Else a language that never reaches the model would pass where the model answers alike."""
    pairs = VARIANTS[name].pairs
    targets = {target for _, target in pairs if target}
    said: dict[str, Any] = {"model": name, "num_beams": 1, "max_new_tokens": NEW_TOKENS, "source_language": pairs[0][0] or ""}
    found = {tuple(client.generate(text, target_language=target, **said).tokens for text in TARGETS) for target in targets}
    assert len(found) == len(targets) > 1
    with pytest.raises(InvalidArgument, match="target_language: 'tlh' is no language"):
        client.generate("the notice", **said, target_language="tlh")


@pytest.mark.parametrize("name", [READING, "byt5"])
async def test_special_tokens_that_a_text_names_are_tokens_over_every_protocol(
    name: str, server: Server, references: Callable[[str], Reference]
) -> None:
    """By the model's default, or asked for; Transformers reads them always."""
    question = Question("the <extra_id_0> shall include <extra_id_1>.", *VARIANTS[name].pairs[0])
    asked = {"max_new_tokens": NEW_TOKENS} | ({} if name == READING else {"special_tokens_in_text": True})
    [theirs] = references(name).generate([question], max_new_tokens=NEW_TOKENS)
    async with NativeGrpc.connect(server) as native:
        method, texts = native.methods["Generate"], [question.text]
        [expected] = await method.call(Query(texts, asked | languages(question), name))
        [as_text] = await method.call(Query(texts, asked | languages(question) | {"special_tokens_in_text": False}, name))
    assert expected.tokens is not None and tuple(expected.tokens[0]) == theirs[0].tokens
    assert expected.counts is not None and as_text.counts is not None and expected.counts[0] < as_text.counts[0]
    for protocol in PROTOCOLS:
        async with protocol.connect(server) as client:
            for method_name, method in client.methods.items():
                if client.supports(method_name, asked):
                    found = await method.call(query(method, question.text, model=name, options=asked | languages(question)))
                    assert found == [client.project(expected)] * method.num_texts, (client.name, method_name)


def test_models_list_their_languages_and_defaults(client: Client, references: Callable[[str], Reference]) -> None:
    """A request overrides defaults field by field: of BART's, beams, the penalty and the least length; the rest stays."""
    reference, [question] = references("bart"), questions("bart", 1)
    [theirs] = reference.generate([question], num_beams=2, length_penalty=0.5, min_length=2)
    models = {model.name: model for model in client.models()}
    result = client.generate(question.text, model="bart", num_beams=2, length_penalty=0.5, min_new_tokens=0)
    with pytest.raises(InvalidArgument, match="target_language"):
        client.generate("the notice", model="bart", target_language="de")
    assert result.tokens == theirs[0].tokens
    assert set(models) == set(NAMES) and all(model.is_ready for model in models.values())
    assert len(models["nllb"].target_languages) == 202 and not models["bart"].target_languages
    assert {language.code for language in models["marian-multilingual"].target_languages} == {"fra", "deu", "spa_Latn"}
    bart = models["bart"].defaults
    assert (bart.num_beams, bart.length_penalty, bart.early_stopping, bart.no_repeat_ngram_size) == (4, 2.0, True, 3)
    # Of 40 and 8: the start, and a forced token.
    assert (bart.max_new_tokens, bart.min_new_tokens, bart.is_end_forced) == (38, 6, True)
    assert models["byt5"].defaults.num_beams is None
