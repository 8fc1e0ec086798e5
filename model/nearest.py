"""Which of a model's translations is nearest to the reference (sequence-level interpolation, Kim and Rush, 2016, section 3.3).

As a target it is within a model's reach, and says more of what the reference says than the model's first choice does.
"""

from collections.abc import Sequence

from sacrebleu.metrics.bleu import BLEU

from model.errors import InputError


def nearest(references: Sequence[str], candidates: Sequence[Sequence[str]]) -> list[str]:
    """Return, for each reference, the candidate with the most sentence BLEU (13a, cased, exponential smoothing).

    Args:
        references: One a sentence.
        candidates: The lines of one or more files, each with equally many lines for each reference, one after the other. Of
            equals the first is chosen.

    Raises:
        InputError: If there is nothing to choose from, or a file's lines are not a multiple of the references.
    """
    if not references or not candidates:
        raise InputError("there are no references or no candidates")
    counts = [len(lines) // len(references) for lines in candidates]
    for count, lines in zip(counts, candidates, strict=True):
        if not count or count * len(references) != len(lines):
            raise InputError(f"{len(lines)} candidates for {len(references)} references: not the same number for each")
    metric = BLEU(effective_order=True)
    chosen = []
    for i, reference in enumerate(references):
        own = [line for count, lines in zip(counts, candidates, strict=True) for line in lines[i * count : (i + 1) * count]]
        scores = {candidate: metric.sentence_score(candidate, [reference]).score for candidate in dict.fromkeys(own)}
        chosen.append(max(scores, key=scores.__getitem__))
    return chosen
