"""Converted settings, searched with as docs/api.md says, give the answers of Transformers' `generate`."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dragoman.model.generation import Defaults
from dragoman.model.importers.conversion import Target
from dragoman.model.importers.defaults import convert

VOCABULARY = 60
PAD, EOS, FORCED = 0, 1, 5
SIZES = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
SOURCES = [[7, 8, 9, EOS], [20, 30, 40, 50, 51, EOS], [33, EOS]]


def _random(model: Any, end_bias: float) -> Any:
    """Give every parameter random values; a bias makes answers end, but not at once."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
    model.final_logits_bias.zero_()
    model.final_logits_bias[0, EOS] = end_bias
    model.final_logits_bias[0, PAD] = end_bias  # so that padding would be picked, where nothing rules it out
    return model.eval()


@pytest.fixture(scope="module")
def marian() -> Any:
    config = transformers.MarianConfig(**SIZES, decoder_start_token_id=PAD, activation_function="swish")
    return _random(transformers.MarianMTModel(config), 2.0)


@pytest.fixture(scope="module")
def bart() -> Any:
    config = transformers.BartConfig(**SIZES, decoder_start_token_id=EOS, bos_token_id=FORCED)
    return _random(transformers.BartForConditionalGeneration(config), 2.0)


@dataclass
class Search:
    """docs/api.md in a few lines, over the model's logits: no cache, no batch."""

    model: Any
    source: list[int]
    start: int
    forced: list[int]
    defaults: Defaults
    padding: str

    def log_probs(self, tokens: list[int]) -> Tensor:
        """Return the model's log p of the next token, with padding as the network has it."""
        prefix = torch.tensor([[self.start, *self.forced, *tokens]])
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([self.source]), decoder_input_ids=prefix).logits[0, -1]
        if self.padding == "excluded":
            logits[PAD] = -torch.inf
        values = logits.log_softmax(-1)
        if self.padding == "masked":
            values[PAD] = -torch.inf
        return values

    def values(self, tokens: list[int]) -> Tensor:
        """Return v of the next token: log p after the rules."""
        values, answer, wanted = self.log_probs(tokens), [*self.forced, *tokens], self.defaults
        seen = list(set(answer))
        values[seen] *= wanted.repetition_penalty or 1.0
        values[wanted.suppressed_tokens] = -torch.inf
        if len(tokens) < (wanted.min_new_tokens or 0):
            values[EOS] = -torch.inf
        size = wanted.no_repeat_ngram_size or 0
        for i in range(len(answer) - size + 1) if size else ():
            if size == 1 or answer[i : i + size - 1] == answer[-(size - 1) :]:
                values[answer[i + size - 1]] = -torch.inf
        if wanted.is_end_forced and len(tokens) == self.most - 1:
            values[:] = -torch.inf
            values[EOS] = 0
        return values

    @property
    def most(self) -> int:
        """The limit."""
        return self.defaults.max_new_tokens or 19

    def greedy(self) -> list[int]:
        """Return the greedy answer."""
        tokens: list[int] = []
        while len(tokens) < self.most and tokens[-1:] != [EOS]:
            tokens.append(int(self.values(tokens).argmax()))
        return tokens

    def beams(self) -> list[list[int]]:
        """Return the answers of beam search, best first."""
        wanted = self.defaults
        width, alpha = wanted.num_beams or 1, 1.0 if wanted.length_penalty is None else wanted.length_penalty
        live: list[tuple[float, list[int]]] = [(0.0, [])]
        finished: list[tuple[float, list[int]]] = []
        for length in range(1, self.most + 1):
            extended = [
                (total + value, [*tokens, token])
                for total, tokens in live
                for token, value in enumerate(self.values(tokens).tolist())
            ]
            best = sorted(extended, key=lambda one: -one[0])[: 2 * width]
            scale = (length + len(self.forced)) ** alpha
            is_last = length == self.most
            finished += [(total / scale, tokens) for total, tokens in best[:width] if tokens[-1] == EOS or is_last]
            finished = sorted(finished, key=lambda one: -one[0])[:width]
            live = [one for one in best if one[1][-1] != EOS][:width]
            if len(finished) == width and (wanted.early_stopping or not live or live[0][0] / scale <= finished[-1][0]):
                break
        return [tokens for _, tokens in finished][: wanted.num_return_sequences or 1]


def ours(model: Any, source: list[int], fields: dict[str, Any]) -> list[list[int]]:
    forced = [fields["forced_bos_token_id"]] if "forced_bos_token_id" in fields else []
    start = model.config.decoder_start_token_id
    target = Target(
        pad_id=PAD, eos_id=EOS, decoder_start_id=start, vocab_size=VOCABULARY, max_target_tokens=64, num_forced=len(forced)
    )
    converted = convert(fields, target)
    search = Search(model, source, start, forced, converted.defaults, converted.padding)
    answers = [search.greedy()] if (converted.defaults.num_beams or 1) == 1 else search.beams()
    return [[*forced, *tokens] for tokens in answers]


def theirs(model: Any, source: list[int], fields: dict[str, Any]) -> list[list[int]]:
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": model.config.decoder_start_token_id}
    model.generation_config = transformers.GenerationConfig(**{**special, **fields})
    rows = model.generate(torch.tensor([source])).tolist()
    return [row[1 : row.index(EOS, 1) + 1] if EOS in row[1:] else row[1:] for row in rows]


SETTINGS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": 9},
    "max_new_tokens": {"max_new_tokens": 9},
    "min_length": {"max_length": 20, "min_length": 8},
    "min_new_tokens": {"max_length": 20, "min_new_tokens": 8},
    "no_repeat": {"max_length": 20, "min_length": 10, "no_repeat_ngram_size": 2, "bad_words_ids": [[PAD]]},
    "forced_end": {"max_length": 7, "min_length": 6, "forced_eos_token_id": EOS},
    "suppressed": {"max_length": 12, "suppress_tokens": [3, 4, 10, 11, 12, 13, 14, 15, 16]},
    "bad_words": {"max_length": 12, "bad_words_ids": [[PAD], [10], [11], [12]]},
    "not_empty": {"max_length": 12, "begin_suppress_tokens": [EOS]},
    "beams": {"max_length": 12, "num_beams": 4, "num_return_sequences": 4},
    "beams_min": {"max_length": 12, "min_length": 6, "num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0},
    "beams_early": {"max_length": 12, "min_length": 4, "num_beams": 4, "early_stopping": True, "length_penalty": 0.5},
    "beams_short": {"max_length": 12, "num_beams": 4, "num_return_sequences": 3, "length_penalty": -1.0},
    "beams_forced_end": {"max_length": 6, "min_length": 5, "num_beams": 4, "num_return_sequences": 4, "forced_eos_token_id": EOS},
    "beams_opus": {
        "max_length": 10,
        "num_beams": 4,
        "bad_words_ids": [[PAD]],
        "renormalize_logits": True,
        "num_return_sequences": 4,
    },
    "beams_masked": {"max_length": 10, "num_beams": 4, "bad_words_ids": [[PAD]], "num_return_sequences": 4},
    "beams_ngrams": {"max_length": 14, "min_length": 12, "num_beams": 4, "no_repeat_ngram_size": 3, "bad_words_ids": [[PAD]]},
    "beams_repetition": {"max_length": 14, "min_length": 8, "num_beams": 3, "repetition_penalty": 1.4, "bad_words_ids": [[PAD]]},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_marian_answers_as_generate_does(name: str, marian: Any) -> None:
    for source in SOURCES:
        assert ours(marian, source, SETTINGS[name]) == theirs(marian, source, SETTINGS[name])


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "beams_repetition"])
def test_bart_with_a_forced_first_token_answers_as_generate_does(name: str, bart: Any) -> None:
    fields = {**SETTINGS[name], "forced_bos_token_id": FORCED}
    for source in SOURCES:
        answers = ours(bart, source, fields)
        assert answers == theirs(bart, source, fields)
        assert all(answer[0] == FORCED for answer in answers)


def test_settings_change_the_answers(marian: Any) -> None:
    """None of the comparisons above is one of two searches that a setting does nothing to."""
    assert len({str(ours(marian, SOURCES[1], {**fields})) for fields in SETTINGS.values()}) > len(SETTINGS) // 2
    assert any(PAD in ours(marian, source, SETTINGS["min_length"])[0] for source in SOURCES)
