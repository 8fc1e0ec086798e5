"""How good a model is on the validation text: its loss, and what it translates where there is something to translate."""

from collections.abc import Callable

import numpy as np
import torch

from dragoman.model.config import ModelConfig
from dragoman.model.evaluate import evaluate
from dragoman.model.networks.network import Network
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.model.training.data import Batch, collate
from dragoman.model.training.measured import Measured
from dragoman.model.training.sampler import bucket


class Validation:
    """Measures models of one configuration on one text."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizers: Tokenizers,
        texts: tuple[list[str], list[str]],
        max_tokens: int,
        cross_entropy: Callable[[Network, Batch], torch.Tensor],
    ) -> None:
        """Take what does not change.

        Args:
            config: Of the models.
            tokenizers: Theirs.
            texts: Sources and targets.
            max_tokens: Of a batch.
            cross_entropy: Gives a batch's sum, in nats, without smoothing.
        """
        self._config, self._tokenizers, self._texts = config, tokenizers, texts
        self._max_tokens, self._cross_entropy = max_tokens, cross_entropy

    def measure(self, model: Network, device: torch.device) -> Measured:
        """Measure a model, which is in evaluation mode from then on."""
        loss = self._loss(model.eval(), device)
        if not self._config.has_source:
            return Measured(loss)
        scores = evaluate(model, self._tokenizers, *self._texts)
        return Measured(loss, scores.bleu, scores.chrf)

    @torch.inference_mode()
    def _loss(self, model: Network, device: torch.device) -> float:
        """Return the cross-entropy a token."""
        sources, targets = map(self._tokenizers.source.encode_batch, self._texts)
        total, tokens = 0.0, 0
        for indices in bucket(sources, targets, self._max_tokens, np.random.default_rng(0)):
            batch = collate([sources[i] for i in indices], [targets[i] for i in indices], self._config).to(device)
            total += float(self._cross_entropy(model, batch))
            tokens += batch.num_target_tokens
        return total / tokens
