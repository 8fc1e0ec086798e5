import pytest
import sacrebleu

from model.errors import InputError
from model.nearest import nearest

REFERENCES = ["A red cat sleeps on the mat .", "Two dogs run through deep snow ."]
BEAMS = ["A cat sleeps .", "A red cat is on the mat .", "A red cat sleeps on a mat .", "Dogs .", "Two dogs run .", "Two cats run through ."]
SAMPLED = ["A red cat sleeps on the mat", "Two dogs run through deep snow ."]


def test_the_nearest_of_all_files_is_chosen() -> None:
    """As sacreBLEU's own function for a sentence scores them."""
    own = [[*BEAMS[:3], SAMPLED[0]], [*BEAMS[3:], SAMPLED[1]]]
    best = [
        max(candidates, key=lambda text, to=reference: sacrebleu.sentence_bleu(text, [to]).score)
        for candidates, reference in zip(own, REFERENCES, strict=True)
    ]
    assert nearest(REFERENCES, [BEAMS, SAMPLED]) == best == SAMPLED
    assert nearest(REFERENCES, [BEAMS]) == [BEAMS[2], BEAMS[4]]


def test_of_equals_the_first_is_chosen() -> None:
    assert nearest(["a b c d e"], [["x a", "a x"], ["a y"]]) == ["x a"]


@pytest.mark.parametrize("candidates", [[BEAMS, BEAMS[:3]], [BEAMS[:1]], [[]], []])
def test_files_that_do_not_fit_are_refused(candidates: list[list[str]]) -> None:
    with pytest.raises(InputError):
        nearest(REFERENCES, candidates)


def test_no_references_are_refused() -> None:
    with pytest.raises(InputError, match="no references"):
        nearest([], [[]])
