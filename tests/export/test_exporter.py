"""Export appears whole and verified, or not at all."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dragoman.export import building
from dragoman.export.arguments import ExportError
from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.exporter import export_checkpoint
from dragoman.export.progress import Progress
from dragoman.export.proof.report import ParityError, ParityReport
from dragoman.export.proof.verify import verify
from dragoman.model.checkpoint import Checkpoint, CheckpointError
from dragoman.model.generation import Language, Languages
from dragoman.model.text.byte_level import ByteTokenizer
from dragoman.model.text.sentencepiece import SentencePieceTokenizer, same_ids
from dragoman.model.text.tokenizers import Tokenizers
from tests.export.conftest import KINDS, Export, MakeCheckpoint
from tests.export.test_samples import assert_answers_are_the_models
from tests.oracles.vocabularies import trained

NAMES = ["num_encoder_layers", "num_decoder_layers", "source_vocab_size", "target_vocab_size", "pad_id", "decoder_start_id"]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        *((kind, "fp32") for kind in ("tiny", "pre-norm", "separate", "one token", "no attention", "gpt", "llama")),
        *((kind, "int8") for kind in ("tiny", "additive", "llama")),
    ],
)
def test_bundle_of_every_kind_answers_as_its_checkpoint(export: Export, make_checkpoint, kind: str, precision: Any) -> None:
    checkpoint, bundle = make_checkpoint(**KINDS[kind]), export(kind, precision)
    manifest, config = bundle.manifest, checkpoint.model.config
    is_decoder = config.architecture == "decoder"
    sizes = {name: getattr(config, name) for name in NAMES} | ({"num_encoder_layers": 0} if is_decoder else {})
    assert {name: getattr(manifest, name) for name in NAMES} == sizes
    assert (manifest.architecture, manifest.precision, manifest.has_prompts) == (config.architecture, precision, is_decoder)
    num_layers = {"transformer": config.num_decoder_layers, "rnn": config.attention != "none"}
    assert manifest.attention_layers == num_layers.get(config.architecture, 0)
    assert manifest.max_source_tokens == config.max_source_positions
    assert manifest.max_target_tokens == manifest.default_max_new_tokens == config.max_target_positions
    assert 0 < manifest.parity.max_log_prob_difference <= manifest.parity.tolerance == 1e-4
    assert manifest.parity.num_pairs == 24 and manifest.parity.max_score_difference <= manifest.parity.tolerance
    assert manifest.parity.num_token_mismatches == 0
    assert manifest.files["scorer.onnx"].size < 100_000, "its weights are those of the other graphs"
    assert_answers_are_the_models(checkpoint, bundle, 1e-4 if precision == "fp32" else 1.0)


def test_tokenisers_of_two_kinds_are_copied(make_checkpoint: MakeCheckpoint, tmp_path: Path, any_report: None) -> None:
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


def test_same_checkpoint_gives_the_same_bytes_in_another_process(checkpoint_dir: Path, exported: Path, tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from dragoman.export.exporter import export_checkpoint; "
        "export_checkpoint(*map(pathlib.Path, sys.argv[1:]))"
    )
    again = tmp_path / "elsewhere" / "again"
    command = [sys.executable, "-c", program, str(checkpoint_dir), str(again)]
    root, environment = Path(__file__).parents[2], os.environ | {"PYTHONHASHSEED": "7"}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert contents(again) == contents(exported) and (result.stdout, result.stderr) == ("", "")
    assert list(again.parent.iterdir()) == [again], "nothing else is left"
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(again.stat().st_mode) == 0o777 & ~umask


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *(("tiny", {"precision": name}, f"precision must be fp32 .*, not '{name}'") for name in ("fp8", "", "FP32")),
        ("tiny", {"name": "a b"}, "name must be"),
        ("tiny", {"precision": "fp16", "calibration": ["a"]}, "calibration go with int8, not fp16"),
        *(("additive", {"precision": name}, f"rnn .*not in {name}") for name in ("fp16", "bf16")),
        *(("llama", {"precision": name}, f"decoder .*not in {name}") for name in ("fp16", "bf16")),
        *((kind, {"precision": "int8", "cache_precision": "int8"}, "cannot be in int8") for kind in ("llama", "additive")),
        ("narrow heads", {}, "multiple of 8 wide"),
    ],
)
def test_export_that_cannot_be_done_as_asked_leaves_nothing(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, options: dict[str, Any], message: str
) -> None:
    make_checkpoint(**KINDS.get(kind, {"num_heads": 8})).save(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match=message):
        export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    with pytest.raises(CheckpointError, match=r"config\.json"):
        export_checkpoint(tmp_path / "none", tmp_path / "bundle")


def test_bundle_is_replaced_only_when_forced(checkpoint_dir: Path, bundle_dir: Path, exported: Path) -> None:
    (bundle_dir / "stale").write_text("old")
    with pytest.raises(ExportError, match="not empty"):
        export_checkpoint(checkpoint_dir, bundle_dir)
    assert (bundle_dir / "stale").exists()
    export_checkpoint(checkpoint_dir, bundle_dir, is_forced=True)
    assert contents(bundle_dir) == contents(exported)
    assert list(bundle_dir.parent.iterdir()) == [bundle_dir]


@pytest.fixture
def any_report(monkeypatch: pytest.MonkeyPatch, exported: Path) -> None:
    """Skip the gate: what is exported is not compared with the checkpoint."""
    numbers = dict.fromkeys(ParityReport.__struct_fields__[:14], 0) | {"tolerance": 1e-4}
    monkeypatch.setattr(building, "verify", lambda *_: ParityReport(**numbers))


def test_empty_folder_is_taken_and_name_and_languages_are_those_asked_for(checkpoint_dir, exported, tmp_path, any_report) -> None:
    (tmp_path / "bundle").mkdir()
    languages = Languages(source=[Language(code="en")], target=[Language(code="de")])
    bundle = export_checkpoint(checkpoint_dir, tmp_path / "bundle", name="en-de_v2.1", languages=languages)
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert manifest == bundle.manifest and (manifest.name, manifest.languages) == ("en-de_v2.1", languages)
    assert Bundle.open(exported).manifest.languages is None


def test_old_bundle_stays_when_its_successor_cannot_take_its_place(
    checkpoint_dir: Path, bundle_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch, any_report: None
) -> None:
    rename = os.rename

    def fail_second(source: Path, destination: Path) -> None:
        if destination == bundle_dir and source.name == "bundle":
            raise OSError("disk on fire")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(OSError, match="disk on fire"):
        export_checkpoint(checkpoint_dir, bundle_dir, is_forced=True)
    assert contents(bundle_dir) == contents(exported)
    assert list(bundle_dir.parent.iterdir()) == [bundle_dir]


def test_export_that_fails_the_gate_or_is_interrupted_leaves_what_was_there(
    checkpoint_dir: Path, bundle_dir: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify_another(checkpoint: Checkpoint, directory: Path, *_: Any) -> ParityReport:
        assert (directory / "decoder.weights").is_file()
        checkpoint.model.decoder.embedding.tokens.weight.data *= 1.01  # type: ignore[union-attr,operator]
        return verify(checkpoint, directory)

    def interrupt(*_: Any, **__: Any) -> ParityReport:
        raise KeyboardInterrupt

    for gate, error in ((verify_another, ParityError), (interrupt, KeyboardInterrupt)):
        monkeypatch.setattr(building, "verify", gate)
        with pytest.raises(error, match=r"off by .* the tolerance is 0.0001" if error is ParityError else None):
            export_checkpoint(checkpoint_dir, bundle_dir, is_forced=True)
        assert contents(bundle_dir) == contents(exported)
        assert list(bundle_dir.parent.iterdir()) == [bundle_dir]


def test_each_step_is_a_line_with_its_seconds_and_what_is_left() -> None:
    times, lines = iter([0.0, 2.0, 6.0, 7.0]), []
    progress = Progress({"read": 10, "prove": 20, "write": 5}, lines.append, lambda: next(times))
    for step in ("read", "prove", "write"):
        progress.done(step)
    assert lines == ["[1/3] read: 2.0 s; about 5 s to go", "[2/3] prove: 4.0 s; about 1 s to go", "[3/3] write: 1.0 s"]
