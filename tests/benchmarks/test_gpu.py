"""What the GPU benchmark makes of its measurements; the measuring itself is rehearsed with `--device cpu --quick`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.main import is_right, tables
from benchmarks.gpu.models import greedy, random_sources
from benchmarks.gpu.speed import NUM_STEPS, SOURCE_TOKENS, WARM_STEPS, step_bytes
from dragoman.export.caches import attention_caches
from dragoman.server.runtime.device.model import DeviceModel
from dragoman.server.runtime.device.steps import Likeliest

EOS = 1


@pytest.fixture
def model(tmp_path: Path) -> DeviceModel:
    (tmp_path / "decoder.weights").write_bytes(b"x" * 1000)
    return DeviceModel(
        tmp_path / "encoder.onnx", tmp_path / "decoder.onnx", "fp16", attention_caches(3, 2, 8), 16, 50, 50, 0, EOS, 2, 40, 40
    )


class CountingDecoder:
    """Answers a source of n tokens with its first token n - 1 times and then ends; it knows of a row only what it was given."""

    max_rows = 3

    def __init__(self) -> None:
        self.sources: list[list[int]] = [[]] * 3

    def prefill(self, sources: list[list[int]], rows: list[int]) -> None:
        for source, row in zip(sources, rows, strict=True):
            self.sources[row] = source

    def copy_row(self, source: int, target: int, length: int) -> None:
        self.sources[target] = self.sources[source]

    def decode(self, tokens: np.ndarray, positions: np.ndarray, num_candidates: int) -> Likeliest:
        sources = self.sources[: len(tokens)]
        ids = [EOS if position == len(source) - 1 else source[0] for source, position in zip(sources, positions, strict=True)]
        return Likeliest(np.array(ids)[:, None], -positions.astype(np.float32)[:, None])


def test_rows_that_end_make_room_for_others(model: DeviceModel) -> None:
    sources = [[10 + i] * length for i, length in enumerate((3, 1, 7, 2, 2, 5, 1, 9))]
    answers = greedy(CountingDecoder(), model, sources, 8)  # type: ignore[arg-type]
    for source, (tokens, log_probs) in zip(sources, answers, strict=True):
        assert tokens == ([*source[:-1], EOS] if len(source) <= 8 else source[:8])
        assert log_probs == [-float(position) for position in range(len(tokens))]


def test_sources_are_the_same_each_time(model: DeviceModel) -> None:
    sources = random_sources(model, 20, 2, 9)
    assert sources == random_sources(model, 20, 2, 9)
    assert {len(source) for source in sources} <= set(range(2, 10)) and all(source[-1] == EOS for source in sources)
    assert all(2 < token < 50 for source in sources for token in source[:-1])


def test_a_step_must_read_weights_and_what_is_valid(model: DeviceModel) -> None:
    cached = 6 * 2 * 16 * (SOURCE_TOKENS + WARM_STEPS + NUM_STEPS // 2)
    assert step_bytes(model, 5) == 1000 + 4 * 50 * 16 + 5 * cached


GOOD: dict[str, Any] = {
    "answers fp16": {"same as eager fp16": 0.995, "log-probability off eager fp32": 0.02},
    "replay": {"num_different": 0, "different": []},
    "ahead": {"same": True},
    "grpc": {"skipped": "grpc is not installed"},
}


@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("replay", {"num_different": 1}),
        ("ahead", {"same": False}),
        ("answers fp16", {"same as eager fp16": 0.98}),
        ("answers fp16", {"log-probability off eager fp32": 0.2}),
        ("steps big", {"failed": "RuntimeError: no"}),
        ("answers fp16", {"failed": "RuntimeError: no"}),
    ],
)
def test_what_is_wrong_or_failed_is_not_right(part: str, figures: dict[str, Any]) -> None:
    assert is_right(GOOD, True)
    assert not is_right(GOOD | {part: figures}, True)


def test_failed_requests_are_not_right() -> None:
    assert not is_right(GOOD | {"mixed searches": {"requests": 5, "failed": 2}}, True)
    assert is_right(GOOD | {"mixed searches": {"requests": 5, "failed": 0}}, True)


def test_tables_show_rows_and_single_figures() -> None:
    rows = [{"model": "base", "rows": 1}, {"model": "base", "rows": 2}]
    text = tables({"environment": {"device": "x"}, "seconds": {}, "steps": rows, "peers": {"rows": rows, "missing": ["y"]}})
    assert text.count("| base | 2 |") == 2 and "- missing: ['y']" in text and "seconds" not in text
