"""Models that grow: layers and widths that compute the same at first, and tokens with the mean of their pieces."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.generation import Language, Languages
from dragoman.model.growth import grown, with_more_tokens
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

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
