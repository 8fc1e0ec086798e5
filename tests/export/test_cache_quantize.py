"""Caches in 8 bits hold what single precision does to half a level, and a bundle says that it has them."""

from pathlib import Path

import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.cache_quantize import HEADROOM, LEVELS, quantize_given_caches, scales_of
from dragoman.export.calibration import calibrate
from dragoman.export.exporter import export_checkpoint
from dragoman.export.graphs import EncoderGraph
from dragoman.export.session import open_session
from dragoman.export.tracing import trace, write
from dragoman.model.checkpoint import Checkpoint

SOURCES = [[5, 6, 7], [9] * 12, [20, 21, 80, 4]]


def test_channels_were_seen_as_large_as_the_encoder_gives_them(checkpoint: Checkpoint, exported: Path) -> None:
    """What calibration sees is what the exported encoder gives for the same sources."""
    ranges = calibrate(checkpoint.model, SOURCES, 6).caches
    session, config = open_session(exported / "encoder.onnx", 1), checkpoint.model.config
    names = [output.name for output in session.get_outputs()]
    largest = dict.fromkeys(names, np.zeros((config.num_heads, config.head_dim), np.float32))
    for ids in SOURCES:
        source = np.array([[*ids, config.eos_id]])
        outputs = session.run(names, {"src_ids": source, "src_lens": np.array([source.shape[1]])})
        largest = {name: np.maximum(largest[name], np.abs(found).max((0, 2))) for name, found in zip(names, outputs, strict=True)}
    for name in names:
        np.testing.assert_allclose(ranges[name], largest[name], rtol=1e-4, atol=1e-5)
    assert {f"self_{part}_{layer}" for part in "kv" for layer in range(2)} == ranges.keys() - set(names)


def test_encoder_gives_the_nearest_level_and_clips_what_lies_beyond(checkpoint: Checkpoint, exported: Path, tmp_path: Path) -> None:
    ranges = {name: found / 2 for name, found in calibrate(checkpoint.model, SOURCES, 6).caches.items()}
    graph = trace(EncoderGraph(checkpoint.model))
    quantize_given_caches(graph, ranges)
    write(graph, tmp_path / "encoder.onnx", "encoder.weights")
    inputs = {"src_ids": np.array([[*SOURCES[1], 1]]), "src_lens": np.array([13])}
    names = [output.name for output in open_session(exported / "encoder.onnx", 1).get_outputs()]
    single = open_session(exported / "encoder.onnx", 1).run(names, inputs)
    num_clipped = 0
    for name, found, expected in zip(names, open_session(tmp_path / "encoder.onnx", 1).run(names, inputs), single, strict=True):
        assert found.dtype == np.int8 and found.shape == expected.shape
        levels = expected / scales_of(ranges, name)
        is_inside = np.abs(levels) <= LEVELS
        assert np.abs(found - levels)[is_inside].max() <= 0.501
        assert (np.abs(found.astype(int))[~is_inside] >= LEVELS).all() and (np.sign(found) == np.sign(levels))[~is_inside].all()
        num_clipped += int((~is_inside).sum())
    assert num_clipped, "half of the range is not enough for everything"


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
    assert manifest.tensors.decoder_outputs[-4:] == ["cross_k_0_out", "cross_v_0_out", "cross_k_1_out", "cross_v_1_out"]
    assert (manifest.weight_bits, manifest.can_overflow) == (7, False)
    assert manifest.parity.quality is not None and manifest.parity.quality.agreement > 0.8


def test_weights_of_8_bits_can_overflow(exported: Path, checkpoint_dir: Path, tmp_path: Path) -> None:
    assert not Bundle.open(exported).manifest.can_overflow
    manifest = export_checkpoint(checkpoint_dir, tmp_path / "bundle", "int8", calibration=["a dog"]).manifest
    assert manifest.can_overflow and {cache.precision for cache in manifest.caches} == {None}
