import math
import subprocess
import sys
from collections import Counter

import pytest
import sacrebleu

from dragoman.model.errors import InputError
from dragoman.model.quality import score

REFERENCES = ["the dog runs through the snow", "a man is reading a book today", "two children play in the park"]
HYPOTHESES = ["the dog runs in the snow", "a man reads a book today", "two children play in the Park now"]


def bleu_by_hand(hypotheses: list[str], references: list[str]) -> float:
    """Corpus BLEU of text whose words are its tokens (Papineni et al., 2002)."""
    pairs = [(h.split(), r.split()) for h, r in zip(hypotheses, references, strict=True)]
    logs = 0.0
    for n in range(1, 5):
        hits = total = 0
        for pair in pairs:
            found, wanted = (Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for words in pair)
            hits, total = hits + (found & wanted).total(), total + found.total()
        logs += math.log(hits / total) / 4
    length, reference_length = (sum(len(pair[side]) for pair in pairs) for side in (0, 1))
    return 100 * math.exp(logs + min(0.0, 1 - reference_length / length))


def test_bleu_follows_its_formula() -> None:
    assert score(HYPOTHESES, REFERENCES).bleu == pytest.approx(bleu_by_hand(HYPOTHESES, REFERENCES), abs=1e-6)


def test_scores_are_sacrebleus() -> None:
    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score


def test_equal_text_scores_a_hundred() -> None:
    scores = score(REFERENCES, REFERENCES)
    assert (scores.bleu, scores.chrf) == (pytest.approx(100.0), pytest.approx(100.0))


def test_case_counts_unless_told_otherwise() -> None:
    shouted = [text.upper() for text in REFERENCES]
    assert score(shouted, REFERENCES).bleu < 5
    assert score(shouted, REFERENCES, is_lowercase=True).bleu == pytest.approx(100.0)


def test_signatures_say_how_it_was_computed() -> None:
    scores = score(HYPOTHESES, REFERENCES)
    assert f"case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}" in scores.bleu_signature
    assert f"case:mixed|eff:yes|nc:6|nw:0|space:no|version:{sacrebleu.__version__}" in scores.chrf_signature
    assert "case:lc" in score(HYPOTHESES, REFERENCES, is_lowercase=True).bleu_signature
    assert scores.to_dict()["bleu"] == scores.bleu
    assert scores.to_dict().keys() == {"bleu", "bleu_signature", "chrf", "chrf_signature"}


def test_nothing_to_score_is_refused() -> None:
    with pytest.raises(InputError, match="no hypotheses"):
        score([], [])


def test_counts_that_differ_are_told() -> None:
    with pytest.raises(InputError, match="2 hypotheses cannot be scored against 3 references"):
        score(HYPOTHESES[:2], REFERENCES)


def test_scoring_needs_no_torch() -> None:
    code = "import sys, dragoman.model.quality; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
