"""Why two programs answer a source differently with the same weights: a tie that rounding decides, or something else."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.libraries.agreement import TIE
from benchmarks.trained.answers import Answer, Original, Way
from benchmarks.trained.families import MAX_LENGTH


@dataclass(frozen=True, slots=True)
class Difference:
    """A source whose answers differ.

    Attributes:
        index: Of the source.
        ours: What one program answered.
        theirs: What Transformers answered.
        margin: How much better ours is than theirs, to the model in double precision: in the log-probability of the first token
            that differs for greedy search, in the score of the whole answer for beams; 0 where only the text differs.
    """

    index: int
    ours: Answer
    theirs: Answer
    margin: float

    @property
    def is_text(self) -> bool:
        """Whether the same tokens have another text."""
        return self.ours.tokens == self.theirs.tokens

    @property
    def is_tie(self) -> bool:
        """Whether both are as good as each other."""
        return not self.is_text and abs(self.margin) <= TIE

    @property
    def is_cut(self) -> bool:
        """Whether one of them is as long as any may be: whether its end is forced is not the same everywhere."""
        return not self.is_text and max(len(self.ours.tokens), len(self.theirs.tokens)) >= MAX_LENGTH - 2


def differences(
    original: Original, sources: Sequence[Sequence[int]], ours: Sequence[Answer], theirs: Sequence[Answer], way: Way
) -> list[Difference]:
    """Return those of the sources whose answers are not the same, token by token and letter by letter."""
    found = []
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our == their:
            continue
        margin = _first_margin if way.num_beams == 1 else _score_margin
        difference = 0.0 if our.tokens == their.tokens else margin(original, sources[i], our.tokens, their.tokens)
        found.append(Difference(i, our, their, difference))
    return found


def _first_margin(original: Original, source: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Compare the first tokens that differ; an answer that ends there has end-of-sequence."""
    end = original.end()
    place = next(i for i, (a, b) in enumerate(zip([*ours, end], [*theirs, end], strict=False)) if a != b)
    after = original.log_probs(source, ours[:place])
    if place == len(after):  # beyond the longest answer
        return math.nan
    return float(after[place][[*ours, end][place]] - after[place][[*theirs, end][place]])


def _score_margin(original: Original, source: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Compare the scores of whole answers, with a length penalty of 1."""
    scores = []
    for answer in (ours, theirs):
        whole = [*answer, original.end()][: MAX_LENGTH - 1]
        is_forced = original.is_end_forced and len(whole) == MAX_LENGTH - 1
        told = zip(original.log_probs(source, answer), whole[:-1] if is_forced else whole, strict=False)
        scores.append(sum(float(after[token]) for after, token in told) / len(whole))
    return scores[0] - scores[1]
