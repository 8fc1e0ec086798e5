"""Random weights in every parameter: a network freshly made has biases of 0 and norms of 1, which would hide mistakes."""

from typing import Any

import torch

# A weight's standard deviation times √d_model, so that no softmax saturates: T5's attention scores are not divided by √Dh.
SCALED, UNSCALED = 1.2, 0.64
# Standard deviation of T5's biases by distance.
RELATIVE = 0.5
# Some weights are larger than the rest: else a tied table answers with the token it was given, over and over.
GAINS = {"q_proj.weight": 1.2, "k_proj.weight": 1.2, "self_attn.out_proj.weight": 0.4, "encoder_attn.out_proj.weight": 1.5}
GAINS |= {"fc1.weight": 2.0, "fc2.weight": 2.5, ".wo.weight": 2.5}
# Rows of end-of-sequence and padding are longer than others, in families like BART and in T5's: answers end, at various lengths,
# and padding is among the likely tokens, which a family allows or not.
ENDS = {"end": (2.0, 1.7), "padding": (1.3, 1.3)}


@torch.no_grad()
def randomise(model: Any, seed: int, is_tied: bool = True) -> None:
    """Fill a model of Transformers with noise, by its parameters' names in alphabetical order.

    `is_tied` says whether the projection is the table of tokens, where the model does not say so itself (T5's do not).
    """
    config = model.config
    is_t5 = hasattr(config, "d_kv")
    deviation = (UNSCALED if is_t5 else SCALED) / config.d_model**0.5
    noise = torch.Generator().manual_seed(seed)
    if is_t5 and not is_tied:  # which today's classes tie, whatever the configuration says, until a file holds both
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    for name, parameter in sorted(model.named_parameters()):
        values = torch.randn(parameter.shape, generator=noise)
        if "norm" in name and name.endswith("weight"):
            values = (1.0 + 0.15 * values.abs()) * values.sign()
        elif "relative_attention_bias" in name:
            values *= RELATIVE
        elif is_t5 and name == "lm_head.weight":
            values *= 2 * deviation
        elif "embed_positions" in name and not parameter.requires_grad:
            continue  # sines
        elif not (is_t5 and name == "shared.weight"):
            if name.endswith(("fc2.weight", ".wo.weight")):  # or what activations have in common would drown the rest
                values -= values.mean(1, keepdim=True)
            values *= deviation * next((gain for part, gain in GAINS.items() if name.endswith(part)), 1.0)
        parameter.copy_(values)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=noise))
    table = model.get_output_embeddings().weight
    table[config.eos_token_id] *= ENDS["end"][is_t5]
    # M2M100 gives a generated padding token no position. Published ones never generate it: its row is of zeros.
    table[config.pad_token_id] *= 0.0 if config.model_type == "m2m_100" else ENDS["padding"][is_t5]
