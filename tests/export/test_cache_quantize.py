"""Caches in 8 bits hold single precision to half a level, and a bundle says that it has them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.export.cache_quantize import HEADROOM, LEVELS, quantize_given_caches, scales_of
from dragoman.export.calibration import calibrate
from dragoman.export.graphs.transformer_encoder import EncoderGraph
from dragoman.export.packing import pack
from dragoman.export.session import open_session
from dragoman.export.tensor_names import cross_kv_names
from dragoman.export.tracing import trace, write
from dragoman.model.checkpoint import Checkpoint
from tests.export.conftest import Export

SOURCES = [[5, 6, 7], [9] * 12, [20, 21, 80, 4]]


def encoded(encoder: Path) -> NDArray[np.number[Any]]:
    """Return what an encoder gives of the sources' tokens, `[P, n·H·Dh]`."""
    (tokens,) = open_session(encoder, 1).run(None, pack([[*ids, 1] for ids in SOURCES]))
    return tokens


def test_encoder_gives_the_nearest_level_of_the_calibrated_range_and_clips(
    checkpoint: Checkpoint, exported: Path, tmp_path: Path
) -> None:
    seen, names, expected = calibrate(checkpoint.model, SOURCES, 6).caches, cross_kv_names(2), encoded(exported / "encoder.onnx")
    for name, columns in zip(names, np.split(np.abs(expected), len(names), axis=1), strict=True):
        np.testing.assert_allclose(seen[name].ravel(), columns.max(0), rtol=1e-4, atol=1e-5)
    assert {f"self_{part}_{layer}" for part in "kv" for layer in range(2)} == seen.keys() - set(names)
    ranges = {name: found / 2 for name, found in seen.items()}
    graph = trace(EncoderGraph(checkpoint.model))
    quantize_given_caches(graph, ranges)
    write(graph, tmp_path / "encoder.onnx", "encoder.weights")
    found = encoded(tmp_path / "encoder.onnx")
    assert found.dtype == np.int8 and found.shape == expected.shape
    levels = expected / np.concatenate([scales_of(ranges, name).ravel() for name in names])
    is_inside = np.abs(levels) <= LEVELS
    assert np.abs(found - levels)[is_inside].max() <= 0.501
    assert (np.abs(found.astype(int))[~is_inside] >= LEVELS).all() and (np.sign(found) == np.sign(levels))[~is_inside].all()
    assert not is_inside.all(), "half of the range is not enough for everything"


def test_scales_leave_headroom_and_are_never_zero() -> None:
    scales = scales_of({"x": np.array([[1.0, 0.0], [2.0, 4.0]], np.float32)}, "x")
    assert scales.shape == (1, 2, 1, 2) and (scales > 0).all()
    assert scales[0, 1, 0, 1] == pytest.approx(HEADROOM * 4 / LEVELS)


def test_manifest_has_the_bits_of_caches_and_weights(export: Export, exported: Path) -> None:
    manifest = export("tiny", "int8", weight_bits=7, cache_precision="int8").manifest
    assert {cache.precision for cache in manifest.caches} == {"int8"}
    assert [cache.role for cache in manifest.caches] == ["self"] * 4 + ["cross"] * 4
    assert manifest.tensors.encoder_outputs == ["cross_kv"]
    assert manifest.tensors.decoder_outputs[-4:] == ["cross_k_0_out", "cross_v_0_out", "cross_k_1_out", "cross_v_1_out"]
    assert (manifest.weight_bits, manifest.cache_precision, manifest.can_overflow) == (7, "int8", False)
    assert manifest.parity.quality is not None and manifest.parity.quality.agreement > 0.8
    manifest = export("tiny", "int8").manifest
    assert manifest.cache_precision == "fp32", "the number format of what lies between products"
    assert manifest.can_overflow and {cache.precision for cache in manifest.caches} == {None}
    assert not export().manifest.can_overflow
