"""How far two implementations of beam search agree, answer by answer, and whether a tie explains where they do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dragoman.model.decode import length_normalised
from dragoman.model.ids import Ids
from dragoman.model.networks.transformer import Transformer
from tests.oracles.transformers_model import Beam

TIE = 1e-4
"""Largest difference of two scores that rounding may turn round."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A source whose best answers differ.

    Attributes:
        index: Of the source.
        ours: Our answer, and the score we gave it.
        theirs: Their answer, and the score they gave it.
        referee: Both answers' scores by a third, exact computation: ours, theirs.
    """

    index: int
    ours: tuple[list[int], float]
    theirs: tuple[list[int], float]
    referee: tuple[float, float]

    @property
    def is_tie(self) -> bool:
        """Whether both answers are as good as each other."""
        return abs(self.referee[0] - self.referee[1]) <= TIE


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a comparison found.

    Attributes:
        num_sources: How many were compared.
        num_same_beams: Sources whose answers are all the same, in the same order.
        max_score_difference: Largest between the scores that both gave to the same best answer.
        differences: Sources whose best answers differ.
    """

    num_sources: int
    num_same_beams: int
    max_score_difference: float
    differences: list[Difference]

    def row(self) -> dict[str, Any]:
        """Return the figures for the table."""
        num_same = self.num_sources - len(self.differences)
        num_ties = sum(difference.is_tie for difference in self.differences)
        return {
            "best answers the same": f"{num_same} of {self.num_sources} ({num_same / self.num_sources:.1%})",
            "all answers the same": f"{self.num_same_beams} ({self.num_same_beams / self.num_sources:.1%})",
            "differences: ties": num_ties,
            "others": len(self.differences) - num_ties,
            "largest score difference": f"{self.max_score_difference:.1e}",
        }


def compare(ours: Sequence[Beam], theirs: Sequence[Beam], referee: "Referee") -> Agreement:
    """Compare the answers to the same sources."""
    differences: list[Difference] = []
    score_differences = [0.0]
    num_same_beams = 0
    for i, (our_beam, their_beam) in enumerate(zip(ours, theirs, strict=True)):
        num_same_beams += [ids for ids, _ in our_beam] == [ids for ids, _ in their_beam]
        our_best, their_best = our_beam[0], their_beam[0]
        if our_best[0] == their_best[0]:
            score_differences.append(abs(our_best[1] - their_best[1]))
        else:
            scores = referee.score(i, our_best[0]), referee.score(i, their_best[0])
            differences.append(Difference(i, our_best, their_best, scores))
    return Agreement(len(ours), num_same_beams, max(score_differences), differences)


class Referee:
    """Scores answers with the model in double precision, a whole answer at once and without any search."""

    def __init__(self, model: Transformer, sources: Sequence[Ids], max_new_tokens: int, length_penalty: float) -> None:
        """Judge answers to these sources, which are ids without special tokens.

        Args:
            model: In double precision.
            sources: What was translated.
            max_new_tokens: An answer of so many tokens was cut, a shorter one ended by itself.
            length_penalty: Exponent of the length in a score.
        """
        self._model, self._sources = model, sources
        self._max_new_tokens, self._length_penalty = max_new_tokens, length_penalty

    @torch.inference_mode()
    def score(self, index: int, answer: Ids) -> float:
        """Return the score of an answer to source `index`."""
        config = self._model.config
        source = torch.tensor([[*self._sources[index], config.eos_id]])
        generated = [*answer] if len(answer) == self._max_new_tokens else [*answer, config.eos_id]
        fed = torch.tensor([[config.decoder_start_id, *generated[:-1]]])
        memory, mask = self._model.encode(source, torch.tensor([source.shape[1]]))
        log_probs = self._model.decoder.log_probs(self._model.decode(fed, memory, mask))
        total = float(log_probs[0, torch.arange(len(generated)), torch.tensor(generated)].sum())
        return length_normalised(total, len(generated), self._length_penalty)
