"""The gate lets a faithful export through, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.export.architectures import check_architecture
from dragoman.export.arguments import ExportError
from dragoman.export.bundle import BundleError
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.proof import cases
from dragoman.export.proof import verify as gate
from dragoman.export.proof.cases import NUM_RANDOM_CHECKED, SENTENCES, forced_rows, greedy_rows, greedy_sources
from dragoman.export.proof.eager import Floats, Ints
from dragoman.export.proof.report import ParityError
from dragoman.export.proof.sessions import OnnxRunner, OnnxSlots
from dragoman.export.proof.verify import verify
from dragoman.export.storage import write_graphs
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import Transformer
from tests.export.conftest import MakeCheckpoint


def patch_step(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Put a fault between the graphs and the gate."""
    step = OnnxSlots.step

    def faulty(self: OnnxSlots, *inputs: Any) -> tuple[Ints, Floats]:
        result: tuple[Ints, Floats] = change(lambda *arguments: step(self, *arguments), *inputs)
        return result

    monkeypatch.setattr(OnnxSlots, "step", faulty)


def test_faithful_export_passes_and_reports_how_close_it_is(checkpoint: Checkpoint, exported: Path) -> None:
    report = verify(checkpoint, exported)
    assert report.max_log_prob_difference <= report.tolerance == 1e-4
    assert report.num_sentences == NUM_RANDOM_CHECKED + len(SENTENCES)
    assert report.num_tokens > report.num_sentences and report.num_token_mismatches == 0
    assert report.max_batch_rows == 8
    assert report.max_position == checkpoint.model.config.max_target_positions - 1
    assert report.num_positions > report.num_steps, "rows were batched"
    assert report.headline().num_rows == report.num_rows == report.num_pairs == 24
    assert 0 < report.max_score_difference <= report.tolerance
    assert 0 < report.max_attention_difference <= report.tolerance


def test_wrong_attention_and_wrong_greedy_tokens_fail(checkpoint: Checkpoint, exported: Path, monkeypatch) -> None:
    score = OnnxRunner.score
    with monkeypatch.context() as patch:
        patch.setattr(OnnxRunner, "score", lambda self, pairs: (score(self, pairs)[0], score(self, pairs)[1][:, ::-1]))
        with pytest.raises(ParityError, match="the scorer's attention weights are off by"):
            verify(checkpoint, exported)

    def change(step: Any, *inputs: Any) -> tuple[Ints, Floats]:
        ids, log_probs = step(*inputs)
        return (ids + (inputs[1] == 7)[:, None] if inputs[3] == 1 else ids) % 300, log_probs

    monkeypatch.setattr(gate, "check_one_candidate", lambda runner, rows, num_slots: None)  # it finds this, too
    patch_step(monkeypatch, change)
    with pytest.raises(ParityError, match=r"greedy decoding gives token \d+ instead of \d+ at step 7 "):
        verify(checkpoint, exported)


def test_tokens_may_part_at_a_tie_and_are_counted(make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch) -> None:
    """Tokens 5 and 6 are the same in all but name and often the likeliest; the graphs choose the lower id."""
    checkpoint = make_checkpoint(has_output_bias=True)
    assert isinstance(checkpoint.model, Transformer)
    decoder = checkpoint.model.decoder
    with torch.no_grad():
        decoder.embedding.tokens.weight[6] = decoder.embedding.tokens.weight[5]
        assert decoder.output_bias is not None
        decoder.output_bias[5:7] = 3.0
    write_graphs([trace(graph(checkpoint.model)) for graph in (EncoderGraph, StepGraph, ScorerGraph)], tmp_path)
    assert verify(checkpoint, tmp_path).num_token_mismatches == 0

    def change(step: Any, *inputs: Any) -> tuple[Ints, Floats]:
        ids, log_probs = step(*inputs)
        return np.where(ids == 5, 6, ids) if inputs[3] == 1 else ids, log_probs

    monkeypatch.setattr(gate, "check_one_candidate", lambda runner, rows, num_slots: None)  # it finds this, too
    patch_step(monkeypatch, change)
    report = verify(checkpoint, tmp_path)
    assert 0 < report.num_token_mismatches <= report.num_sentences


@pytest.mark.parametrize("name", ["encoder.onnx", "decoder.onnx", "decoder.weights", "scorer.onnx"])
def test_graph_that_cannot_be_loaded_or_is_of_another_depth_is_named(checkpoint, make_checkpoint, bundle_dir, name: str) -> None:
    with pytest.raises(BundleError, match="inputs and outputs"):
        verify(make_checkpoint(num_decoder_layers=1), bundle_dir)
    (bundle_dir / name).write_bytes(b"no")
    with pytest.raises(BundleError, match=name.split(".")[0]):
        verify(checkpoint, bundle_dir)


def test_drawn_rows_reach_the_limits_and_stay_within_them(make_checkpoint: MakeCheckpoint) -> None:
    checkpoint = make_checkpoint(max_source_positions=40, max_target_positions=70, pad_id=17)
    rows = forced_rows(checkpoint.model.config)
    assert {1, 40} <= {len(row.source) for row in rows} and {70} <= {len(row.inputs) for row in rows}
    assert all(len(row.source) <= 40 and len(row.inputs) == row.num_steps <= 70 for row in rows)
    assert all(row.source[-1] == 1 and row.inputs[0] == 2 for row in rows)
    drawn = {i for row in rows for i in row.source} | {i for row in rows for i in row.inputs}
    assert 17 not in drawn and drawn <= set(range(300)) and len(drawn) > 200
    sources = greedy_sources(checkpoint)
    assert [] in sources and all(len(source) <= 39 for source in sources)


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat 300 tokens as a large vocabulary."""
    monkeypatch.setattr(cases, "LARGE_VOCABULARY", 299)
    monkeypatch.setattr(cases, "NUM_BEST", 20)


@pytest.mark.usefixtures("as_if_large")
def test_large_vocabulary_is_compared_whole_in_a_few_rows(checkpoint: Checkpoint, exported: Path, monkeypatch) -> None:
    asked: dict[int, int] = {}

    def count(step: Any, *inputs: Any) -> tuple[Ints, Floats]:
        asked[inputs[3]] = asked.get(inputs[3], 0) + len(inputs[0])
        result: tuple[Ints, Floats] = step(*inputs)
        return result

    patch_step(monkeypatch, count)
    report = verify(checkpoint, exported)
    assert (report.num_rows, report.num_whole_rows) == (24, 3)
    assert asked.keys() == {300, 20, 1, 0} and asked[20] > 2 * asked[300] > 0


@pytest.mark.usefixtures("as_if_large")
@pytest.mark.parametrize("num_candidates", [300, 20])
def test_wrong_candidate_of_a_large_vocabulary_fails(checkpoint, exported: Path, monkeypatch, num_candidates: int) -> None:
    """The least likely token of all is compared, and so is the least likely of the best."""

    def change(step: Any, *inputs: Any) -> tuple[Ints, Floats]:
        ids, log_probs = step(*inputs)
        if inputs[3] == num_candidates:
            log_probs[:, -2] -= 5e-3 * (inputs[1] == 6)
            log_probs[:, -1] -= 5e-3 * (inputs[1] == 6)
        return ids, log_probs

    patch_step(monkeypatch, change)
    with pytest.raises(ParityError, match=r"off by 0.005.* at position 6"):
        verify(checkpoint, exported)


def test_caches_that_no_server_reserves_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ExportError, match="the model cannot be served: shape of self_k_0 has 131072 numbers a position"):
        check_architecture(replace(checkpoint.model.config, d_model=2**17), "fp32", None)


@pytest.mark.parametrize("limits", [(30, 40), (40, 40), (2, 3), (1, 1), (300, 3000)])
def test_rows_of_prompts_reach_the_limits_and_share_the_room(make_checkpoint: MakeCheckpoint, limits: tuple[int, int]) -> None:
    most, room = limits
    config = make_checkpoint(architecture="decoder", max_source_positions=most, max_target_positions=room).model.config
    rows = forced_rows(config)
    lengths = {len(row.source) for row in rows}
    assert {0, min(1, most - 1)} <= lengths and max(lengths) == most - 1
    assert len(rows) == 24 and all(row.inputs[0] == 2 and len(row.inputs) == row.num_steps >= 1 for row in rows)
    ends = {len(row.source) + row.num_steps for row in rows}
    assert max(ends) <= room and (room in ends or room > 2048)


def test_greedy_rows_are_asked_as_a_server_asks(checkpoint: Checkpoint, make_checkpoint: MakeCheckpoint) -> None:
    rows = greedy_rows(checkpoint.model, [[], [7, 8]], 32)
    assert [(row.source, row.inputs, row.num_steps) for row in rows] == [([1], [2], 20), ([7, 8, 1], [2], 20)]
    decoder_checkpoint = make_checkpoint(architecture="decoder")
    rows = greedy_rows(decoder_checkpoint.model, [[], [7], [7, 8, 9], list(range(5, 30))], 32)
    assert [(row.source, row.inputs) for row in rows[:3]] == [([], [2]), ([2], [7]), ([2, 7, 8], [9])]
    assert [row.num_steps for row in rows] == [32, 32, 32, 40 - 25]
    sources = greedy_sources(decoder_checkpoint)
    assert [] in sources and max(map(len, sources)) <= 20, "half of the room is for the answer"
