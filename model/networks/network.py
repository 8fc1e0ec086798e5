"""Interface of networks for training, the oracle, export and attention maps, independent of the architecture.

A network encodes sources and decodes targets after them; what passes between the two is its own. Decoding is asked for in two
ways: over whole targets, and token by token. `architectures` says which network a configuration is of.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from dragoman.model.config import ModelConfig
from dragoman.model.networks.layers import Predictor


class Stepper(Protocol):
    """Sources, encoded, after which one token a step is decoded."""

    def step(self, previous: Tensor) -> Tensor:
        """Feed one token a row, `[N]`; return log-probabilities of the next, `[N, V]`, see `Predictor.log_probs`."""
        ...

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order; a row may be taken more than once."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """Intermediate results of a network for one source and target."""

    hidden: Tensor  # of each position of the target, as the output projection takes it, `[T, d_model]`
    attention: Tensor  # from the target to the source, the heads' mean, `[L, T, S]`; L is 0 where there is none
    # Gives what a decode step keeps of the positions before one, a tensor for each cache that steps write, in the graphs' order and
    # without an axis of rows.
    caches: Callable[[int], list[Tensor]]
    # If asked for, attention by its name, each head's: `encoder` `[L, H, S, S]`, `decoder` `[L, H, T, T]` and `cross` `[L, H, T,
    # S]`, those that there are.
    maps: Mapping[str, Tensor] = field(default_factory=dict)


class Network(nn.Module, ABC):
    """Encoder and decoder, or what stands for them."""

    config: ModelConfig  # its dimensions
    decoder: Predictor  # predicts tokens from hidden states

    @abstractmethod
    def encode(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, ...]:
        """Encode right-padded sources `[B, S]` of `source_lengths` `[B]` tokens; return what `decode` takes."""

    @abstractmethod
    def decode(self, target_ids: Tensor, *encoded: Tensor) -> Tensor:
        """Decode whole targets `[B, T]`, start token first, after what `encode` gave → hidden states `[B, T, d_model]`."""

    @abstractmethod
    def stepper(self, source_ids: Tensor, source_lengths: Tensor) -> Stepper:
        """Encode sources, as `encode` does, to decode after them token by token."""

    @abstractmethod
    def observe(self, source: Sequence[int], inputs: Sequence[int], has_maps: bool = False) -> Observation:
        """Decode one target, of which `inputs` are what the decoder reads, and tell what happened on the way."""

    def prompt(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return what of a text's ids is encoded, and which token the decoder reads first."""
        return [*ids, self.config.eos_id], self.config.decoder_start_id

    def forward(self, source_ids: Tensor, source_lengths: Tensor, target_ids: Tensor) -> Tensor:
        """Teacher-forced logits `[B, T, V]`: row t predicts the token after `target_ids[:, t]`."""
        return self.decoder.logits(self.decode(target_ids, *self.encode(source_ids, source_lengths)))
