"""Which of a model's translations is nearest to the reference (sequence-level interpolation, Kim and Rush, 2016, section 3.3).

As a target it is within a model's reach, and says more of what the reference says than the model's first choice does.
"""

from collections.abc import Mapping, Sequence

from dragoman.model.corpus import DataError
from dragoman.model.quality import sentence_bleu


def choose_nearest(references: Sequence[str], candidates: Mapping[str, Sequence[str]]) -> list[str]:
    """Return, for each reference, the candidate with the most sentence BLEU, see `sentence_bleu`.

    Args:
        references: One a sentence.
        candidates: The lines of each file, by its name: equally many for each reference, one after the other. Blank ones are not
            chosen; of equals the first is.

    Raises:
        DataError: If a file's lines are not a multiple of the references, naming it, or if a reference is blank or has no
            candidate that is not, naming its line.
    """
    counts = []
    for name, lines in candidates.items():
        count, rest = divmod(len(lines), len(references))
        if rest or not count:
            raise DataError(f"{name}: {len(lines)} lines are not the same number for each of {len(references)} references")
        counts.append(count)
    chosen = []
    for i, reference in enumerate(references):
        if not reference.strip():
            raise DataError(f"line {i + 1} of the references is blank")
        scores: dict[str, float] = {}
        for count, lines in zip(counts, candidates.values(), strict=True):
            for candidate in lines[i * count : (i + 1) * count]:
                if candidate.strip() and candidate not in scores:
                    scores[candidate] = sentence_bleu(candidate, reference)
        if not scores:
            raise DataError(f"line {i + 1} of the references: every candidate is blank")
        chosen.append(max(scores, key=scores.__getitem__))
    return chosen
