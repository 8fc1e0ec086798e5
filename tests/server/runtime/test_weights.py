"""Weights that engines share: the same bits as with copies of their own, mapped, and copies where sharing cannot be."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog

from dragoman.export.bundle import ENCODER_WEIGHTS_FILE, Bundle, BundleError
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.settings import DeviceSettings
from dragoman.server.runtime import weights as weights_module
from dragoman.server.runtime.onnx import OnnxRunner
from dragoman.server.runtime.scorer import OnnxScorer
from dragoman.server.runtime.weights import Weights
from dragoman.server.runtime.weights_layout import WEIGHTS_FILE

MAX_ROWS = 17
PAIR = [7, 8, 9, 1], [10, 11, 1]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def bundle(request: pytest.FixtureRequest, shipped_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(shipped_bundle("en-de", request.param))


@pytest.fixture(scope="module")
def folder(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder for this bundle alone, which is filled once."""
    return str(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def tiny(tiny_bundle: Path) -> Bundle:
    return Bundle.open(tiny_bundle)


@contextlib.contextmanager
def told() -> Iterator[list[Any]]:
    """Collect what is said about weights."""
    found: list[Any] = []
    with structlog.testing.capture_logs() as lines:
        yield found
    found += [line for line in lines if "weights" in line["event"]]


def answers(runner: OnnxRunner, bundle: Bundle, num_rows: int) -> list[np.ndarray]:
    """Return what some steps after some sources say, and what the encoder said of them."""
    manifest, found = bundle.manifest, []
    random = np.random.default_rng(num_rows)
    sources = [[*random.integers(4, manifest.source_vocab_size, 1 + row).tolist(), manifest.eos_id] for row in range(num_rows)]
    runner.prefill(sources, list(range(num_rows)))
    found += [cache[:num_rows].copy() for cache in runner.cache.cross_kv.values()]
    for position in range(3):
        tokens = random.integers(4, manifest.target_vocab_size, num_rows)
        candidates = runner.step(tokens, np.full(num_rows, position, np.int64), 5)
        found += [candidates.ids.copy(), candidates.log_probs.copy()]
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_are_those_of_copies_in_every_batch(bundle: Bundle, folder: str, num_threads: int) -> None:
    shared = Weights.of(bundle, folder)
    assert shared.is_shared
    theirs, ours = OnnxRunner(bundle, MAX_ROWS, num_threads), OnnxRunner(bundle, MAX_ROWS, num_threads, shared)
    for num_rows in (1, 2, 3, 4, 7, 8, 16, 17):
        for a, b in zip(answers(theirs, bundle, num_rows), answers(ours, bundle, num_rows), strict=True):
            np.testing.assert_array_equal(a, b)


def test_scores_are_those_of_copies(bundle: Bundle, folder: str) -> None:
    scores = []
    for weights in (Weights(bundle), Weights.of(bundle, folder)):
        scorer = OnnxScorer(bundle, 1, weights=weights)
        scorer.open()
        scores.append(scorer.score(*PAIR))
    for a, b in zip(*scores, strict=True):
        np.testing.assert_array_equal(a, b)


def mapped(directory: Path) -> dict[str, int]:
    """Return how much of each file of a folder this process has mapped and changed, in KiB."""
    found: dict[str, int] = {}
    name = ""
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            path = Path(line.split()[-1])
            name = path.name if path.parent == directory else ""
        elif name and line.startswith("Anonymous:"):
            found[name] = found.get(name, 0) + int(line.split()[1])
    return found


def test_what_is_shared_is_mapped_and_no_page_of_it_is_copied(bundle: Bundle, folder: str) -> None:
    runner = OnnxRunner(bundle, MAX_ROWS, 1, Weights.of(bundle, folder))
    scorer = OnnxScorer(bundle, 1, weights=runner.weights)
    scorer.open()
    answers(runner, bundle, MAX_ROWS)
    scorer.score(*PAIR)
    (entry,) = entries(folder)
    assert mapped(entry) == {WEIGHTS_FILE: 0}


def entries(folder: str | Path) -> list[Path]:
    return [path.parent for path in Path(folder).glob(f"*/*/{WEIGHTS_FILE}")]


def of(bundle: Bundle, folder: str | Path) -> tuple[Weights, list[Any]]:
    """Return its weights and what was said about them."""
    with told() as lines:
        weights = Weights.of(bundle, str(folder))
    return weights, lines


def opens(weights: Weights, bundle: Bundle) -> bool:
    """Tell whether a runner computes with them what it computes with copies."""
    a, b = (answers(OnnxRunner(bundle, 3, 1, each), bundle, 3) for each in (Weights(bundle), weights))
    return all(np.array_equal(left, right) for left, right in zip(a, b, strict=True))


def test_an_engine_and_its_scorer_share_what_settings_say(tiny: Bundle, tmp_path: Path) -> None:
    for settings in (DeviceSettings(), DeviceSettings(weights_cache=str(tmp_path))):
        runner = load_runner(tiny, Limits(3, 9, 999, 99), 1, settings, is_warmed_up=False)
        assert isinstance(runner, OnnxRunner)
        load_scorer(tiny, 1, runner).open()
        assert runner.weights.is_shared is bool(settings.weights_cache)
    (entry,) = entries(tmp_path)
    assert mapped(entry).keys() == {WEIGHTS_FILE}


def test_files_are_made_once_and_are_nobody_elses_to_read(tiny: Bundle, tmp_path: Path) -> None:
    first, _ = of(tiny, tmp_path)
    (entry,) = entries(tmp_path)
    made = {path.name: path.stat() for path in entry.iterdir()}
    second, (line,) = of(tiny, tmp_path)
    assert {path.name: path.stat().st_ino for path in entry.iterdir()} == {name: found.st_ino for name, found in made.items()}
    assert not any(found.st_mode & 0o077 for name, found in made.items() if name != "entry.json")
    assert (line["event"], line["log_level"], line["folder"]) == ("weights are shared", "info", str(entry))
    assert first.is_shared and second.is_shared and opens(second, tiny)


def test_a_damaged_file_is_never_computed_with(tiny: Bundle, tmp_path: Path) -> None:
    Weights.of(tiny, str(tmp_path))
    (entry,) = entries(tmp_path)
    path = entry / WEIGHTS_FILE
    before = path.read_bytes()
    path.write_bytes(bytes(byte ^ 0x55 for byte in before))
    weights, _ = of(tiny, tmp_path)
    assert weights.is_shared and opens(weights, tiny) and path.read_bytes() == before


def test_files_depend_on_all_that_their_order_depends_on(tiny: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [Weights.of(tiny, str(tmp_path))]
    for name, value in (("processor_identity", lambda: "flags: another"), ("onnxruntime.__version__", "0.1")):
        with monkeypatch.context() as patch:
            patch.setattr(f"dragoman.server.runtime.weights.{name}", value)
            kept.append(Weights.of(tiny, str(tmp_path)))
        assert len(entries(tmp_path)) == len(kept), name


@pytest.mark.parametrize(("precision", "num_entries"), [("fp32", 1), ("int8", 2)])
def test_files_depend_on_how_products_are_computed_that_may_overflow(
    shipped_bundle: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, num_entries: int
) -> None:
    bundle, kept = Bundle.open(shipped_bundle("en-de", precision)), []
    for may_overflow in (False, True):
        for module in ("server.runtime.weights", "export.session"):
            monkeypatch.setattr(f"dragoman.{module}.overflows_in_8_bits", lambda may_overflow=may_overflow: may_overflow)
        kept.append(Weights.of(bundle, str(tmp_path)))
    assert len(entries(tmp_path)) == num_entries and all(weights.is_shared for weights in kept)


def broken_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module.sys, "executable", "/bin/false")


OBSTACLES: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], object], str]] = {
    "a file": (lambda folder, _: folder.write_text(""), "Not a directory"),
    "others may look": (lambda folder, _: (folder / f"dragoman-{os.geteuid()}").mkdir(0o755, parents=True), "nobody else's"),
    "no room": (
        lambda _, monkeypatch: monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)),
        "0 MiB are free",
    ),
    "a writer that fails": (lambda _, monkeypatch: broken_writer(monkeypatch), "they cannot be written: exit code 1"),
    "an unknown processor": (
        lambda _, monkeypatch: monkeypatch.setattr(weights_module, "processor_identity", lambda: ""),
        "does not say what it can do",
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_where_sharing_cannot_be_each_has_a_copy_and_one_line_says_why(
    tiny: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    hinder, reason = OBSTACLES[obstacle]
    hinder(tmp_path / "folder", monkeypatch)
    weights, (line,) = of(tiny, tmp_path / "folder")
    assert not weights.is_shared and opens(weights, tiny)
    assert line["log_level"] == "warning" and reason in line["reason"]
    assert not entries(tmp_path / "folder")


def test_a_writer_without_room_fails_and_leaves_nothing(tiny: Bundle, tmp_path: Path) -> None:
    """A limit of a file's size is met as a full disk is: the write fails."""
    script = "import resource, signal, sys\n"
    script += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    script += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    script += "from dragoman.server.runtime.weights import main\nmain()\n"
    found = subprocess.run([sys.executable, "-c", script, str(tiny.directory), str(tmp_path)], stderr=subprocess.PIPE)
    assert found.returncode and b"Failed to write external initializers" in found.stderr


def test_another_bundle_in_its_place_is_not_kept_as_this_one(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the first one would have found the other's weights under its key, whole and of the right digests."""
    bundle = Bundle.open(bundle_copy)
    path = bundle_copy / ENCODER_WEIGHTS_FILE
    before, write = path.read_bytes(), weights_module._run_writer

    def write_another(*args: Any) -> None:
        path.write_bytes(before[::-1])
        write(*args)

    monkeypatch.setattr(weights_module, "_run_writer", write_another)
    with pytest.raises(BundleError, match=f"{ENCODER_WEIGHTS_FILE}: SHA-256"):
        Weights.of(bundle, str(tmp_path / "cache"))
    assert not entries(tmp_path / "cache")
    monkeypatch.undo()
    path.write_bytes(before)
    weights, _ = of(bundle, tmp_path / "cache")
    assert weights.is_shared and opens(weights, bundle)


def test_without_a_folder_nothing_is_said_or_written(tiny: Bundle) -> None:
    weights, lines = of(tiny, "")
    assert not weights.is_shared and not lines
