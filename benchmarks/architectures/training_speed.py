"""Target tokens a second in training, by the length of sequences: recurrence goes position by position, attention does not."""

import statistics
import time

import torch

from benchmarks.architectures.variants import LANGUAGE_MODEL, VARIANTS, VOCABULARY, Variant
from dragoman.model.config import ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.networks.network import Network
from dragoman.model.training.loss import projected_cross_entropy

LENGTHS = (8, 16, 32, 64, 128, 256)
NUM_TOKENS = 2048
"""Target tokens of a batch, whatever the length of its rows."""


def sides() -> list[Variant]:
    """Return what is timed."""
    return [VARIANTS[0], VARIANTS[2], VARIANTS[5], LANGUAGE_MODEL]


def model_of(variant: Variant) -> Network:
    """Return a variant with random weights."""
    torch.manual_seed(1)
    fields = {"dropout": 0.2, "max_source_positions": 768, "max_target_positions": 768} | dict(variant.model)
    return network(ModelConfig.from_dict({"source_vocab_size": VOCABULARY, "target_vocab_size": VOCABULARY} | fields))


def seconds_of_a_step(model: Network, length: int) -> float:
    """Do the forward and the backward pass of one batch; return the thread's CPU seconds."""
    rows = NUM_TOKENS // length
    generator = torch.Generator().manual_seed(length)
    target = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    lengths = torch.full((rows,), length if model.config.has_source else 0)
    source = target if model.config.has_source else target[:, :0]
    model.train()
    started = time.perf_counter()
    hidden = model.decode(target, *model.encode(source, lengths))
    decoder = model.decoder
    loss = projected_cross_entropy(hidden, decoder.output_weight, decoder.output_bias, target, model.config.pad_id, 0.1)
    loss.backward()  # type: ignore[no-untyped-call]
    model.zero_grad()
    return time.perf_counter() - started


def measure(num_rounds: int, num_threads: int) -> dict[str, dict[int, float]]:
    """Return the tokens a second of each side at each length: medians of rounds in which sides take turns."""
    torch.set_num_threads(num_threads)
    models = {side.name: model_of(side) for side in sides()}
    seconds: dict[tuple[str, int], list[float]] = {}
    for place in range(num_rounds + 1):
        for length in LENGTHS:
            for name, model in models.items():
                taken = seconds_of_a_step(model, length)
                if place:  # the first is for memory
                    seconds.setdefault((name, length), []).append(taken)
    return {
        name: {length: (NUM_TOKENS // length) * length / statistics.median(seconds[name, length]) for length in LENGTHS}
        for name in models
    }
