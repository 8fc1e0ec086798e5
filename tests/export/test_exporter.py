"""Export appears whole and verified, or not at all."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.vocabularies import trained
from dragoman.export import building
from dragoman.export.arguments import ExportError
from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.exporter import export_checkpoint
from dragoman.export.parity import ParityError, ParityReport
from dragoman.export.progress import Progress
from dragoman.export.verify import verify
from dragoman.model.checkpoint import Checkpoint, CheckpointError
from dragoman.model.generation import Language, Languages
from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.id_tables import same_ids
from dragoman.model.text.sentencepiece import SentencePieceTokenizer
from dragoman.model.text.tokenizers import Tokenizers

MakeCheckpoint = Callable[..., Checkpoint]

VARIANTS: dict[str, dict[str, Any]] = {
    "pre-norm, GELU, learned positions with offset, embedding norm, output bias, unscaled, deeper encoder": {
        "norm": "pre",
        "activation": "gelu",
        "positions": "learned",
        "position_offset": 2,
        "has_embedding_norm": True,
        "has_output_bias": True,
        "is_embedding_scaled": False,
        "num_encoder_layers": 3,
        "num_decoder_layers": 1,
    },
    "SiLU, separate vocabularies, own projection, deeper decoder, start at padding": {
        "activation": "silu",
        "is_embedding_shared": False,
        "is_projection_tied": False,
        "target_vocab_size": 290,
        "num_encoder_layers": 1,
        "num_decoder_layers": 3,
        "pad_id": 289,
        "decoder_start_id": 289,
    },
    "one token in, one token out": {"max_source_positions": 1, "max_target_positions": 1, "num_heads": 1},
}


def test_tokenisers_of_another_library_go_with_the_model(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """Of two sides and two kinds: a checkpoint keeps them, and the bundle has the same files."""
    model = make_checkpoint(target_vocab_size=400, is_embedding_shared=False, is_projection_tied=False, eos_id=1, pad_id=0).model
    spoken = trained(model_type="unigram", vocab_size=200, unk_id=0, eos_id=1, bos_id=2)
    tokenizers = Tokenizers(SentencePieceTokenizer(spoken, same_ids(spoken), 1), ByteTokenizer())
    Checkpoint("tiny", model, tokenizers).save(tmp_path / "checkpoint")
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle")
    assert {path.name for path in (bundle.directory / "tokenizer").iterdir()} == {"text.json", "source.model"}
    for loaded in (Checkpoint.load(tmp_path / "checkpoint").tokenizers, Bundle.open(tmp_path / "bundle").tokenizers()):
        assert loaded.is_same(tokenizers)
        assert loaded.target.decode(loaded.target.encode("grün </s>")) == "grün </s>"
    (bundle.directory / "tokenizer/source.model").write_bytes(spoken[:-1])
    with pytest.raises(BundleError, match=r"tokenizer/source\.model"):
        Bundle.open(tmp_path / "bundle").tokenizers()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("switches", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_variant_passes_the_parity_gate(make_checkpoint: MakeCheckpoint, tmp_path: Path, switches: dict[str, Any]) -> None:
    checkpoint = make_checkpoint(**switches)
    checkpoint.save(tmp_path / "checkpoint")
    manifest = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle").manifest
    config = checkpoint.model.config
    for field in (
        "num_encoder_layers",
        "num_decoder_layers",
        "source_vocab_size",
        "target_vocab_size",
        "pad_id",
        "decoder_start_id",
    ):
        assert getattr(manifest, field) == getattr(config, field)
    assert manifest.max_source_tokens == config.max_source_positions
    assert manifest.max_target_tokens == manifest.default_max_new_tokens == config.max_target_positions
    assert 0 < manifest.parity.max_log_prob_difference <= manifest.parity.tolerance == 1e-4
    assert manifest.parity.num_pairs == 24 and manifest.parity.max_score_difference <= manifest.parity.tolerance
    assert manifest.files["scorer.onnx"].size < 100_000, "its weights are those of the other graphs"


def test_same_checkpoint_gives_the_same_bytes_in_another_process(checkpoint_dir: Path, exported: Path, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from dragoman.export.exporter import export_checkpoint; "
        "export_checkpoint(*map(pathlib.Path, sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, str(checkpoint_dir), str(tmp_path / "elsewhere" / "again")]
    root = Path(__file__).parents[2]
    result = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True, timeout=300
    )
    assert contents(tmp_path / "elsewhere" / "again") == contents(exported)
    assert (result.stdout, result.stderr) == ("", "")


def test_bundle_is_readable_by_whom_the_umask_allows(exported: Path) -> None:
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(exported.stat().st_mode) == 0o777 & ~umask


def test_nothing_else_is_left_beside_the_bundle(exported: Path) -> None:
    assert list(exported.parent.iterdir()) == [exported]


def test_languages_that_are_said_take_the_place_of_the_checkpoints(checkpoint_dir: Path, exported: Path, tmp_path: Path) -> None:
    languages = Languages(source=[Language(code="en")], target=[Language(code="de")])
    manifest = export_checkpoint(checkpoint_dir, tmp_path / "out", languages=languages).manifest
    assert manifest.languages == languages
    assert Bundle.open(exported).manifest.languages is None


@pytest.mark.parametrize("precision", ["fp8", "", "FP32"])
def test_other_precision_is_refused(checkpoint_dir: Path, tmp_path: Path, precision: Any) -> None:
    with pytest.raises(ExportError, match=f"precision must be fp32 .*, not '{precision}'"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", precision)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a b", "../x", "a\n", "x" * 129])
def test_name_that_cannot_be_served_is_refused(checkpoint_dir: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="name must be"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", name=name)


def test_heads_that_the_operator_cannot_do_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    make_checkpoint(num_heads=8).save(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="multiple of 8 wide"):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle")


def test_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        export_checkpoint(tmp_path / "none", tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_parent_that_is_a_file_is_refused(checkpoint_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="file"):
        export_checkpoint(checkpoint_dir, tmp_path / "file" / "bundle")


@pytest.mark.parametrize("is_forced", [False, True])
def test_output_that_is_no_bundle_is_never_replaced(checkpoint_dir: Path, tmp_path: Path, is_forced: bool) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "file")
    for name in ("full", "file", "dangling"):
        with pytest.raises(ExportError, match="exists and is not"):
            export_checkpoint(checkpoint_dir, tmp_path / name, is_forced=is_forced)
    assert (tmp_path / "full" / "letter.txt").read_text() == (tmp_path / "file").read_text() == "mine"


def test_bundle_is_replaced_only_when_forced(checkpoint_dir: Path, bundle_dir: Path, exported: Path) -> None:
    (bundle_dir / "stale").write_text("old")
    with pytest.raises(ExportError, match="not empty"):
        export_checkpoint(checkpoint_dir, bundle_dir)
    assert (bundle_dir / "stale").exists()
    export_checkpoint(checkpoint_dir, bundle_dir, is_forced=True)
    assert contents(bundle_dir) == contents(exported)
    assert list(bundle_dir.parent.iterdir()) == [bundle_dir]


def test_old_bundle_stays_when_its_successor_cannot_take_its_place(
    checkpoint_dir: Path, bundle_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def fail_second(source: Path, destination: Path) -> None:
        if destination == bundle_dir and source.name == "bundle":
            raise OSError("disk on fire")
        rename(source, destination)

    monkeypatch.setattr(building, "verify", lambda checkpoint, directory, progress: REPORT)
    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(OSError, match="disk on fire"):
        export_checkpoint(checkpoint_dir, bundle_dir, is_forced=True)
    assert contents(bundle_dir) == contents(exported)
    assert list(bundle_dir.parent.iterdir()) == [bundle_dir]


def test_empty_directory_is_taken(checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "verify", lambda checkpoint, directory, progress: REPORT)
    (tmp_path / "bundle").mkdir()
    bundle = export_checkpoint(checkpoint_dir, tmp_path / "bundle", name="en-de_v2.1")
    assert Bundle.open(tmp_path / "bundle").manifest == bundle.manifest
    assert bundle.manifest.name == "en-de_v2.1"


def test_interrupted_export_leaves_nothing(checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(checkpoint: Checkpoint, directory: Path, progress: Progress) -> ParityReport:
        assert (directory / "decoder.weights").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_export_that_fails_the_gate_leaves_nothing(
    checkpoint_dir: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_another(checkpoint: Checkpoint, directory: Path, progress: Progress) -> ParityReport:
        checkpoint.model.decoder.embedding.tokens.weight.data *= 1.01
        return verify(checkpoint, directory)

    monkeypatch.setattr(building, "verify", verify_another)
    shutil.copytree(exported, tmp_path / "bundle")
    with pytest.raises(ParityError, match=r"off by .* the tolerance is 0.0001"):
        export_checkpoint(checkpoint_dir, tmp_path / "bundle", is_forced=True)
    assert contents(tmp_path / "bundle") == contents(exported)
    assert list(tmp_path.iterdir()) == [tmp_path / "bundle"]


REPORT = ParityReport(
    tolerance=1e-4,
    max_log_prob_difference=0.0,
    num_rows=1,
    num_positions=1,
    num_steps=1,
    max_batch_rows=1,
    max_position=0,
    num_rows_alone=1,
    num_sentences=1,
    num_tokens=1,
    num_token_mismatches=0,
    num_pairs=1,
    max_score_difference=0.0,
    max_attention_difference=0.0,
)
