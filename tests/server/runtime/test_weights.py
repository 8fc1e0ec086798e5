"""Weights that engines share: the same bits as with copies, mapped once, and copies where sharing is impossible."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from dragoman.export.bundle import Bundle
from dragoman.export.manifest import MANIFEST_FILE
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.settings import DeviceSettings, Limits
from dragoman.server.runtime import weights as weights_module
from dragoman.server.runtime.onnx import OnnxRunner, OnnxScorer
from dragoman.server.runtime.weights import WEIGHTS_FILE, Weights
from tests.export.conftest import edit

MAX_ROWS = 17
Patch = pytest.MonkeyPatch


@pytest.fixture
def tiny(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


def answers(runner: OnnxRunner, bundle: Bundle, num_rows: int) -> list[Any]:
    """Return candidates of some steps after some sources, and the caches that the encoder filled."""
    manifest, random = bundle.manifest, np.random.default_rng(num_rows)
    sources = [[*random.integers(4, manifest.source_vocab_size, 1 + row).tolist(), manifest.eos_id] for row in range(num_rows)]
    runner.prefill(sources, list(range(num_rows)))
    found = [cache[:num_rows].tobytes() for cache in runner.cache.cross_kv.values()]
    for position in range(3):
        tokens = random.integers(4, manifest.target_vocab_size, num_rows)
        candidates = runner.step(tokens, np.full(num_rows, position, np.int64), 5)
        found += [candidates.ids.tobytes(), candidates.log_probs.tobytes()]
    return found


def works(weights: Weights, bundle: Bundle) -> bool:
    """Return whether a runner computes the same with these weights as with copies."""
    ours, theirs = (answers(OnnxRunner(bundle, 3, 1, each), bundle, 3) for each in (weights, Weights(bundle)))
    return ours == theirs


def entries(folder: str | Path) -> list[Path]:
    return [path.parent for path in Path(folder).glob(f"*/*/{WEIGHTS_FILE}")]


def mapped(directory: Path) -> dict[str, int]:
    """Return how much of each mapped file of a folder this process has copied by writing, in KiB."""
    found: dict[str, int] = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            path = Path(line.split()[-1])
            name = path.name if path.parent == directory else ""
        elif name and line.startswith("Anonymous:"):
            found[name] = found.get(name, 0) + int(line.split()[1])
    return found


def of(bundle: Bundle, folder: str | Path) -> tuple[Weights, list[Any]]:
    """Return the weights of a bundle and the log lines about them."""
    with structlog.testing.capture_logs() as lines:
        weights = Weights.of(bundle, str(folder))
    return weights, [line for line in lines if "weights" in line["event"]]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_bits_are_those_of_copies_and_no_page_of_the_file_is_copied(
    shipped_bundle: Callable[..., Path], tmp_path: Path, precision: str
) -> None:
    bundle = Bundle.open(shipped_bundle("en-de", precision))
    shared, scores = Weights.of(bundle, str(tmp_path)), []
    assert shared.folder
    for num_threads, sizes in ((2, (16,)), (1, (1, 2, 7, 17))):
        theirs, ours = OnnxRunner(bundle, MAX_ROWS, num_threads), OnnxRunner(bundle, MAX_ROWS, num_threads, shared)
        for num_rows in sizes:
            assert answers(theirs, bundle, num_rows) == answers(ours, bundle, num_rows)
    for weights in (Weights(bundle), shared):
        scorer = OnnxScorer(bundle, 1, weights=weights)
        scorer.open()
        scores.append([array.tobytes() for array in scorer.score([7, 8, 9, 1], [10, 11, 1])])
    assert scores[0] == scores[1]
    (entry,) = entries(tmp_path)
    assert mapped(entry) == {WEIGHTS_FILE: 0}


def test_engine_and_its_scorer_share_weights_if_settings_say_so(tiny: Bundle, tmp_path: Path) -> None:
    for settings in (DeviceSettings(), DeviceSettings(weights_cache=str(tmp_path))):
        runner = load_runner(tiny, Limits(3, 99), 1, settings, is_warmed_up=False)
        assert isinstance(runner, OnnxRunner)
        load_scorer(tiny, 1, runner).open()
        assert (runner.weights.folder is not None) is bool(settings.weights_cache)
    (entry,) = entries(tmp_path)
    assert mapped(entry).keys() == {WEIGHTS_FILE}
    weights, lines = of(tiny, "")
    assert weights.folder is None and not lines


def test_files_are_made_once_private_and_made_again_if_damaged(tiny: Bundle, tmp_path: Path) -> None:
    first, _ = of(tiny, tmp_path)
    (entry,) = entries(tmp_path)
    made = {path.name: path.stat() for path in entry.iterdir()}
    second, (line,) = of(tiny, tmp_path)
    assert {path.name: path.stat().st_ino for path in entry.iterdir()} == {name: found.st_ino for name, found in made.items()}
    assert not any(found.st_mode & 0o077 for name, found in made.items() if name != "entry.json")
    assert (line["event"], line["log_level"], line["folder"]) == ("weights are shared", "info", str(entry))
    assert first.folder and second.folder and works(second, tiny)
    before = (entry / WEIGHTS_FILE).read_bytes()
    (entry / WEIGHTS_FILE).write_bytes(bytes(byte ^ 0x55 for byte in before))
    weights, _ = of(tiny, tmp_path)
    assert weights.folder and works(weights, tiny) and (entry / WEIGHTS_FILE).read_bytes() == before


def test_files_depend_on_processor_version_and_overflow(
    tiny: Bundle, shipped_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    kept = [Weights.of(tiny, str(tmp_path))]
    for name, value in (("processor_identity", lambda: "flags: another"), ("onnxruntime.__version__", "0.1")):
        with monkeypatch.context() as patch:
            patch.setattr(f"dragoman.server.runtime.weights.{name}", value)
            kept.append(Weights.of(tiny, str(tmp_path)))
        assert len(entries(tmp_path)) == len(kept), name
    single, quantised = (shipped_bundle("en-de", precision) for precision in ("fp32", "int8"))
    older = shutil.copytree(quantised, tmp_path / "older")
    edit(older / MANIFEST_FILE, lambda manifest: manifest.pop("is_pair_safe"))
    for directory, num_entries in ((single, 1), (quantised, 1), (older, 2)):
        bundle, folder = Bundle.open(directory), tmp_path / f"weights of {directory.parent.name} {directory.name}"
        for may_overflow in (False, True):
            monkeypatch.setattr(weights_module, "overflows_in_8_bits", lambda may_overflow=may_overflow: may_overflow)
            kept.append(Weights.of(bundle, str(folder)))
        assert len(entries(folder)) == num_entries and all(weights.folder for weights in kept)


OBSTACLES: dict[str, tuple[Callable[[Path, Patch], object], str]] = {
    "a file": (lambda folder, _: folder.write_text(""), "Not a directory"),
    "others may look": (lambda folder, _: (folder / f"dragoman-{os.geteuid()}").mkdir(0o755, parents=True), "nobody else's"),
    "no room": (
        lambda _, patch: patch.setattr(weights_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)),
        "0 MiB are free",
    ),
    "a writer that fails": (
        lambda _, patch: patch.setattr(weights_module.sys, "executable", "/bin/false"),
        "they cannot be written: exit code 1",
    ),
    "an unknown processor": (
        lambda _, patch: patch.setattr(weights_module, "processor_identity", lambda: ""),
        "does not say what it can do",
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_engines_keep_copies_where_sharing_is_impossible_and_the_log_says_why(
    tiny: Bundle, tmp_path: Path, monkeypatch: Patch, obstacle: str
) -> None:
    hinder, reason = OBSTACLES[obstacle]
    hinder(tmp_path / "folder", monkeypatch)
    weights, (line,) = of(tiny, tmp_path / "folder")
    assert weights.folder is None and works(weights, tiny)
    assert line["log_level"] == "warning" and reason in line["reason"]
    assert not entries(tmp_path / "folder")
