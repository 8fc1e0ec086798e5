import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dragoman.model.checkpoint import Checkpoint, CheckpointError, average_weights, save_tensors
from dragoman.model.checkpoint_folder import CheckpointFolder
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def checkpoint(request, make_model, tokenizer: ByteLevelTokenizer) -> Checkpoint:
    size = tokenizer.vocab_size
    model = make_model(
        source_vocab_size=size, target_vocab_size=size, is_projection_tied=request.param, is_embedding_shared=request.param
    )
    return Checkpoint("toy", model, Tokenizers.shared(tokenizer))


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "toy")
    return tmp_path / "toy"


def test_round_trip_is_exact(checkpoint: Checkpoint, folder: Path) -> None:
    loaded = Checkpoint.load(folder)
    assert loaded.name == "toy"
    assert loaded.model.config == checkpoint.model.config
    assert not loaded.model.training
    weights, expected = loaded.model.state_dict(), checkpoint.model.state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert loaded.tokenizers.source.encode("the dog 雪") == checkpoint.tokenizers.source.encode("the dog 雪")
    shared = loaded.model.encoder.embedding.tokens is loaded.model.decoder.embedding.tokens
    assert shared == checkpoint.model.config.is_embedding_shared


def test_loading_draws_no_random_numbers(folder: Path) -> None:
    before = torch.get_rng_state()
    Checkpoint.load(folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_weight_that_the_file_lacks_is_refused(folder: Path) -> None:
    """Nothing is drawn in its place."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["decoder.layers.0.feed_forward.inner.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.feed_forward\.inner\.weight"):
        Checkpoint.load(folder)


def test_saving_twice_writes_the_same_files(checkpoint: Checkpoint, folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"config.json", "model.safetensors", "tokenizer.json"}
    Checkpoint.load(folder).save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_half_precision_rounds_weights_and_is_read_as_single(checkpoint: Checkpoint, folder: Path, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()}
    checkpoint.save(tmp_path / "half", is_half=True)
    sizes = [(directory / "model.safetensors").stat().st_size for directory in (tmp_path / "half", folder)]
    assert 0.5 < sizes[0] / sizes[1] < 0.6
    read = Checkpoint.load(tmp_path / "half").model.state_dict()
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, before[name])  # the checkpoint itself stays as it is
        assert read[name].dtype == torch.float32
        assert torch.equal(read[name], tensor.half().float())


def test_a_weight_that_half_precision_cannot_hold_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with torch.no_grad():
        checkpoint.model.encoder.layers[0].feed_forward.inner.bias[0] = 1e5
    with pytest.raises(CheckpointError, match=r"toy: encoder\.layers\.0\.feed_forward\.inner\.bias does not fit half precision"):
        checkpoint.save(tmp_path / "half", is_half=True)
    assert not (tmp_path / "half" / "model.safetensors").exists()


def refuses(path: Path, message: str) -> pytest.RaisesExc[CheckpointError]:
    """Expect an error that begins with the file."""
    return pytest.raises(CheckpointError, match="^" + re.escape(f"{path}{message}"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("config.json", ": No such file or directory"), ("tokenizer.json", ": no such file"), ("model.safetensors", ": no such file")],
)
def test_missing_file_is_named(folder: Path, name, reason) -> None:
    (folder / name).unlink()
    with refuses(folder / name, reason):
        Checkpoint.load(folder)


@pytest.mark.parametrize("size", [0, 4, 200, -1])
def test_truncated_weights_are_named(folder: Path, size) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with refuses(path, ": "):
        Checkpoint.load(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_damaged_description_is_named(folder: Path, name, content) -> None:
    (folder / name).write_bytes(content)
    with refuses(folder / name, ": not "):
        Checkpoint.load(folder)


def change(folder: Path, **fields: Any) -> Path:
    """Change the description's top-level fields; None takes one away."""
    path = folder / "config.json"
    description = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({name: value for name, value in description.items() if value is not None}), encoding="utf-8")
    return path


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_other_format_version_is_refused(folder: Path, version) -> None:
    path = change(folder, format_version=version)
    with refuses(path, ": not a checkpoint of format version 1 or 2"):
        Checkpoint.load(folder)


def test_the_first_format_is_still_read(folder: Path) -> None:
    change(folder, format_version=1)
    loaded = Checkpoint.load(folder)
    assert (loaded.template, loaded.languages, loaded.defaults) == (Template(), None, Defaults())


def test_what_is_said_of_generation_is_kept(checkpoint: Checkpoint, folder: Path) -> None:
    template = Template(source_suffix=[4], task="put into {target}: ")
    languages = Languages(target=[Language(code="deu_Latn", names=["de"], target_prefix=[7])], default_target="deu_Latn")
    defaults = Defaults(num_beams=4, suppressed_tokens=[3], is_end_forced=True)
    replace(checkpoint, template=template, languages=languages, defaults=defaults).save(folder)
    for loaded in (Checkpoint.load(folder), CheckpointFolder.load(folder)):
        assert (loaded.template, loaded.languages, loaded.defaults) == (template, languages, defaults)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"template": {"source_prefix": [-1]}}, "source_prefix"),
        ({"languages": {"target": [{"code": ""}]}}, "target"),
        ({"languages": {"default_target": "de"}}, "no target language"),
        ({"defaults": {"num_beams": "4"}}, "num_beams"),
        ({"defaults": {"colour": 1}}, "colour"),
        ({"defaults": []}, "defaults"),
    ],
)
def test_wrong_words_of_generation_are_named(folder: Path, said, reason) -> None:
    path = change(folder, **said)
    with refuses(path, ": ") as caught:
        Checkpoint.load(folder)
    assert reason in str(caught.value)


def test_weights_are_mapped_not_copied(folder: Path) -> None:
    """A large model takes its memory once, and what is written to it does not reach the file."""
    before = (folder / "model.safetensors").read_bytes()
    model = Checkpoint.load(folder).model
    mapped = [
        line.split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(folder / "model.safetensors") in line
    ]
    spans = [(int(start, 16), int(end.split()[0], 16)) for start, end, *_ in mapped]
    assert all(any(start <= weight.data_ptr() < end for start, end in spans) for weight in model.parameters())
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_description_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("[1]", encoding="utf-8")
    with refuses(folder / "config.json", ": not a checkpoint of format version 1 or 2"):
        Checkpoint.load(folder)


@pytest.mark.parametrize(("name", "kind"), [("name", "str"), ("model", "dict")])
@pytest.mark.parametrize("value", [None, 7])
def test_missing_or_wrong_description_is_named(folder: Path, name, kind, value) -> None:
    path = change(folder, **{name: value})
    with refuses(path, f": {name} is missing or is not a {kind}"):
        Checkpoint.load(folder)


def test_unknown_model_setting_is_named(folder: Path, checkpoint: Checkpoint) -> None:
    path = change(folder, model=checkpoint.model.config.to_dict() | {"colour": "red"})
    with refuses(path, ": unknown model setting: colour"):
        Checkpoint.load(folder)


def test_vocabulary_larger_than_the_model_is_refused(folder: Path, checkpoint: Checkpoint) -> None:
    size = checkpoint.tokenizers.target.vocab_size
    change(folder, model=checkpoint.model.config.to_dict() | {"source_vocab_size": size - 1, "target_vocab_size": size - 1})
    with refuses(folder, f": the tokeniser has {size} tokens, the model room for {size - 1}"):
        Checkpoint.load(folder)


def test_ends_of_sequence_that_disagree_are_refused(folder: Path, checkpoint: Checkpoint) -> None:
    change(folder, model=checkpoint.model.config.to_dict() | {"eos_id": 5})
    with refuses(folder, f": eos_id is {checkpoint.tokenizers.target.eos_id} in the tokeniser and 5 in the model"):
        Checkpoint.load(folder)


@pytest.mark.parametrize(
    "change_of", [{"d_model": 32}, {"num_decoder_layers": 3}, {"num_encoder_layers": 1}, {"has_output_bias": True}]
)
def test_weights_of_another_model_are_named(folder: Path, checkpoint: Checkpoint, change_of) -> None:
    change(folder, model=checkpoint.model.config.to_dict() | change_of)
    with refuses(folder / "model.safetensors", ": "):
        Checkpoint.load(folder)


def test_failed_write_leaves_the_old_checkpoint(checkpoint: Checkpoint, folder: Path, monkeypatch) -> None:
    def fail(model, path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("dragoman.model.checkpoint.save_model", fail)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(folder)
    loaded = Checkpoint.load(folder)
    assert torch.equal(loaded.model.decoder.output_weight, checkpoint.model.decoder.output_weight)


def test_tensors_and_metadata_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_tensors(path, {"a": torch.arange(3)}, {"step": 4, "loss": 0.5})
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("a"), torch.arange(3))
        assert json.loads(file.metadata()["json"]) == {"step": 4, "loss": 0.5}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.safetensors"]


def test_average_is_the_mean(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5, 4) for _ in range(3)]
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for path, tensor in zip(paths, tensors, strict=True):
        save_file({"w": tensor, "b": tensor[0].clone()}, path)
    average = average_weights(paths)
    expected = torch.stack(tensors).double().mean(0).float()
    assert average["w"].dtype == torch.float32
    torch.testing.assert_close(average["w"], expected, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(average["b"], expected[0], rtol=1e-7, atol=1e-7)
    assert torch.equal(average_weights(paths[:1])["w"], tensors[0])


def test_weights_can_be_read_by_whom_other_new_files_can(folder: Path) -> None:
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode


def test_files_of_different_tensors_are_not_averaged(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", {"w": torch.ones(2)})
    save_tensors(tmp_path / "b", {"v": torch.ones(2)})
    with pytest.raises(ValueError, match="differ in v, w"):
        average_weights([tmp_path / "a", tmp_path / "b"])
