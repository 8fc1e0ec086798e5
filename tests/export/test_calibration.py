"""Calibration sees every product, and what goes into it."""

import pytest

from dragoman.export.calibration import calibrate, calibration_sources
from dragoman.export.graphs.transformer_encoder import EncoderGraph
from dragoman.export.graphs.transformer_scorer import ScorerGraph
from dragoman.export.graphs.transformer_step import StepGraph
from dragoman.export.quantize import find_products
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.errors import InputError
from tests.export.conftest import MakeCheckpoint


@pytest.mark.parametrize(
    "switches",
    [{}, {"norm": "pre", "activation": "gelu", "is_embedding_shared": False, "is_projection_tied": False, "has_output_bias": True}],
    ids=["paper", "pre-norm, nothing shared"],
)
def test_every_product_of_every_graph_has_a_range(make_checkpoint: MakeCheckpoint, switches: dict[str, object]) -> None:
    model = make_checkpoint(**switches).model
    ranges = calibrate(model, [[5, 6, 7], [8]], 6).inputs
    for graph in (EncoderGraph, StepGraph, ScorerGraph):
        products = find_products(trace(graph(model)).graph)
        assert len(products) > 8
        assert {product.key for product in products} <= ranges.keys()


def test_ranges_hold_what_was_seen(checkpoint: Checkpoint) -> None:
    narrow = calibrate(checkpoint.model, [[5, 6, 7]], 6).inputs
    wide = calibrate(checkpoint.model, [[5, 6, 7], list(range(20, 40)), [9]], 6).inputs
    assert narrow.keys() == wide.keys()
    for key, found in narrow.items():
        assert wide[key].low <= found.low <= 0 <= found.high <= wide[key].high
        assert 0 < found.usual <= max(-found.low, found.high)
    assert any(found.low == 0 for found in narrow.values()), "what a ReLU gives is not negative"
    assert any(found.low < 0 for found in narrow.values())


def test_sources_may_be_as_long_as_the_model_takes_and_not_longer(checkpoint: Checkpoint) -> None:
    assert calibrate(checkpoint.model, [[5] * (checkpoint.model.config.max_source_positions - 1)], 1000).inputs
    for texts, reason in ((["a dog", "a dog " * 30], r"line 2: .* the model takes 24"), ([], "nothing to calibrate with")):
        with pytest.raises(InputError, match=reason):
            calibration_sources(checkpoint.tokenizers.source, texts, 24)
