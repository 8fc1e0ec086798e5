import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from dragoman.model.training.config import TrainingConfigError
from dragoman.model.training.file import TrainingFile, to_toml

DATA = """
[data]
source = "a"
target = "b"
validation_source = "c"
validation_target = "d"
"""


def load(folder: Path, text: str, name: str = "toy.toml") -> TrainingFile:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return TrainingFile.load(path)


def test_paths_of_data_are_enough(tmp_path: Path) -> None:
    file = load(tmp_path, DATA)
    config = file.complete({"tokenizer.vocab_size": 400, "training.max_steps": 7, "model.d_model": 64})
    assert (config.name, config.tokenizer.vocab_size, config.training.max_steps) == ("toy", 400, 7)
    assert config.model == {"d_model": 64}


def test_what_is_stated_wins_over_what_is_chosen(tmp_path: Path) -> None:
    file = load(tmp_path, f'name = "other"\n{DATA}[training]\nmax_steps = 3\n[model]\nd_model = 8')
    config = file.complete({"tokenizer.vocab_size": 400, "training.max_steps": 7, "model.d_model": 64, "model.norm": "pre"})
    assert (config.name, config.training.max_steps, config.model) == ("other", 3, {"d_model": 8, "norm": "pre"})
    assert {"training.max_steps", "model.d_model", "data.source"} <= file.stated.keys()


def test_a_file_whose_name_names_no_model_must_have_one(tmp_path: Path) -> None:
    with pytest.raises(TrainingConfigError, match=r"My Model\.toml: name: missing$"):
        load(tmp_path, DATA, "My Model.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{DATA}extra = 1", ", line 7: data.extra: unknown setting"),
        (f"{DATA}\n[training]\nseed = -1", ", line 9: training.seed: Input should be greater than or equal to 0"),
        (f"{DATA}[training]\nmax_steps = 0", ", line 8: training.max_steps: Input should be greater than or equal to 1"),
        (f"training = 3\n{DATA}", ", line 1: training: "),
        (f"model = 3\n{DATA}", ", line 1: model: "),
        ("[data]\nsource = 'a'\ntarget = 'b'\nvalidation_source = 'c'", ", line 1: data.validation_target: missing"),
        ("", ": data: missing"),
        (
            f"{DATA}[training]\nseed = -1\n[tokenizer]\nsize = 3",
            ", line 10: tokenizer.size: unknown setting; line 8: training.seed: ",
        ),
        (f'{DATA}"a\\nb" = 1', ", line 2: data.a\\nb: unknown setting"),
        (f'"a\\nb" = 1{DATA}', ": a\\nb: unknown setting"),
        ("[[data]]\nsource = 'a'", ", line 1: data: must be a table"),
        ("data = 3", ", line 1: data: must be a table"),
        (f"{DATA}[training]\nlearning_rate = inf", ", line 8: training.learning_rate: Input should be a finite number"),
        ("name = ", ": not TOML: Invalid value (at end of document)"),
        (f"{DATA}source = 'again'", ": not TOML: Cannot overwrite a value (at "),
        ("a = " + "[" * 5000, ": not TOML: "),
    ],
)
def test_what_is_wrong_is_named_in_a_line_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TrainingConfigError) as caught:
        load(tmp_path, text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'toy.toml'}{said}") and "\n" not in message


def test_bytes_that_are_not_utf8_are_counted_to_their_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"# fine\n\nname = '\xff'\n")
    with pytest.raises(TrainingConfigError, match=r"bad\.toml: not TOML: not UTF-8 \(at line 3\)$"):
        TrainingFile.load(tmp_path / "bad.toml")


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbf" + DATA.encode())
    assert TrainingFile.load(tmp_path / "marked.toml").fields["name"] == "marked"


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(TrainingConfigError, match=r": Is a directory$"):
        TrainingFile.load(tmp_path)


def test_a_complete_configuration_written_as_toml_says_the_same(tmp_path: Path) -> None:
    odd = f'initial_checkpoint = "a\\"b\\\\c\\tä\\u007f"\n{DATA}[model]\nnorm = "pre"\nis_embedding_shared = false\ndropout = 0.0'
    config = load(tmp_path, odd).complete({"tokenizer.vocab_size": 400, "training.max_steps": 7, "training.learning_rate": 1e-9})
    text = to_toml(asdict(config), {"training.max_steps": "chosen by rule"})
    assert tomllib.loads(text) == asdict(config)
    assert "max_steps = 7  # chosen by rule\n" in text
    assert load(tmp_path, text, "again.toml").complete({}) == config
