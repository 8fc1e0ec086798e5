"""Random weights in every parameter: a network freshly made has biases of 0 and norms of 1, which would hide mistakes."""

from typing import Any

import torch

SCALED, UNSCALED = 1.2, 0.64
"""A weight's standard deviation times √d_model, so that no softmax saturates: T5's attention scores are not divided by √Dh."""
TABLE, RELATIVE = 1.0, 0.5
"""Standard deviations of T5's table of tokens, where it is the projection too, and of its biases by distance."""
GAINS = {"q_proj.weight": 1.8, "k_proj.weight": 1.8, "fc2.weight": 2.5, ".wo.weight": 2.5}
"""What is larger than the rest: a tied table would otherwise answer with the token it was given, over and over."""
END = 2.5
"""How much longer the row of end-of-sequence is than others, so that answers end, at various lengths."""


@torch.no_grad()
def randomise(model: Any, seed: int, is_tied: bool = True) -> None:
    """Fill a model of Transformers with noise that a seed decides, by its parameters' names in alphabetical order.

    Args:
        model: One of a library's classes.
        seed: Decides the noise.
        is_tied: Whether the projection is the table of tokens, as far as the model does not say so itself (T5's do not).
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
            values = 1.0 + 0.15 * values
        elif "relative_attention_bias" in name:
            values *= RELATIVE
        elif is_t5 and name == "shared.weight":
            values *= TABLE
        elif is_t5 and name == "lm_head.weight":
            values *= 2 * deviation
        elif _is_fixed(parameter, name):
            continue  # sines, or the row of padding, which the family computes
        else:
            values *= deviation * next((gain for part, gain in GAINS.items() if name.endswith(part)), 1.0)
        parameter.copy_(values)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=noise))
    model.get_output_embeddings().weight[config.eos_token_id] *= END


def _is_fixed(parameter: Any, name: str) -> bool:
    """Tell whether a table of positions is one of sines, which are not learned."""
    return "embed_positions" in name and not parameter.requires_grad
