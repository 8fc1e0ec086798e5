"""Validation of a model: its loss on the validation text, and the quality of its translations."""

from collections.abc import Callable

import numpy as np
import torch

from dragoman.model.config import ModelConfig
from dragoman.model.evaluate import translate
from dragoman.model.networks.network import Network
from dragoman.model.quality import score
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.model.training.data import Batch, collate
from dragoman.model.training.log import Measured
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
        """Measure on sources and targets; `cross_entropy` returns a batch's sum, in nats, without smoothing."""
        self._config, self._tokenizers, self._texts = config, tokenizers, texts
        self._max_tokens, self._cross_entropy = max_tokens, cross_entropy

    def measure(self, model: Network, device: torch.device) -> Measured:
        """Measure a model, which is in evaluation mode from then on."""
        loss = self._loss(model.eval(), device)
        if not self._config.has_source:
            return Measured(loss)
        sources, references = self._texts
        scores = score(translate(model, self._tokenizers, sources), references)
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
