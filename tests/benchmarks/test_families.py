"""The made checkpoints are what they are said to be, and the comparison with Transformers sees what differs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.families.agreement import compare
from benchmarks.families.checkpoints import load_tokenizer, make_checkpoint
from benchmarks.families.reference import Answer, Noise, Question, Reference
from benchmarks.families.texts import lines, sources
from benchmarks.families.variants import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_a_seed_decides_every_weight_and_none_is_constant(name: str, tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / f"{i}", name, seed=seed) for i, seed in enumerate((0, 0, 1))]
    same, again, other = (load_file(folder / "model.safetensors") for folder in folders)
    for key, tensor in same.items():
        assert tensor.float().std() > 0.01, key
        assert torch.equal(tensor, again[key]), key
        is_fixed = "embed_positions" in key and name.startswith(("marian", "pegasus"))
        assert is_fixed or not torch.equal(tensor, other[key]), key
    config = json.loads((folders[0] / "config.json").read_text(encoding="utf-8"))
    depths = [
        config.get("encoder_layers", config.get("num_layers")),
        config.get("decoder_layers", config.get("num_decoder_layers")),
    ]
    assert depths == [3, 2]
    assert len(load_tokenizer(folders[0])) <= config["vocab_size"]


@pytest.mark.parametrize("name", VARIANTS)
def test_both_layouts_tokenise_alike(name: str, tmp_path: Path) -> None:
    hub, saved = (load_tokenizer(make_checkpoint(tmp_path / layout, name, layout=layout)) for layout in ("hub", "transformers"))
    texts = sources(50)
    assert hub(texts)["input_ids"] == saved(texts)["input_ids"]


def test_a_checkpoint_is_not_made_over_another(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        make_checkpoint(tmp_path, "t5")


def test_only_some_variants_have_a_real_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="byt5 has no real size"):
        make_checkpoint(tmp_path, "byt5", size="real")


def test_lines_are_short_and_no_source_comes_twice() -> None:
    assert all(20 <= len(line) <= 90 for line in lines())
    asked = sources(200)
    assert len(set(asked)) == 200
    assert all(len(text) <= 90 for text in asked)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(make_checkpoint(tmp_path_factory.mktemp("families") / "bart", "bart"), "bart")


def test_answers_vary_and_end(bart: Reference) -> None:
    """A comparison of answers that are all alike, or never end, would show little."""
    answers = [beam[0] for beam in bart.generate([Question(text) for text in sources(30)], num_beams=1)]
    assert len({answer.tokens for answer in answers}) >= 25
    assert len({len(answer.tokens) for answer in answers}) >= 5
    assert sum(len(set(answer.tokens)) for answer in answers) > 0.4 * sum(len(answer.tokens) for answer in answers)


def test_batched_reference_answers_are_those_of_each_alone(bart: Reference) -> None:
    questions = [Question(text) for text in sources(12)]
    together = bart.generate(questions, num_beams=3, num_return_sequences=2)
    alone = [bart.generate([question], num_beams=3, num_return_sequences=2)[0] for question in questions]
    assert [[answer.tokens for answer in beam] for beam in together] == [[answer.tokens for answer in beam] for beam in alone]


def _with(beam: list[Answer], tokens: tuple[int, ...]) -> list[Answer]:
    return [Answer(tokens, beam[0].is_ended, beam[0].score), *beam[1:]]


def test_another_answer_is_no_tie_and_a_rounded_one_is(bart: Reference) -> None:
    questions = [Question(text) for text in sources(4)]
    settings = {"num_beams": 4}
    theirs = bart.generate(questions, **settings)
    assert compare(bart, questions, theirs, theirs, 1e-6, **settings).cell() == "4/4"

    wrong = [*theirs[:3], _with(theirs[3], (0, 5, 6))]
    found = compare(bart, questions, wrong, theirs, 1e-6, **settings)
    assert (found.num_same, found.ties, found.others) == (3, [], [3])
    assert found.cell() == "3/4 (**1 others**)"

    disturbed = bart.generate([questions[0]], noise=Noise(1.0, 0), **settings)
    assert disturbed != [theirs[0]]
    found = compare(bart, questions, [disturbed[0], *theirs[1:]], theirs, 1.0, **settings)
    assert (found.num_same, found.ties, found.others) == (3, [0], [])


def test_answers_that_end_and_that_are_cut_off_differ(bart: Reference) -> None:
    question = Question(sources(1)[0])
    [[theirs]] = bart.generate([question], num_beams=1)
    found = compare(bart, [question], [[Answer(theirs.tokens, not theirs.is_ended, None)]], [[theirs]], 1e-6, num_beams=1)
    assert found.num_same == 0


def test_renormalised_log_probs_leave_padding_out(tmp_path: Path) -> None:
    questions = Question(sources(1)[0])
    for name, is_left_out in (("marian", True), ("marian-multilingual", False)):
        reference = Reference(make_checkpoint(tmp_path / name, name), name)
        log_probs = reference.log_probs(questions, [5, 6, 7])
        assert torch.isinf(log_probs[:, reference.model.config.pad_token_id]).all() == is_left_out
        assert torch.allclose(log_probs.exp().sum(-1), torch.ones(3, dtype=torch.float64))


TOLD: list[tuple[str, Callable[[Reference, Question], bool]]] = [
    (
        "nllb",
        lambda r, q: (
            r.source_ids(q)[0] == r.language_id("fra_Latn") and r.told(q) == {"forced_bos_token_id": r.language_id("zho_Hant")}
        ),
    ),
    ("nllb-legacy", lambda r, q: r.source_ids(q)[-1] == r.language_id("fra_Latn")),
    ("mbart", lambda r, q: r.told(q) == {"decoder_start_token_id": r.language_id("zh_CN")}),
    ("m2m100", lambda r, q: r.told(q) == {"forced_bos_token_id": r.language_id("zh")}),
    ("marian-multilingual", lambda r, q: r.tokenizer.convert_ids_to_tokens(r.source_ids(q))[0] == ">>fra<<"),
    ("madlad", lambda r, q: r.tokenizer.convert_ids_to_tokens(r.source_ids(q))[0] == "<2de>"),
    ("t5-translation", lambda r, q: r.tokenizer.decode(r.source_ids(q), skip_special_tokens=True).startswith("translate")),
]
LANGUAGES = {
    "nllb": ("fra_Latn", "zho_Hant"),
    "nllb-legacy": ("fra_Latn", "deu_Latn"),
    "mbart": ("de_DE", "zh_CN"),
    "m2m100": ("fr", "zh"),
    "marian-multilingual": (None, "fra"),
    "madlad": (None, "de"),
    "t5-translation": ("en", "de"),
}


@pytest.mark.parametrize(("name", "is_told"), TOLD, ids=[name for name, _ in TOLD])
def test_transformers_is_told_the_languages(name: str, is_told: Callable[[Reference, Question], bool], tmp_path: Path) -> None:
    reference = Reference(make_checkpoint(tmp_path / name, name), name)
    assert is_told(reference, Question("the notice", *LANGUAGES[name]))
