"""Caches in 8 bits hold what single precision does to half a level, and a bundle says that it has them."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle
from dragoman.export.cache_quantize import HEADROOM, LEVELS, quantize_given_caches, scales_of
from dragoman.export.calibration import calibrate
from dragoman.export.exporter import export_checkpoint
from dragoman.export.graphs.transformer_encoder import EncoderGraph
from dragoman.export.packing import pack
from dragoman.export.session import open_session
from dragoman.export.tensor_names import cross_kv_names
from dragoman.export.tracing import trace, write
from dragoman.model.checkpoint import Checkpoint

SOURCES = [[5, 6, 7], [9] * 12, [20, 21, 80, 4]]


def encoded(encoder: Path, sources: list[list[int]]) -> NDArray[np.number[Any]]:
    """Return what an encoder gives of the sources' tokens, `[P, n·H·Dh]`."""
    (tokens,) = open_session(encoder, 1).run(None, pack([[*ids, 1] for ids in sources]))
    return tokens


def test_channels_were_seen_as_large_as_the_encoder_gives_them(checkpoint: Checkpoint, exported: Path) -> None:
    """What calibration sees is what the exported encoder gives for the same sources."""
    ranges, names = calibrate(checkpoint.model, SOURCES, 6).caches, cross_kv_names(2)
    tokens = np.abs(encoded(exported / "encoder.onnx", SOURCES))
    for name, columns in zip(names, np.split(tokens, len(names), axis=1), strict=True):
        np.testing.assert_allclose(ranges[name].ravel(), columns.max(0), rtol=1e-4, atol=1e-5)
    assert {f"self_{part}_{layer}" for part in "kv" for layer in range(2)} == ranges.keys() - set(names)


def test_encoder_gives_the_nearest_level_and_clips_what_lies_beyond(checkpoint: Checkpoint, exported: Path, tmp_path: Path) -> None:
    ranges = {name: found / 2 for name, found in calibrate(checkpoint.model, SOURCES, 6).caches.items()}
    graph = trace(EncoderGraph(checkpoint.model))
    quantize_given_caches(graph, ranges)
    write(graph, tmp_path / "encoder.onnx", "encoder.weights")
    found, expected = encoded(tmp_path / "encoder.onnx", SOURCES), encoded(exported / "encoder.onnx", SOURCES)
    assert found.dtype == np.int8 and found.shape == expected.shape
    levels = expected / np.concatenate([scales_of(ranges, name).ravel() for name in cross_kv_names(2)])
    is_inside = np.abs(levels) <= LEVELS
    assert np.abs(found - levels)[is_inside].max() <= 0.501
    assert (np.abs(found.astype(int))[~is_inside] >= LEVELS).all() and (np.sign(found) == np.sign(levels))[~is_inside].all()
    assert not is_inside.all(), "half of the range is not enough for everything"


def test_scales_leave_headroom_and_are_never_zero() -> None:
    scales = scales_of({"x": np.array([[1.0, 0.0], [2.0, 4.0]], np.float32)}, "x")
    assert scales.shape == (1, 2, 1, 2) and (scales > 0).all()
    assert scales[0, 1, 0, 1] == pytest.approx(HEADROOM * 4 / LEVELS)


@pytest.fixture(scope="module")
def bundle(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("caches") / "tiny"
    calibration = ["a dog and a cat run", "the cat sat"]
    return export_checkpoint(checkpoint_dir, output, "int8", calibration=calibration, weight_bits=7, cache_precision="int8")


def test_manifest_says_what_caches_and_weights_have(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert {cache.precision for cache in manifest.caches} == {"int8"}
    assert [cache.role for cache in manifest.caches] == ["self"] * 4 + ["cross"] * 4
    assert manifest.tensors.encoder_outputs == ["cross_kv"]
    assert manifest.tensors.decoder_outputs[-4:] == ["cross_k_0_out", "cross_v_0_out", "cross_k_1_out", "cross_v_1_out"]
    assert (manifest.weight_bits, manifest.cache_precision, manifest.can_overflow) == (7, "int8", False)
    assert manifest.parity.quality is not None and manifest.parity.quality.agreement > 0.8


def test_what_comes_in_one_tensor_has_one_precision(bundle: Bundle) -> None:
    *caches, last = bundle.manifest.caches
    with pytest.raises(ValueError, match="different precisions"):
        msgspec.structs.replace(bundle.manifest, caches=[*caches, msgspec.structs.replace(last, precision=None)])


def test_weights_of_8_bits_can_overflow(exported: Path, checkpoint_dir: Path, tmp_path: Path) -> None:
    assert not Bundle.open(exported).manifest.can_overflow
    manifest = export_checkpoint(checkpoint_dir, tmp_path / "bundle", "int8", calibration=["a dog"]).manifest
    assert manifest.cache_precision == "fp32", "the number format of what lies between products"
    assert manifest.can_overflow and {cache.precision for cache in manifest.caches} == {None}
