"""Shortlists: the tokens on them, and decode steps that give exactly these, as the model does over them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from dragoman.export.arguments import ExportError, Shortlist
from dragoman.export.building import Recipe, build_graphs
from dragoman.export.bundle import SHORTLIST_FILE, Bundle
from dragoman.export.graphs.transformer import StepGraph
from dragoman.export.progress import Progress, steps_of
from dragoman.export.proof.batching import drive
from dragoman.export.proof.cases import Row
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.sessions import OnnxRunner
from dragoman.export.proof.shortlist import verify_shortlist
from dragoman.export.shortlist import choose_shortlist, needed_ids
from dragoman.export.tensors import LOG_PROBS_OUTPUT
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Language, Languages, Template
from dragoman.model.text.byte_level import ByteLevelTokenizer
from tests.export.conftest import KINDS, SHORTLIST_TEXT, Export

LANGUAGES = Languages(target=[Language(code="de", target_prefix=[289, 17]), Language(code="fr", target_prefix=[290])])
SOURCE, INPUTS = [5, 80, 7, 299, 1], [2, 9, 260, 14, 14, 299]


def config_of(**fields: Any) -> ModelConfig:
    return ModelConfig(**({"source_vocab_size": 300, "target_vocab_size": 300} | fields))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> ByteLevelTokenizer:
    return checkpoint.tokenizers.byte_level()


def listed_of(bundle: Bundle) -> list[int]:
    ids: list[int] = json.loads((bundle.directory / SHORTLIST_FILE).read_text())["ids"]
    return ids


def test_list_holds_the_text_all_bytes_and_forced_tokens(tokenizer: ByteLevelTokenizer) -> None:
    config, template = config_of(), Template(target_prefix=[291])
    ids = choose_shortlist(SHORTLIST_TEXT, tokenizer, config, template, LANGUAGES)
    assert ids == sorted(set(ids))
    assert {token for line in SHORTLIST_TEXT for token in tokenizer.encode(line)} <= set(ids)
    assert {config.eos_id, config.pad_id, 289, 17, 290, 291} <= set(ids)
    assert {token for token in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token)) == 1} <= set(ids)
    others = set(range(tokenizer.vocab_size)) - set(ids)
    assert others and all(len(tokenizer.token_bytes(token).strip()) != 1 for token in others)


def test_size_keeps_the_most_frequent_and_of_equals_the_lower_ids(tokenizer: ByteLevelTokenizer) -> None:
    config, template = config_of(), Template()
    needed = needed_ids(tokenizer, config, template, None)
    lines = [" dog" * 3 + " cat" * 2 + " grass" * 2] * 1025  # more than a batch
    counts = Counter(tokenizer.encode(lines[0]))
    order = sorted(counts, key=lambda token: (-counts[token], token))
    assert len(order) > 3
    for size in range(1, len(order) + 1):
        assert choose_shortlist(lines, tokenizer, config, template, None, size) == sorted({*order[:size], *needed})
    assert choose_shortlist(lines, tokenizer, config, template, None, 10**9) == sorted({*order, *needed})
    for texts in ([], [""], ["", ""]):
        with pytest.raises(ExportError, match="the shortlist's text is empty"):
            choose_shortlist(texts, tokenizer, config, template, None)
    with pytest.raises(ExportError, match="at least 1 token of its text, not 0"):
        Shortlist(lines, 0)
    assert Shortlist(lines, 1).size == 1


def test_unknown_piece_and_characters_are_needed_and_special_tokens_are_not() -> None:
    class Pieces(ByteLevelTokenizer):
        """Texts of tokens as a SentencePiece model has them: its unknown piece, control pieces, characters, words."""

        pieces = (b"", b"", " \N{DOUBLE QUESTION MARK} ".encode(), b" ", "é".encode(), " é".encode(), b" a", b"ab", "日本".encode())

        def __init__(self) -> None: ...

        @property
        def vocab_size(self) -> int:
            return len(self.pieces)

        def token_bytes(self, token_id: int) -> bytes:
            return self.pieces[token_id]

    assert needed_ids(Pieces(), config_of(pad_id=0, eos_id=1, decoder_start_id=0), Template(), None) == {0, 1, 2, 3, 4, 5, 6}


def steps(runner: OnnxRunner, num_candidates: int) -> list[tuple[Any, Any]]:
    """Return the ids and log-probabilities that decode steps give a teacher-forced row."""
    found: list[tuple[Any, Any]] = []
    rows = [Row(SOURCE, INPUTS, len(INPUTS))]
    drive(runner, rows, 1, num_candidates, False, lambda _, ids, log_probs: found.append((ids[0].copy(), log_probs[0].copy())))
    return found


def eager_over(checkpoint: Checkpoint, listed: list[int]) -> torch.Tensor:
    """Return PyTorch's log-probabilities over a list, `[T, n]`, worked out from the model's logits."""
    model, config = checkpoint.model.double(), checkpoint.model.config
    with torch.inference_mode():
        logits = model(torch.tensor([SOURCE]), torch.tensor([len(SOURCE)]), torch.tensor([INPUTS]))[0]
    pad = torch.arange(config.target_vocab_size) == config.pad_id
    if config.padding == "excluded":
        logits = logits.masked_fill(pad, -torch.inf)
    log_probs = logits[:, listed].log_softmax(-1)
    return log_probs.masked_fill(pad[listed], -torch.inf) if config.padding == "masked" else log_probs


@pytest.mark.parametrize("padding", ["excluded", "masked", "predicted"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_candidates_are_pytorchs_over_the_list(make_checkpoint, tmp_path: Path, padding: str, is_tied: bool) -> None:
    checkpoint = make_checkpoint(padding=padding, has_output_bias=is_tied, is_projection_tied=is_tied)
    listed = [0, 1, 2, 9, 14, 30, 260, 298]
    (tmp_path / "graphs").mkdir()
    build_graphs(checkpoint, tmp_path / "graphs", Recipe("fp32", shortlist=listed), Progress(steps_of("fp32", True)))
    expected = eager_over(checkpoint, listed).numpy()
    found = steps(OnnxRunner(tmp_path / "graphs", checkpoint.model.config), len(listed))
    for (ids, log_probs), row in zip(found, expected, strict=True):
        assert sorted(ids.tolist()) == listed
        np.testing.assert_allclose(log_probs[np.argsort(ids)], row, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("kind", "precision"), [("tiny", "fp32"), ("tiny", "int8"), ("llama", "int8"), ("no attention", "fp32")])
def test_order_is_the_whole_steps_and_differences_of_log_probs_too(export, make_checkpoint, kind: str, precision: str) -> None:
    """Logits are the same numbers in every precision: the normalisation alone differs."""
    whole, short = export(kind, precision), export(kind, precision, is_short=True)
    config, listed = make_checkpoint(**KINDS[kind]).model.config, listed_of(short)
    assert short.manifest.num_choices == len(listed) < 300
    has_log_probs = [LOG_PROBS_OUTPUT in each.manifest.tensors.decoder_outputs for each in (whole, short)]
    assert has_log_probs == [kind != "llama", False]
    all_of_it = steps(OnnxRunner(whole.directory, config), 300)
    for num_candidates in (1, 5):
        found = steps(OnnxRunner(short.directory, config), num_candidates)
        for (ids, log_probs), (all_ids, all_log_probs) in zip(found, all_of_it, strict=True):
            is_listed = np.isin(all_ids, listed)
            np.testing.assert_array_equal(ids, all_ids[is_listed][:num_candidates])
            shifts = log_probs - all_log_probs[is_listed][:num_candidates]
            assert np.ptp(shifts) < 3e-6 and (shifts > 0).all()


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16", "bf16"])
def test_scorer_keeps_the_whole_vocabulary_and_the_report_has_the_comparison(export: Export, precision: str) -> None:
    whole, short = export("tiny", precision), export("tiny", precision, is_short=True)
    report = json.loads((short.directory / "parity.json").read_text())["shortlist"]
    assert report["num_tokens"] == short.manifest.num_choices and report["num_rows"] == 12 and report["num_rows_alone"] == 4
    assert report["max_log_prob_difference"] < 1e-4
    assert json.loads((whole.directory / "parity.json").read_text())["shortlist"] is None
    assert whole.manifest.num_choices == 300 and SHORTLIST_FILE not in whole.manifest.files
    assert whole.manifest.version != short.manifest.version
    graphs = [onnx_ir.load(path).graph for path in (short.decoder_path, short.scorer_path)]
    shapes = [{tuple(value.shape or ()) for value in graph.initializers.values()} for graph in graphs]
    assert [any(short.manifest.num_choices in shape for shape in found) for found in shapes] == [True, False]


def test_gate_refuses_a_list_that_is_not_the_graphs(export: Export, checkpoint: Checkpoint) -> None:
    whole, short = export(), export(is_short=True)
    listed = listed_of(short)
    other = [*listed[:-1], next(i for i in range(listed[-2] + 1, 300) if i != listed[-1])]
    with pytest.raises(ParityError, match="the candidates are not the tokens of the shortlist"):
        verify_shortlist(whole.directory, short.directory, other, checkpoint.model.config, "fp32")


def test_gate_refuses_rows_of_other_tokens(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right ids, but the projection's rows of their neighbours."""
    shortened = StepGraph.__init__

    def shifted(self: Any, model: Any, shortlist: Any = None) -> None:
        shortened(self, model, shortlist if shortlist is None else [(i + 1) % 300 for i in shortlist[:-1]] + [0])
        if shortlist is not None:
            self.shortlist = torch.tensor(shortlist)

    monkeypatch.setattr(StepGraph, "__init__", shifted)
    (tmp_path / "graphs").mkdir()
    with pytest.raises(ParityError, match="shortlist"):
        build_graphs(checkpoint, tmp_path / "graphs", Recipe("fp32", shortlist=[0, 1, 2, 9]), Progress(steps_of("fp32", True)))
