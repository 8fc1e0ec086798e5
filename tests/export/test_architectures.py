"""Architectures of export: missing graphs are refused by name, and rows of prompts share the room with their targets."""

from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.export.architectures import ARCHITECTURES, check_architecture
from dragoman.export.arguments import ExportError, check_dimensions
from dragoman.export.exporter import export_checkpoint
from dragoman.export.greedy_parity import greedy_rows
from dragoman.export.verify import forced_rows, greedy_sources
from dragoman.model.checkpoint import Checkpoint
from tests.export.conftest import MakeCheckpoint


def test_architecture_without_graphs_is_refused_by_name(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ARCHITECTURES, "rnn", raising=False)
    make_checkpoint(architecture="rnn").save(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="no graphs of the architecture rnn"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_caches_that_no_server_reserves_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ExportError, match="the model cannot be served: shape of self_k_0 has 131072 numbers a position"):
        check_architecture(replace(checkpoint.model.config, d_model=2**17), "fp32", None)


def test_encoder_that_there_is_not_has_no_layers(make_checkpoint: MakeCheckpoint) -> None:
    models = [make_checkpoint(architecture=name).model for name in ("transformer", "rnn", "decoder")]
    assert [check_dimensions(model.config).num_encoder_layers for model in models] == [2, 2, 0]


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
