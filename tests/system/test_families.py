"""Models of other libraries, from the folder that Transformers writes to the answer of a real server: what `generate` answers."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.families.agreement import compare
from benchmarks.families.main import NEW_TOKENS, questions
from benchmarks.families.reference import Reference
from benchmarks.families.served import answers, ask_alone, ask_together, languages, request, same_bits
from dragoman.client.errors import InvalidArgument
from dragoman.client.sync import Client
from dragoman.export.exporter import export_checkpoint
from dragoman.model.importers.importing import Order, import_checkpoint
from dragoman.model.importers.speech import Wishes
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.oracles.checkpoints import make_checkpoint
from tests.oracles.variants import VARIANTS
from tests.shelf import Shelf

pytestmark = pytest.mark.e2e

ROUNDING = 1e-4
"""How far a log-probability in single precision may be off."""

SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "2 of 4": {"num_beams": 4, "num_return_sequences": 2},
    "defaults": {},
}
TARGETS = ("the notice", "Subject to the terms and conditions of this License")
WITH_LANGUAGES = [name for name, variant in VARIANTS.items() if variant.said]


@pytest.fixture(scope="module")
def folders(shelf: Shelf) -> Callable[[str], Path]:
    """Return the folder of a variant: `foreign` as Transformers writes it, and its bundle, under its name."""

    def make(name: str, folder: Path) -> None:
        # Every other one has its tokeniser as Transformers writes it today.
        layout = "transformers" if list(VARIANTS).index(name) % 2 else "hub"
        make_checkpoint(folder / "foreign", name, layout=layout)
        import_checkpoint(folder / "foreign", folder / "checkpoint", Order(name=name, wishes=Wishes(task=VARIANTS[name].task)))
        export_checkpoint(folder / "checkpoint", folder / name)

    return cache(lambda name: shelf.get(f"family-{name}", lambda folder: make(name, folder)))


@pytest.fixture(scope="module")
def address(folders: Callable[[str], Path], serve: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of one server with every variant."""
    models = tmp_path_factory.mktemp("families")
    for name in VARIANTS:
        (models / name).symlink_to(folders(name) / name)
    with serve(models) as server:
        yield server.address
        assert server.terminate() == 0


@pytest.fixture(scope="module")
def stub(address: str) -> Iterator[GenerationStub]:
    with grpc.insecure_channel(address) as channel:
        yield GenerationStub(channel)


@pytest.fixture(scope="module")
def references(folders: Callable[[str], Path]) -> Callable[[str], Reference]:
    """Return a variant in Transformers."""
    return cache(lambda name: Reference(folders(name) / "foreign", name))


@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_those_of_generate(name: str, stub: GenerationStub, references: Callable[[str], Reference]) -> None:
    """With the checkpoint's defaults and languages, and with another search; what was asked together is what is asked alone."""
    reference, asked = references(name), questions(name, 6)
    limit = {} if reference.has_max_length else {"max_new_tokens": NEW_TOKENS}
    for search, settings in SEARCHES.items():
        told = limit | settings
        requests = [request(name, question, f"{i}", **told) for i, question in enumerate(asked)]
        together = ask_together(stub, requests)
        assert all(same_bits(one, other) for one, other in zip(ask_alone(stub, requests[:2]), together[:2], strict=True))
        theirs = reference.generate(asked, **told)
        found = compare(reference, asked, [answers(response) for response in together], theirs, ROUNDING, **told)
        assert found.others == [], f"{search}: {[(asked[i], together[i].tokens[:], theirs[i]) for i in found.others]}"
        assert found.num_same >= len(asked) - 1, search
        assert found.score_difference < ROUNDING, search


@pytest.mark.parametrize("name", VARIANTS)
def test_pieces_add_up_and_targets_score_as_transformers_says(
    name: str, address: str, references: Callable[[str], Reference]
) -> None:
    reference = references(name)
    with Client(address) as client:
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
    """Every request's answers are to the last bit those it has alone."""
    requests = [
        request(name, question, f"{name} {i}", num_beams=1 + i % 3, max_new_tokens=8)
        for name in WITH_LANGUAGES
        for i, question in enumerate(questions(name, 6))
    ]
    mixed = ask_together(stub, requests[::2] + requests[1::2])
    alone = ask_alone(stub, requests[::2] + requests[1::2])
    assert all(same_bits(one, other) for one, other in zip(mixed, alone, strict=True))


@pytest.mark.parametrize("name", WITH_LANGUAGES)
def test_languages_change_the_answer(name: str, address: str) -> None:
    """Else a language that is not said at all would pass where the model answers alike."""
    pairs = VARIANTS[name].pairs
    targets = {target: None for _, target in pairs if target}
    assert len(targets) > 1
    said: dict[str, Any] = {"model": name, "num_beams": 1, "max_new_tokens": NEW_TOKENS, "source_language": pairs[0][0] or ""}
    with Client(address) as client:
        found = {tuple(client.generate(text, target_language=target, **said).tokens for text in TARGETS) for target in targets}
    assert len(found) == len(targets)


@pytest.mark.parametrize(
    ("name", "source", "spellings"),
    [
        ("nllb", "eng_Latn", ("deu_Latn", "de", "de_DE", "de-DE", "DEU-latn", "German")),
        ("m2m100", "en", ("de", "deu", "de-DE", "german")),
        ("mbart50", "en_XX", ("de_DE", "de", "deu", "deu_Latn")),
        ("marian-multilingual", "", ("deu", "de", "de_DE")),
        ("madlad", "", ("de", "deu_Latn")),
        ("t5-translation", "en", ("de", "deu", "German")),
    ],
)
def test_spellings_of_a_language_are_one(name: str, source: str, spellings: tuple[str, ...], address: str) -> None:
    with Client(address) as client:
        results = [
            client.generate("the notice", model=name, max_new_tokens=NEW_TOKENS, source_language=source, target_language=spelling)
            for spelling in spellings
        ]
    assert len({result.tokens for result in results}) == 1


def test_a_language_that_is_not_there_is_refused_with_those_that_are(address: str) -> None:
    with Client(address) as client:
        with pytest.raises(InvalidArgument, match=r"target_language: 'tlh' is no language .*, which are fra, deu, spa_Latn"):
            client.generate("the notice", model="marian-multilingual", target_language="tlh")
        with pytest.raises(InvalidArgument, match="target_language"):
            client.generate("the notice", model="bart", target_language="de")


def test_models_tell_their_languages_and_defaults(address: str) -> None:
    with Client(address) as client:
        models = {model.name: model for model in client.models()}
    assert set(models) == set(VARIANTS)
    assert all(model.is_ready for model in models.values())
    assert len(models["nllb"].target_languages) == 202
    assert {language.code for language in models["marian-multilingual"].target_languages} == {"fra", "deu", "spa_Latn"}
    assert {language.code for language in models["madlad"].target_languages} == {"de", "fr", "en", "zh_Hant"}
    assert not models["bart"].target_languages
    bart = models["bart"].defaults
    assert (bart.num_beams, bart.length_penalty, bart.early_stopping, bart.no_repeat_ngram_size) == (4, 2.0, True, 3)
    assert (bart.max_new_tokens, bart.min_new_tokens, bart.is_end_forced) == (
        38,
        6,
        True,
    )  # of 40 and 8: the start, and a forced token
    assert models["t5-v1.1"].defaults.num_beams is None


def test_a_default_is_overridden_field_by_field(address: str, references: Callable[[str], Reference]) -> None:
    """BART's, of which beams, the penalty and the least length are others, and the rest stays."""
    reference, [question] = references("bart"), questions("bart", 1)
    [theirs] = reference.generate([question], num_beams=2, length_penalty=0.5, min_length=2)
    with Client(address) as client:
        result = client.generate(question.text, model="bart", num_beams=2, length_penalty=0.5, min_new_tokens=0)
    assert result.tokens == theirs[0].tokens
