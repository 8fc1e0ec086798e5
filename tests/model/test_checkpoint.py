"""Checkpoints: what is saved is loaded to the bit, damage is named with its file, averages are means, and models grow."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint, CheckpointError, average_checkpoints, average_weights, save_tensors
from dragoman.model.checkpoint_folder import CheckpointFolder
from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.growth import grown, with_more_tokens
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def checkpoint(request, make_model, tokenizer: ByteLevelTokenizer) -> Checkpoint:
    sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), tokenizer.vocab_size)
    ties = dict.fromkeys(("is_projection_tied", "is_embedding_shared"), request.param)
    return Checkpoint("toy", make_model(**sizes, **ties), Tokenizers.shared(tokenizer))


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "toy")
    return tmp_path / "toy"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_round_trip_is_exact(checkpoint: Checkpoint, folder: Path) -> None:
    """Loading draws no random numbers, maps the weights instead of copying them, and saving again writes the same files."""
    before, state = contents(folder), torch.get_rng_state()
    loaded = Checkpoint.load(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert (loaded.name, loaded.model.config, loaded.model.training) == ("toy", checkpoint.model.config, False)
    weights, expected = loaded.model.state_dict(), checkpoint.model.state_dict()
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert loaded.tokenizers.source.encode("the dog 雪") == checkpoint.tokenizers.source.encode("the dog 雪")
    shared = loaded.model.encoder.embedding.tokens is loaded.model.decoder.embedding.tokens
    assert shared == checkpoint.model.config.is_embedding_shared
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder / WEIGHTS) in line]
    spans = [[int(place, 16) for place in line.split()[0].split("-")] for line in lines]
    assert all(any(start <= weight.data_ptr() < end for start, end in spans) for weight in loaded.model.parameters())
    with torch.no_grad():
        for weight in loaded.model.parameters():
            weight.zero_()
    assert set(before) == {CONFIG, WEIGHTS, TOKENIZER} and contents(folder) == before
    Checkpoint.load(folder).save(folder)
    assert contents(folder) == before
    assert (folder / WEIGHTS).stat().st_mode == (folder / CONFIG).stat().st_mode


def test_half_precision_rounds_weights_and_is_read_as_single(checkpoint: Checkpoint, folder: Path, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in checkpoint.model.state_dict().items()}
    checkpoint.save(tmp_path / "half", is_half=True)
    assert 0.5 < (tmp_path / "half" / WEIGHTS).stat().st_size / (folder / WEIGHTS).stat().st_size < 0.6
    read = Checkpoint.load(tmp_path / "half").model.state_dict()
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, before[name])  # the checkpoint itself stays as it is
        assert read[name].dtype == torch.float32 and torch.equal(read[name], tensor.half().float())
    with torch.no_grad():
        checkpoint.model.encoder.layers[0].feed_forward.inner.bias[0] = 1e5
    with pytest.raises(CheckpointError, match=r"toy: encoder\.layers\.0\.feed_forward\.inner\.bias does not fit half precision"):
        checkpoint.save(tmp_path / "other", is_half=True)
    assert not (tmp_path / "other" / WEIGHTS).exists()


def refuses(path: Path, message: str) -> pytest.RaisesExc[CheckpointError]:
    return pytest.raises(CheckpointError, match="^" + re.escape(f"{path}{message}"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (CONFIG, None, ": No such file or directory"),
        (TOKENIZER, None, ": no such file"),
        (WEIGHTS, None, ": no such file"),
        *((WEIGHTS, size, ": ") for size in (0, 4, 200, -1)),
        *((name, content, ": not ") for name in (CONFIG, TOKENIZER) for content in (b"{", b"\xff\xfe", b"[" * 100_000)),
        (CONFIG, b"[1]", ": not a checkpoint of format version 1 or 2"),
    ],
)
def test_a_missing_or_damaged_file_is_named(folder: Path, name: str, content: bytes | int | None, message: str) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with refuses(path, message):
        Checkpoint.load(folder)


def change(folder: Path, **fields: Any) -> Path:
    path = folder / CONFIG
    description = json.loads(path.read_text(encoding="utf-8")) | fields
    path.write_text(json.dumps({name: value for name, value in description.items() if value is not None}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(({"format_version": version}, ": not a checkpoint of format version 1 or 2") for version in (0, 3, "1", None)),
        *(({"name": value}, ": name is missing or is not a str") for value in (None, 7)),
        *(({"model": value}, ": model is missing or is not a dict") for value in (None, 7)),
        ({"format_version": None, "model_type": "t5"}, ": a checkpoint of Transformers; `dragoman import "),
        ({"template": {"source_prefix": [-1]}}, "source_prefix"),
        ({"languages": {"default_target": "de"}}, "no target language"),
        ({"defaults": {"num_beams": "4"}}, "num_beams"),
    ],
)
def test_a_wrong_description_is_named(folder: Path, fields: dict[str, Any], reason: str) -> None:
    with refuses(change(folder, **fields), ": ") as caught:
        Checkpoint.load(folder)
    assert reason in str(caught.value)


def test_a_model_that_does_not_fit_its_files_is_named(folder: Path, checkpoint: Checkpoint) -> None:
    model, size = checkpoint.model.config.to_dict(), checkpoint.tokenizers.target.vocab_size
    for fields, path, message in (
        ({"colour": "red"}, folder / CONFIG, ": unknown model setting: colour"),
        ({"eos_id": 5}, folder, f": eos_id is {checkpoint.tokenizers.target.eos_id} in the tokeniser and 5 in the model"),
        ({"source_vocab_size": size - 1, "target_vocab_size": size - 1}, folder, f": the tokeniser has {size} tokens, the model"),
        ({"d_model": 32}, folder / WEIGHTS, ": "),
        ({"num_decoder_layers": 3}, folder / WEIGHTS, ": "),
        ({"num_encoder_layers": 1}, folder / WEIGHTS, ": "),
        ({"has_output_bias": True}, folder / WEIGHTS, ": "),
    ):
        change(folder, model=model | fields)
        with refuses(path, message):
            Checkpoint.load(folder)
    change(folder, model=model)
    tensors = load_file(folder / WEIGHTS)
    del tensors["decoder.layers.0.feed_forward.inner.weight"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.feed_forward\.inner\.weight"):
        Checkpoint.load(folder)


def test_generation_is_kept_and_the_first_format_is_still_read(checkpoint: Checkpoint, folder: Path) -> None:
    template = Template(source_suffix=[4], task="put into {target}: ")
    languages = Languages(target=[Language(code="deu_Latn", names=["de"], target_prefix=[7])], default_target="deu_Latn")
    defaults = Defaults(num_beams=4, suppressed_tokens=[3], is_end_forced=True)
    change(folder, format_version=1)
    loaded: Any = Checkpoint.load(folder)
    assert (loaded.template, loaded.languages, loaded.defaults) == (Template(), None, Defaults())
    replace(checkpoint, template=template, languages=languages, defaults=defaults).save(folder)
    for loaded in (Checkpoint.load(folder), CheckpointFolder.load(folder)):
        assert (loaded.template, loaded.languages, loaded.defaults) == (template, languages, defaults)


@pytest.fixture
def save(make_model, tokenizer: ByteLevelTokenizer, tmp_path: Path):
    def save(name: str, vocabulary: ByteLevelTokenizer = tokenizer, seed: int = 0, **settings: object) -> Path:
        sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), vocabulary.vocab_size)
        Checkpoint(name, make_model(seed, **sizes, **settings), Tokenizers.shared(vocabulary)).save(tmp_path / name)
        return tmp_path / name

    return save


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "separate"])
def test_every_weight_of_an_average_is_the_mean(save, is_shared: bool, tmp_path: Path) -> None:
    shared = {"is_embedding_shared": is_shared, "is_projection_tied": is_shared}
    folders = [save(f"m{seed}", seed=seed, dropout=seed / 10, **shared) for seed in range(3)]
    average_checkpoints([*folders, folders[2]]).save(tmp_path / "mean")
    *states, mean = (Checkpoint.load(folder).model.state_dict() for folder in [*folders, tmp_path / "mean"])
    assert mean.keys() == states[0].keys()
    for name, value in mean.items():
        assert value.dtype == torch.float32 and not torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(value, (states[0][name] + states[1][name] + 2 * states[2][name]) / 4, rtol=1e-5, atol=1e-6)
    alone, only = average_checkpoints(folders[:1]), Checkpoint.load(folders[0])
    assert (alone.name, alone.model.config) == ("m0", only.model.config)
    weights = alone.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in only.model.state_dict().items())


def test_checkpoints_that_differ_are_not_averaged(save, tokenizer: ByteLevelTokenizer, tmp_path: Path) -> None:
    words = (f"{first}{second}{third}" for first, second, third in itertools.product("abcdefgh", repeat=3))
    vocabulary = ByteLevelTokenizer.train([" ".join(words)], tokenizer.vocab_size)
    first, other, second = save("first"), save("other", norm_epsilon=1e-3), save("second", vocabulary)
    with pytest.raises(CheckpointError, match=re.escape(f"{other}: its norm_epsilon differ from those of {first}")):
        average_checkpoints([first, other])
    with pytest.raises(CheckpointError, match=re.escape(f"{second}: its vocabulary differs from that of {first}")):
        average_checkpoints([first, second])
    save_tensors(tmp_path / "a", {"w": torch.ones(2)})
    save_tensors(tmp_path / "b", {"v": torch.ones(2)})
    with pytest.raises(ValueError, match="differ in v, w"):
        average_weights([tmp_path / "a", tmp_path / "b"])


LARGER = {"num_encoder_layers": 5, "num_decoder_layers": 3, "encoder_ffn_dim": 56, "decoder_ffn_dim": 40}
WIDER = {"encoder_ffn_dim": 56, "decoder_ffn_dim": 40}
UNTIED: dict[str, Any] = {"is_embedding_shared": False, "is_projection_tied": False}
SENTENCES = [f"the {first}{second} runs" for first in ("dog", "cat", "bird", "horse") for second in ("house", "field", "snow")] * 9


def other(model: Transformer, **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(model.config.to_dict() | changes)


def logits(model: Transformer) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    sources, targets = (torch.randint(3, 20, (4, length), generator=generator) for length in (9, 7))
    return model(sources, torch.tensor([9, 1, 4, 6]), targets)


@pytest.mark.parametrize(
    ("switches", "changes"),
    [
        ({"norm": "pre", "activation": "gelu"} | UNTIED, LARGER),
        ({"norm": "pre", "has_output_bias": True, "positions": "learned"}, {"num_decoder_layers": 6}),
        ({"norm": "post"}, WIDER),
    ],
)
def test_a_grown_model_computes_the_same(make_model, switches: dict[str, Any], changes: dict[str, int]) -> None:
    small = make_model(**switches)
    large = grown(small, other(small, **changes)).eval()
    assert {name: getattr(large.config, name) for name in changes} == changes
    torch.testing.assert_close(logits(large), logits(small), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("switches", "changes", "complaint"),
    [
        ({}, {"encoder_ffn_dim": 16}, "its encoder_ffn_dim is 24, the configuration's 16: models only grow"),
        ({}, {"num_heads": 2}, "its num_heads is 4, the configuration's 2"),
        ({}, {"d_model": 32}, "its d_model is 16, the configuration's 32"),
        ({"norm": "pre"}, {"num_encoder_layers": 1}, "its num_encoder_layers is 2, the configuration's 1"),
        ({"norm": "pre"}, {"num_encoder_layers": 3, "norm": "post"}, "its norm is pre, the configuration's post"),
        ({"norm": "post"}, {"num_decoder_layers": 3}, "its num_decoder_layers is 2, .* 3: post-norm models get no more layers"),
    ],
)
def test_other_changes_are_refused(make_model, switches: dict[str, Any], changes: dict[str, Any], complaint: str) -> None:
    small = make_model(**switches)
    with pytest.raises(ModelConfigError, match=complaint):
        grown(small, other(small, **changes))


@pytest.mark.parametrize("switches", [{}, UNTIED | {"has_output_bias": True}], ids=["shared", "separate"])
def test_more_tokens_have_the_mean_of_their_pieces(make_model, switches: dict[str, Any]) -> None:
    vocabulary = ByteLevelTokenizer.train(SENTENCES, 275)
    model = make_model(source_vocab_size=275, target_vocab_size=275, **switches)
    larger = vocabulary.extended(SENTENCES, 290)
    languages = Languages(source=[Language(code="en")], target=[Language(code="de")])
    large = with_more_tokens(Checkpoint("toy", model, Tokenizers.shared(vocabulary), languages=languages), larger)
    assert (large.name, large.tokenizers.byte_level(), large.model.training, large.languages) == ("toy", larger, False, languages)
    torch.testing.assert_close(logits(large.model)[..., :275], logits(model))
    old, new = model.state_dict(), large.model.state_dict()
    grown_tables = [name for name in new if len(new[name]) == 290]
    assert len(grown_tables) == (4 if "has_output_bias" in switches else 2)
    words = {i: text[1:] for i in range(275, 290) if (text := larger.token_bytes(i).decode()).startswith(" ")}
    assert words
    for i, word in words.items():
        pieces = vocabulary.encode(word)  # which puts the space before it
        for name in grown_tables:
            torch.testing.assert_close(new[name][i], old[name][pieces].mean(0))
    padded = Checkpoint("toy", make_model(source_vocab_size=280, target_vocab_size=280), Tokenizers.shared(vocabulary))
    with pytest.raises(ModelConfigError, match="toy: the model has more tokens than the 275 of its vocabulary"):
        with_more_tokens(padded, larger)
