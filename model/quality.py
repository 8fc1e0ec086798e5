"""How good translations are: sacreBLEU's scores of a corpus. No torch, so that text from anywhere can be scored."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from dragoman.model.errors import InputError

MAX_NEW_TOKENS = 256  # after which a translation that is scored ends


@dataclass(frozen=True, slots=True)
class Scores:
    """Corpus scores, each with the signature that says exactly how it was computed (Post, 2018)."""

    bleu: float
    bleu_signature: str
    chrf: float
    chrf_signature: str

    def to_dict(self) -> dict[str, Any]:
        """Return every field, ready for JSON."""
        return asdict(self)


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
