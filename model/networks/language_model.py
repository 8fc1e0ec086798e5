"""The language model: a Transformer's decoder alone, which goes on with a text (Radford et al., 2018).

Its source is the prompt but for the last token, which is what it reads first: so it encodes and decodes as the other networks do,
and what stands for an encoded source is the prompt itself. Where there is no prompt it begins with the start token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dragoman.model.config import ModelConfig
from dragoman.model.networks.backend import FullAttention, ObservedAttention
from dragoman.model.networks.layers import token_table
from dragoman.model.networks.network import Network, Observation
from dragoman.model.networks.transformer import AttentionDecoder, SelfAttentionLayer


class LanguageDecoder(AttentionDecoder):
    """Layers of self-attention, in which a token sees itself and what came before it, and feed-forward networks."""

    def __init__(self, config: ModelConfig) -> None:
        tokens = token_table(config.target_vocab_size, config)
        super().__init__(config, tokens, lambda i: SelfAttentionLayer(config, i, config.decoder_ffn_dim))


class LanguageModel(Network):
    """See the module."""

    decoder: LanguageDecoder

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.decoder = LanguageDecoder(config)

    def prompt(self, ids: Sequence[int]) -> tuple[list[int], int]:
        """Return the start token and a prompt's ids, but for the last; and that."""
        whole = [self.config.decoder_start_id, *ids]
        return whole[:-1], whole[-1]

    def encode(self, source_ids: Tensor, source_lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return right-padded prompts `[B, S]` and how many tokens there are of each, `[B]`, as they come; there may be none."""
        return source_ids, source_lengths

    def decode(self, target_ids: Tensor, *encoded: Tensor) -> Tensor:
        """See `Network`: every row is its prompt and right after it its target."""
        prompts, lengths = encoded
        ids, places = joined(prompts, lengths, target_ids)
        hidden = self._hidden(ids)
        return hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[-1]))

    def stepper(self, source_ids: Tensor, source_lengths: Tensor) -> "WholeSteps":
        return WholeSteps(self, source_ids, source_lengths)

    def observe(self, source: Sequence[int], inputs: Sequence[int], has_maps: bool = False) -> Observation:
        """See `Network`; there is attention within the text alone."""
        ids = torch.tensor([[*source, *inputs]])
        backend = ObservedAttention(self.config, None, is_causal=True, has_maps=has_maps)
        hidden = self.decoder(ids, torch.arange(ids.shape[1]), backend)[0, len(source) :]
        maps = {"decoder": torch.stack(backend.self_maps)} if has_maps else {}
        none = hidden.new_zeros(0, len(inputs), len(source))
        return Observation(hidden, none, lambda stop: backend.caches(len(source) + stop), maps)

    def _hidden(self, ids: Tensor) -> Tensor:
        """Right-padded texts `[B, T]` → hidden states `[B, T, d_model]`; what is right of a token is out of its sight."""
        dropout = self.config.attention_dropout if self.training else 0.0
        backend = FullAttention(self.config, None, dropout=dropout, is_causal=True)
        # Padding may go on behind the last position that there is.
        positions = torch.arange(ids.shape[1], device=ids.device).clamp(max=self.config.max_target_positions - 1)
        hidden: Tensor = self.decoder(ids, positions, backend)
        return hidden


class WholeSteps:
    """Decodes token by token and computes all of a text anew at each, so that nothing is kept that could be wrong."""

    def __init__(self, model: LanguageModel, prompts: Tensor, lengths: Tensor) -> None:
        """Take right-padded prompts `[N, S]` and their lengths `[N]`."""
        self.model, self.prompts, self.lengths = model, prompts, lengths
        self.fed = prompts[:, :0]

    def step(self, previous: Tensor) -> Tensor:
        self.fed = torch.cat((self.fed, previous[:, None]), 1)
        return self.model.decoder.log_probs(self.model.decode(self.fed, self.prompts, self.lengths)[:, -1])

    def select(self, rows: Tensor) -> None:
        self.prompts, self.lengths, self.fed = self.prompts[rows], self.lengths[rows], self.fed[rows]


def joined(prompts: Tensor, lengths: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Put each target `[B, T]` right behind its prompt, of `lengths` `[B]` tokens.

    Returns:
        The texts `[B, S + T]`, in which what is right of a target's end is any token, and where each of its tokens stands `[B, T]`.
    """
    places = lengths[:, None] + torch.arange(targets.shape[1], device=targets.device)
    return torch.cat((prompts, targets), 1).scatter(1, places, targets), places
