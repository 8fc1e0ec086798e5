"""The language model: against Transformers' Llama with the same weights, and what it promises of prompts and padding."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dragoman.model.decode import greedy_search
from dragoman.model.networks.language_model import LanguageModel
from tests.model.conftest import GPT, LLAMA, small_network

V, WIDTH, HEADS, LAYERS, ROOM = 61, 64, 4, 2, 48
SIZES: dict[str, Any] = {"architecture": "decoder", "source_vocab_size": V, "target_vocab_size": V, "d_model": WIDTH}
SIZES |= {"decoder_ffn_dim": 80, "max_target_positions": ROOM}
LLAMA_2 = LLAMA | {"rotary_base": 500.0, "norm_epsilon": 1e-6}
KINDS = {"gpt": GPT, "llama": LLAMA_2, "sinusoidal": {"has_output_bias": True}, "post-rotary": {"positions": "rotary"}}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    model: LanguageModel = small_network(**SIZES | KINDS[request.param])
    return model


@pytest.fixture
def pair() -> tuple[LanguageModel, Any]:
    """Give the same random model twice, ours and Transformers' Llama."""
    sizes = {"vocab_size": V, "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": ROOM}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(
        **sizes, rms_norm_eps=1e-6, rope_parameters=rope, tie_word_embeddings=False, bos_token_id=2, eos_token_id=1
    )
    theirs = LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.12)
    body = theirs.model
    weights = {"embedding.tokens.weight": body.embed_tokens.weight, "norm.weight": body.norm.weight}
    weights["projection.weight"] = theirs.lm_head.weight
    for i, block in enumerate(body.layers):
        own = block.self_attn
        layer = {
            "self_attention.input": torch.cat([part.weight for part in (own.q_proj, own.k_proj, own.v_proj)]),
            "self_attention.output": own.o_proj.weight,
            "feed_forward.gate": block.mlp.gate_proj.weight,
            "feed_forward.inner": block.mlp.up_proj.weight,
            "feed_forward.outer": block.mlp.down_proj.weight,
            "self_residual.norm": block.input_layernorm.weight,
            "feed_residual.norm": block.post_attention_layernorm.weight,
        }
        weights |= {f"layers.{i}.{name}.weight": value for name, value in layer.items()}
    ours: LanguageModel = small_network(**SIZES | LLAMA_2)
    ours.decoder.load_state_dict(weights)
    return ours, theirs


def texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    return torch.tensor([row + [0] * (longest - len(row)) for row in rows], dtype=torch.int64), torch.tensor([*map(len, rows)])


@torch.inference_mode()
def log_probs(model: LanguageModel, prompts: list[list[int]], targets: list[list[int]]) -> list[Tensor]:
    source, lengths = padded(prompts)
    found = model.decoder.log_probs(model.decode(padded(targets)[0], *model.encode(source, lengths)))
    return [row[: len(target)] for row, target in zip(found, targets, strict=True)]


@torch.inference_mode()
def test_log_probs_and_greedy_answers_equal_transformers(pair: tuple[LanguageModel, Any]) -> None:
    ours, theirs = pair
    (text,) = texts(ROOM)
    expected = theirs(torch.tensor([text])).logits.log_softmax(-1)[0]
    torch.testing.assert_close(log_probs(ours, [[]], [text])[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(log_probs(ours, [text[:20]], [text[20:]])[0], expected[20:], atol=1e-5, rtol=0)
    ours, theirs, prompts = ours.double(), theirs.double(), texts(0, 1, 2, 5, 9, 17, 30, 3)
    answers = greedy_search(ours, prompts, 16)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([[2, *prompt]])
        options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": 1}
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
        assert [*answer.ids, 1][: len(expected)] == expected
    assert len({tuple(answer.ids) for answer in answers}) > len(answers) // 2


def test_a_text_is_the_same_wherever_its_prompt_ends_and_in_any_batch(model: LanguageModel) -> None:
    prompts, targets = texts(0, 40, 3, 1, 17), texts(38, 8, 5, 1, 30, seed=1)
    for row, found in enumerate(log_probs(model, prompts, targets)):
        alone = log_probs(model, prompts[row : row + 1], targets[row : row + 1])[0]
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)
    (text,) = texts(20)
    whole = log_probs(model, [[]], [text])[0]
    for stop in (1, 7, 19):
        torch.testing.assert_close(log_probs(model, [text[:stop]], [text[stop:]])[0], whole[stop:], atol=1e-5, rtol=0)
    earlier = (log_probs(model, [[text[0] ^ 1, *text[1:5]]], [text[5:]])[0] - whole[5:]).abs()
    assert earlier[torch.isfinite(earlier)].max() > 1e-3 and (earlier.nan_to_num().amax(1) > 1e-4).all()
