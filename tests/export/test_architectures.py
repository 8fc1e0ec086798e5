"""What export has of an architecture: what is missing is refused by name, and what follows from prompts is kept to."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.export.architectures import ARCHITECTURES, architecture_of, check_architecture
from dragoman.export.arguments import ExportError, check_dimensions
from dragoman.export.exporter import export_checkpoint
from dragoman.export.greedy_parity import greedy_rows
from dragoman.export.verify import forced_rows, greedy_sources
from dragoman.model.checkpoint import Checkpoint

MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def prompts_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let language models be known, whatever their graphs are."""
    monkeypatch.setitem(ARCHITECTURES, "decoder", replace(ARCHITECTURES["transformer"], has_prompts=True))


def test_architecture_without_graphs_is_refused_by_name(
    rnn_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ARCHITECTURES, "rnn", raising=False)
    rnn_checkpoint.save(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="no graphs of the architecture rnn"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_precisions_that_an_architecture_does_not_have_are_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    config, known = checkpoint.model.config, architecture_of(checkpoint.model.config)
    for precision in ("fp32", "int8", "fp16", "bf16"):
        assert check_architecture(config, precision, None) is known
    assert check_architecture(config, "int8", "int8") is known
    fewer = replace(known, precisions=("fp32", "int8"), has_integer_caches=False)
    monkeypatch.setitem(ARCHITECTURES, "transformer", fewer)
    with pytest.raises(ExportError, match="architecture transformer are exported in fp32 and int8, not in bf16"):
        check_architecture(config, "bf16", None)
    with pytest.raises(ExportError, match="caches of the architecture transformer cannot be in int8"):
        check_architecture(config, "int8", "int8")


def test_caches_that_no_server_reserves_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    config = replace(make_checkpoint().model.config, d_model=2**17)
    with pytest.raises(ExportError, match="the model cannot be served: shape of self_k_0 has 131072 numbers a position"):
        check_architecture(config, "fp32", None)


def test_encoder_that_there_is_not_has_no_layers(
    checkpoint: Checkpoint, rnn_checkpoint: Checkpoint, decoder_checkpoint: Checkpoint
) -> None:
    found = [check_dimensions(each.model.config).num_encoder_layers for each in (checkpoint, rnn_checkpoint, decoder_checkpoint)]
    assert found == [2, 2, 0]


@pytest.mark.usefixtures("prompts_known")
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


@pytest.mark.usefixtures("prompts_known")
def test_greedy_rows_are_asked_as_a_server_asks(decoder_checkpoint: Checkpoint) -> None:
    rows = greedy_rows(decoder_checkpoint.model, [[], [7], [7, 8, 9], list(range(5, 30))], 32)
    assert [(row.source, row.inputs) for row in rows[:3]] == [([], [2]), ([2], [7]), ([2, 7, 8], [9])]
    assert [row.num_steps for row in rows] == [32, 32, 32, 40 - 25]
    sources = greedy_sources(decoder_checkpoint)
    assert [] in sources and max(map(len, sources)) <= 20, "half of the room is for the answer"


def test_greedy_rows_of_a_source_begin_with_the_start_token(checkpoint: Checkpoint) -> None:
    rows = greedy_rows(checkpoint.model, [[], [7, 8]], 32)
    assert [(row.source, row.inputs, row.num_steps) for row in rows] == [([1], [2], 20), ([7, 8, 1], [2], 20)]
