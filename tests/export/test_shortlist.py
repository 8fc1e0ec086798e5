"""A shortlist: which tokens are on it, and that a decode step gives exactly these, as the model does over them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from dragoman.export.arguments import ExportError, Shortlist
from dragoman.export.bundle import SHORTLIST_FILE, Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.graphs.transformer_step import StepGraph
from dragoman.export.parity import ParityError, drive
from dragoman.export.row import Row
from dragoman.export.running import OnnxRunner
from dragoman.export.shortlist import choose_shortlist, needed_ids
from dragoman.export.shortlist_parity import verify_shortlist
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Language, Languages, Template
from dragoman.model.text.byte_level import ByteLevelTokenizer

MakeCheckpoint = Callable[..., Checkpoint]
TEXT = ["the dog and the cat", "the dog"]
PADDINGS = ["excluded", "masked", "predicted"]
LANGUAGES = Languages(target=[Language(code="de", target_prefix=[289, 17]), Language(code="fr", target_prefix=[290])])


def config_of(**fields: Any) -> ModelConfig:
    return ModelConfig(**({"source_vocab_size": 300, "target_vocab_size": 300} | fields))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> ByteLevelTokenizer:
    return checkpoint.tokenizers.byte_level()


def test_list_holds_the_text_all_bytes_and_what_is_forced(tokenizer: ByteLevelTokenizer) -> None:
    config, template = config_of(), Template(target_prefix=[291])
    ids = choose_shortlist(TEXT, tokenizer, config, template, LANGUAGES)
    assert ids == sorted(set(ids))
    assert {token for line in TEXT for token in tokenizer.encode(line)} <= set(ids)
    assert {config.eos_id, config.pad_id, 289, 17, 290, 291} <= set(ids)
    for text in ("ein völlig anderer Satz", "日本語 🐕", "\x00\n\t"):
        single = [token for token in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(token)) == 1]
        assert set(single) <= set(ids)
        assert tokenizer.decode([next(i for i in single if tokenizer.token_bytes(i) == bytes([b])) for b in text.encode()]) == text
    others = set(range(tokenizer.vocab_size)) - set(ids)
    assert others, "something is left out"
    assert all(len(tokenizer.token_bytes(token).strip()) != 1 for token in others)


def test_size_keeps_the_most_frequent_and_of_equals_the_lower_ids(tokenizer: ByteLevelTokenizer) -> None:
    config, template = config_of(), Template()
    needed = needed_ids(tokenizer, config, template, None)
    lines = [" dog" * 3 + " cat" * 2 + " grass" * 2]
    counts: dict[int, int] = {}
    for token in tokenizer.encode(lines[0]):
        counts[token] = counts.get(token, 0) + 1
    order = sorted(counts, key=lambda token: (-counts[token], token))
    assert len(order) > 3
    for size in range(1, len(order) + 1):
        assert choose_shortlist(lines, tokenizer, config, template, None, size) == sorted({*order[:size], *needed})
    assert choose_shortlist(lines, tokenizer, config, template, None, 10**9) == sorted({*order, *needed})


def test_unknown_and_characters_are_elements_and_special_tokens_are_not(tokenizer: ByteLevelTokenizer) -> None:
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


@pytest.mark.parametrize("texts", [[], [""], ["", ""]])
def test_empty_text_is_refused(tokenizer: ByteLevelTokenizer, texts: list[str]) -> None:
    with pytest.raises(ExportError, match="the shortlist's text is empty"):
        choose_shortlist(texts, tokenizer, config_of(), Template(), None)


def test_size_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ExportError, match="at least 1 token of its text, not 0"):
        Shortlist(TEXT, 0)


class Steps:
    """What a decode step gave a teacher-forced row, `[T, K]`."""

    def __init__(self, runner: OnnxRunner, source: list[int], inputs: list[int], num_candidates: int) -> None:
        self.ids: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []
        drive(runner, [Row(source, inputs, len(inputs))], 1, num_candidates, False, self._observe)

    def _observe(self, rows: list[Row], ids: np.ndarray, log_probs: np.ndarray) -> None:
        self.ids.append(ids[0].copy())
        self.log_probs.append(log_probs[0].copy())


def eager_over(checkpoint: Checkpoint, source: list[int], inputs: list[int], listed: list[int]) -> torch.Tensor:
    """Return PyTorch's log-probabilities over a list, `[T, n]`, worked out from the model's logits."""
    model, config = checkpoint.model.double(), checkpoint.model.config
    with torch.inference_mode():
        logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([inputs]))[0]
    pad = torch.arange(config.target_vocab_size) == config.pad_id
    if config.padding == "excluded":
        logits = logits.masked_fill(pad, -torch.inf)
    log_probs = logits[:, listed].log_softmax(-1)
    return log_probs.masked_fill(pad[listed], -torch.inf) if config.padding == "masked" else log_probs


SOURCE, INPUTS = [5, 80, 7, 299, 1], [2, 9, 260, 14, 14, 299]


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_candidates_are_pytorchs_over_the_list(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, padding: str, is_tied: bool
) -> None:
    checkpoint = make_checkpoint(padding=padding, has_output_bias=is_tied, is_projection_tied=is_tied)
    checkpoint.save(tmp_path / "checkpoint")
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", shortlist=Shortlist(TEXT))
    listed = json.loads((tmp_path / "bundle" / SHORTLIST_FILE).read_text())["ids"]
    assert bundle.manifest.num_choices == len(listed) < 300
    found = Steps(OnnxRunner(bundle.directory, checkpoint.model.config), SOURCE, INPUTS, len(listed))
    expected = eager_over(checkpoint, SOURCE, INPUTS, listed).numpy()
    for ids, log_probs, row in zip(found.ids, found.log_probs, expected, strict=True):
        assert sorted(ids.tolist()) == listed
        np.testing.assert_allclose(log_probs[np.argsort(ids)], row, atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """Return a model's bundle without a shortlist and with one."""
    folder = tmp_path_factory.mktemp(request.param)
    whole = export_checkpoint(checkpoint_dir, folder / "whole", request.param)
    return whole, export_checkpoint(checkpoint_dir, folder / "short", request.param, shortlist=Shortlist(TEXT))


@pytest.mark.parametrize("both", ["fp32", "int8"], indirect=True)  # export itself compares the others
@pytest.mark.parametrize("num_candidates", [1, 5])
def test_order_is_the_whole_steps_and_differences_of_log_probs_too(both: tuple[Bundle, Bundle], num_candidates: int) -> None:
    """Logits are the same numbers in every precision: the normalisation alone differs."""
    whole, short = both
    config = config_of(d_model=32, num_heads=4, num_encoder_layers=2, num_decoder_layers=2)
    listed = json.loads((short.directory / SHORTLIST_FILE).read_text())["ids"]
    all_of_it = Steps(OnnxRunner(whole.directory, config), SOURCE, INPUTS, 300)
    found = Steps(OnnxRunner(short.directory, config), SOURCE, INPUTS, num_candidates)
    for ids, log_probs, all_ids, all_log_probs in zip(found.ids, found.log_probs, all_of_it.ids, all_of_it.log_probs, strict=True):
        is_listed = np.isin(all_ids, listed)
        np.testing.assert_array_equal(ids, all_ids[is_listed][:num_candidates])
        shifts = log_probs - all_log_probs[is_listed][:num_candidates]
        assert np.ptp(shifts) < 3e-6 and (shifts > 0).all()


@pytest.mark.parametrize("both", ["fp32", "int8", "fp16", "bf16"], indirect=True)
def test_scorer_keeps_the_whole_vocabulary_and_the_report_says_what_was_compared(both: tuple[Bundle, Bundle]) -> None:
    whole, short = both
    report = json.loads((short.directory / "parity.json").read_text())["shortlist"]
    assert report["num_tokens"] == short.manifest.num_choices and report["num_rows"] == 12 and report["num_rows_alone"] == 4
    assert report["max_log_prob_difference"] < 1e-4
    assert json.loads((whole.directory / "parity.json").read_text())["shortlist"] is None
    assert whole.manifest.num_choices == 300 and SHORTLIST_FILE not in whole.manifest.files
    assert whole.manifest.version != short.manifest.version
    shapes = [
        {tuple(value.shape or ()) for value in onnx_ir.load(path).graph.initializers.values()}
        for path in (short.decoder_path, short.scorer_path)
    ]
    num_choices = short.manifest.num_choices
    is_of = [any(num_choices in shape for shape in found) for found in shapes]
    assert is_of == [True, False]


@pytest.mark.parametrize("both", ["fp32"], indirect=True)
def test_gate_refuses_a_list_that_is_not_the_graphs(both: tuple[Bundle, Bundle], checkpoint: Checkpoint) -> None:
    whole, short = both
    listed = json.loads((short.directory / SHORTLIST_FILE).read_text())["ids"]
    other = [*listed[:-1], next(i for i in range(listed[-2] + 1, 300) if i != listed[-1])]
    with pytest.raises(ParityError, match="the candidates are not the tokens of the shortlist"):
        verify_shortlist(whole.directory, short.directory, other, checkpoint.model.config, "fp32")


def test_gate_refuses_rows_of_other_tokens(
    checkpoint: Checkpoint, checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right ids, but the projection's rows of their neighbours."""
    shortened = StepGraph.__init__

    def shifted(self: Any, model: Any, shortlist: Any = None) -> None:
        shortened(self, model, shortlist if shortlist is None else [(i + 1) % 300 for i in shortlist[:-1]] + [0])
        if shortlist is not None:
            self.shortlist = torch.tensor(shortlist)

    monkeypatch.setattr(StepGraph, "__init__", shifted)
    with pytest.raises(ParityError, match="shortlist"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", shortlist=Shortlist(TEXT))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("both", ["fp32"], indirect=True)
def test_list_is_needed_where_a_step_chooses_from_fewer_tokens(both: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    short = Path(shutil.copytree(both[1].directory, tmp_path / "short"))
    manifest = json.loads((short / "bundle.json").read_text())
    del manifest["files"][SHORTLIST_FILE]
    (short / "bundle.json").write_text(json.dumps(manifest))
    with pytest.raises(Exception, match=f"files does not list {SHORTLIST_FILE}"):
        Bundle.open(short, is_checked=False)
