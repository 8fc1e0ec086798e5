"""Converted settings, searched with as docs/api.md says, give the answers of Transformers' `generate`.

The search is the reference that the engine's searches are compared with, which so is compared with Transformers, too.
"""

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from dragoman.model.importers.defaults import Target, convert
from dragoman.server.engine.messages import Request, SearchOptions
from tests.server.engine.bench import Ids, reference_answers

VOCAB_SIZE, PAD, EOS, FORCED = 60, 0, 1, 5
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
SIZES |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
SIZES |= {"pad_token_id": PAD, "eos_token_id": EOS}
SOURCES = [[7, 8, 9, EOS], [20, 30, 40, 50, 51, EOS], [33, EOS]]
# Marian starts with padding; BART with end-of-sequence, and forces a first token.
MARIAN, BART = "MarianMTModel", "BartForConditionalGeneration"
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    MARIAN: (transformers.MarianConfig(**SIZES, decoder_start_token_id=PAD, activation_function="swish"), {}),
    BART: (transformers.BartConfig(**SIZES, decoder_start_token_id=EOS, bos_token_id=FORCED), {"forced_bos_token_id": FORCED}),
}


@cache
def model_of(kind: str) -> Any:
    """Make a model of random parameters; biases make answers end, but not at once, and pick padding where nothing rules it out."""
    model, generator = getattr(transformers, kind)(KINDS[kind][0]), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter).normal_(0, 0.3, generator=generator)
    model.final_logits_bias.zero_()
    model.final_logits_bias[0, [PAD, EOS]] = 2.0
    return model.eval()


@cache
def logits(kind: str, source: Ids, fed: Ids) -> torch.Tensor:
    with torch.no_grad():
        found = model_of(kind)(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([fed])).logits
    last: torch.Tensor = found[0, -1]
    return last


def ours(kind: str, source: list[int], fields: dict[str, Any]) -> list[list[int]]:
    forced = [fields["forced_bos_token_id"]] if "forced_bos_token_id" in fields else []
    start = KINDS[kind][0].decoder_start_token_id
    target = {"pad_id": PAD, "eos_id": EOS, "decoder_start_id": start, "vocab_size": VOCAB_SIZE, "max_target_tokens": 64}
    converted = convert(fields, Target(**target, num_forced=len(forced)))
    wanted = converted.defaults

    def predict(source: Ids, fed: Ids) -> NDArray[np.float32]:
        values = logits(kind, source, fed).clone()
        if converted.padding == "excluded":
            values[PAD] = -torch.inf
        values = values.log_softmax(-1)
        if converted.padding == "masked":
            values[PAD] = -torch.inf
        return values.numpy()

    options = {"is_stopped_early": bool(wanted.early_stopping), "min_new_tokens": wanted.min_new_tokens or 0}
    options |= {"repetition_penalty": wanted.repetition_penalty or 1.0, "no_repeat_ngram_size": wanted.no_repeat_ngram_size or 0}
    options |= {"suppressed_tokens": wanted.suppressed_tokens, "is_end_forced": wanted.is_end_forced}
    penalty = 1.0 if wanted.length_penalty is None else wanted.length_penalty
    search = SearchOptions(
        wanted.num_beams or 1, wanted.num_return_sequences or 1, penalty, forced_prefix=forced, num_forced=len(forced), **options
    )
    request = Request(0, source, wanted.max_new_tokens or 19, 0.0, search=search, decoder_start_id=start)
    answers = reference_answers(request, predict, np.arange(VOCAB_SIZE))
    return [answer.token_ids + [EOS] * (answer.reason == "eos") for answer in answers]


def theirs(kind: str, source: list[int], fields: dict[str, Any]) -> list[list[int]]:
    model = model_of(kind)
    special = {"pad_token_id": PAD, "eos_token_id": EOS, "decoder_start_token_id": model.config.decoder_start_token_id}
    model.generation_config = transformers.GenerationConfig(**special | fields)
    rows = model.generate(torch.tensor([source])).tolist()
    return [row[1 : row.index(EOS, 1) + 1] if EOS in row[1:] else row[1:] for row in rows]


NO_PAD: dict[str, Any] = {"bad_words_ids": [[PAD]]}
BEAMS: dict[str, Any] = {"max_length": 12, "num_beams": 4, "num_return_sequences": 4}
SETTINGS: list[dict[str, Any]] = [
    {"max_length": 9},
    {"max_new_tokens": 9},
    {"max_length": 20, "min_length": 8},
    {"max_length": 20, "min_new_tokens": 8},
    {"max_length": 20, "min_length": 10, "no_repeat_ngram_size": 2} | NO_PAD,
    {"max_length": 7, "min_length": 6, "forced_eos_token_id": EOS},
    {"max_length": 12, "suppress_tokens": [3, 4, 10, 11, 12, 13, 14, 15, 16]},
    {"max_length": 12, "bad_words_ids": [[PAD], [10], [11], [12]], "begin_suppress_tokens": [EOS]},
    *(BEAMS | {"length_penalty": alpha, "early_stopping": is_early} for alpha in (0.0, 0.6, 2.0) for is_early in (False, True)),
    BEAMS | {"min_length": 6, "num_beams": 3, "num_return_sequences": 3, "length_penalty": 2.0},
    BEAMS | {"num_return_sequences": 3, "length_penalty": -1.0},
    *(BEAMS | {"max_new_tokens": most} for most in (2, 6)),
    BEAMS | {"max_length": 7, "min_length": 6, "forced_eos_token_id": EOS},
    BEAMS | {"max_length": 10, "renormalize_logits": True} | NO_PAD,
    BEAMS | {"max_length": 10} | NO_PAD,
    BEAMS | {"max_length": 14, "min_length": 12, "num_return_sequences": 1, "no_repeat_ngram_size": 3} | NO_PAD,
    BEAMS | {"suppress_tokens": [*range(10, 40)]} | NO_PAD,
]
# Of the start token, too, in Transformers: BART's is end-of-sequence.
OF_OTHER_STARTS: list[dict[str, Any]] = [
    BEAMS | {"max_new_tokens": 1},
    {"max_length": 20, "min_length": 19, "no_repeat_ngram_size": 1, "num_beams": 2} | NO_PAD,
    *(BEAMS | {"max_length": 14, "min_length": 8, "repetition_penalty": penalty} | NO_PAD for penalty in (0.8, 3.0)),
]
CASES = [*product(KINDS, SETTINGS), *((MARIAN, fields) for fields in OF_OTHER_STARTS)]


@pytest.mark.parametrize(("kind", "fields"), CASES, ids=str)
def test_answers_are_those_of_generate(kind: str, fields: dict[str, Any]) -> None:
    fields = fields | KINDS[kind][1]
    for source in SOURCES:
        assert ours(kind, source, fields) == theirs(kind, source, fields)


def test_settings_change_the_answers() -> None:
    assert len({str(ours(MARIAN, SOURCES[1], fields)) for fields in SETTINGS}) > len(SETTINGS) // 2
    assert any(PAD in ours(MARIAN, source, SETTINGS[2])[0] for source in SOURCES)
