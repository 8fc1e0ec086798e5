"""Scores of translations, and the choice of the candidate that is nearest to a reference."""

import math
import subprocess
import sys
from collections import Counter

import pytest
import sacrebleu

from dragoman.model.corpus import DataError
from dragoman.model.errors import InputError
from dragoman.model.nearest import choose_nearest
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


def test_scores_are_sacrebleus_and_bleu_follows_its_formula() -> None:
    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == pytest.approx(bleu_by_hand(HYPOTHESES, REFERENCES), abs=1e-6)
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert f"case:mixed|eff:no|tok:13a|smooth:exp|version:{sacrebleu.__version__}" in scores.bleu_signature
    assert f"case:mixed|eff:yes|nc:6|nw:0|space:no|version:{sacrebleu.__version__}" in scores.chrf_signature
    assert scores.to_dict()["bleu"] == scores.bleu
    assert scores.to_dict().keys() == {"bleu", "bleu_signature", "chrf", "chrf_signature"}


def test_equal_text_scores_a_hundred_and_case_counts_unless_told_otherwise() -> None:
    scores = score(REFERENCES, REFERENCES)
    assert (scores.bleu, scores.chrf) == (pytest.approx(100.0), pytest.approx(100.0))
    shouted = [text.upper() for text in REFERENCES]
    assert score(shouted, REFERENCES).bleu < 5
    lower = score(shouted, REFERENCES, is_lowercase=True)
    assert lower.bleu == pytest.approx(100.0) and "case:lc" in lower.bleu_signature


def test_texts_that_cannot_be_scored_are_refused() -> None:
    with pytest.raises(InputError, match="no hypotheses"):
        score([], [])
    with pytest.raises(InputError, match="2 hypotheses cannot be scored against 3 references"):
        score(HYPOTHESES[:2], REFERENCES)


def test_scoring_needs_no_torch() -> None:
    code = "import sys, dragoman.model.quality; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


CAPTIONS = ["A red cat sleeps on the mat .", "Two dogs run through deep snow ."]
CATS = ["A cat sleeps .", "A red cat is on the mat .", "A red cat sleeps on a mat ."]
DOGS = ["Dogs .", "Two dogs run .", "Two cats run through ."]
BEAMS = [*CATS, *DOGS]
SAMPLED = ["A red cat sleeps on the mat", "Two dogs run through deep snow ."]


@pytest.mark.parametrize(
    ("references", "candidates", "chosen"),
    [
        (CAPTIONS, {"beams": BEAMS, "sampled": SAMPLED}, SAMPLED),
        (CAPTIONS, {"beams": BEAMS}, [CATS[2], DOGS[1]]),
        (["A Dog barks"], {"x": ["a dog barks", "A Dog meows"]}, ["A Dog meows"]),
        (["a b c d e"], {"x": ["x a", "a x"], "y": ["a y"]}, ["x a"]),  # of equals the first
        (["a b c"], {"x": ["", "x y z", " "]}, ["x y z"]),
    ],
)
def test_the_nearest_candidate_is_chosen(references: list[str], candidates: dict[str, list[str]], chosen: list[str]) -> None:
    assert choose_nearest(references, candidates) == chosen
    for reference, best, other in zip(references, chosen, CAPTIONS, strict=False):
        if reference == other:  # as sacreBLEU's own function for a sentence scores them
            all_scores = [sacrebleu.sentence_bleu(text, [reference]).score for texts in candidates.values() for text in texts]
            assert sacrebleu.sentence_bleu(best, [reference]).score == max(all_scores)


@pytest.mark.parametrize(
    ("references", "candidates", "complaint"),
    [
        (CAPTIONS, {"beams": BEAMS, "drawn.de": BEAMS[:3]}, "drawn.de: 3 lines are not the same number for each of 2 references"),
        (CAPTIONS, {"beams.de": BEAMS[:1]}, "beams.de: 1 lines"),
        (["a", " "], {"x": ["a", "b"]}, "line 2 of the references is blank"),
        (["a", "b"], {"x": ["a", ""]}, "line 2 of the references: every candidate is blank"),
    ],
)
def test_candidates_that_do_not_fit_are_named(references: list[str], candidates: dict[str, list[str]], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        choose_nearest(references, candidates)
