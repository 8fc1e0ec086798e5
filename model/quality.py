"""Quality of translations: sacreBLEU's scores of a corpus, and the candidate nearest to a reference. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dragoman.model.corpus import DataError
from dragoman.model.errors import InputError

MAX_NEW_TOKENS = 256  # after which a translation that is scored ends


@dataclass(frozen=True, slots=True)
class Scores:
    """Corpus scores, each with the signature that says exactly how it was computed (Post, 2018)."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str


def score(hypotheses: Sequence[str], references: Sequence[str], is_lowercase: bool = False) -> Scores:
    """Compute corpus BLEU (13a tokenisation) and chrF, 0 to 100, of one hypothesis and one reference a line.

    Raises:
        InputError: If there is nothing to score or the line counts differ.
    """
    if len(hypotheses) != len(references):
        raise InputError(f"{len(hypotheses)} hypotheses cannot be scored against {len(references)} references")
    if not hypotheses:
        raise InputError("there are no hypotheses to score")
    bleu, chrf = BLEU(lowercase=is_lowercase, tokenize="13a"), CHRF(lowercase=is_lowercase)
    return Scores(
        bleu=bleu.corpus_score(hypotheses, [references]).score,
        bleu_signature=str(bleu.get_signature()),
        chrf=chrf.corpus_score(hypotheses, [references]).score,
        chrf_signature=str(chrf.get_signature()),
    )


def sentence_bleu(hypothesis: str, reference: str) -> float:
    """Return BLEU of one sentence, 0 to 100: cased, 13a tokenisation, exponential smoothing, effective order."""
    return BLEU(tokenize="13a", effective_order=True).sentence_score(hypothesis, [reference]).score


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
