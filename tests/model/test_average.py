import itertools
import re
from pathlib import Path

import pytest
import torch

from dragoman.model.average import average_checkpoints
from dragoman.model.checkpoint import Checkpoint, CheckpointError
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers


@pytest.fixture
def save(make_model, tokenizer: ByteLevelTokenizer, tmp_path: Path):
    """Write a checkpoint of the given seed and return its folder."""

    def save(name: str, vocabulary: ByteLevelTokenizer = tokenizer, seed: int = 0, **settings: object) -> Path:
        size = vocabulary.vocab_size
        model = make_model(source_vocab_size=size, target_vocab_size=size, **settings)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms begin alike
                parameter.add_(torch.randn_like(parameter))
        Checkpoint(name, model, Tokenizers.shared(vocabulary)).save(tmp_path / name)
        return tmp_path / name

    return save


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "separate"])
def test_every_weight_is_the_mean(save, is_shared: bool, tmp_path: Path) -> None:
    shared = {"is_embedding_shared": is_shared, "is_projection_tied": is_shared}
    folders = [save(f"m{seed}", seed=seed, dropout=seed / 10, **shared) for seed in range(3)]
    average_checkpoints([*folders, folders[2]]).save(tmp_path / "mean")
    *states, mean = (Checkpoint.load(folder).model.state_dict() for folder in [*folders, tmp_path / "mean"])
    assert mean.keys() == states[0].keys()
    for name, value in mean.items():
        assert not torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(value, (states[0][name] + states[1][name] + 2 * states[2][name]) / 4, rtol=1e-5, atol=1e-6)


def test_mean_of_one_is_itself(save) -> None:
    folder = save("only")
    mean, only = average_checkpoints([folder]), Checkpoint.load(folder)
    assert (mean.name, mean.model.config) == ("only", only.model.config)
    weights = mean.model.state_dict()
    assert all(torch.equal(weights[name], value) for name, value in only.model.state_dict().items())


def test_another_model_is_refused(save) -> None:
    first, other = save("first"), save("other", norm_epsilon=1e-3)
    with pytest.raises(CheckpointError, match=re.escape(f"{other}: its norm_epsilon differ from those of {first}")):
        average_checkpoints([first, other])


def test_another_vocabulary_is_refused(save, tokenizer: ByteLevelTokenizer) -> None:
    words = (f"{first}{second}{third}" for first, second, third in itertools.product("abcdefgh", repeat=3))
    other = ByteLevelTokenizer.train([" ".join(words)], tokenizer.vocab_size)
    assert other.vocab_size == tokenizer.vocab_size
    first, second = save("first"), save("second", other)
    with pytest.raises(CheckpointError, match=re.escape(f"{second}: its vocabulary differs from that of {first}")):
        average_checkpoints([first, second])
