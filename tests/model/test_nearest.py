import pytest
import sacrebleu

from dragoman.model.corpus import DataError
from dragoman.model.nearest import choose_nearest

REFERENCES = ["A red cat sleeps on the mat .", "Two dogs run through deep snow ."]
CATS = ["A cat sleeps .", "A red cat is on the mat .", "A red cat sleeps on a mat ."]
DOGS = ["Dogs .", "Two dogs run .", "Two cats run through ."]
BEAMS = [*CATS, *DOGS]
SAMPLED = ["A red cat sleeps on the mat", "Two dogs run through deep snow ."]


def test_the_nearest_of_all_files_is_chosen() -> None:
    """As sacreBLEU's own function for a sentence scores them."""
    own = [*CATS, SAMPLED[0]], [*DOGS, SAMPLED[1]]
    best = [
        max(candidates, key=lambda text, to=reference: sacrebleu.sentence_bleu(text, [to]).score)
        for candidates, reference in zip(own, REFERENCES, strict=True)
    ]
    assert choose_nearest(REFERENCES, {"beams": BEAMS, "sampled": SAMPLED}) == best == SAMPLED
    assert choose_nearest(REFERENCES, {"beams": BEAMS}) == [CATS[2], DOGS[1]]


def test_case_counts() -> None:
    assert choose_nearest(["A Dog barks"], {"x": ["a dog barks", "A Dog meows"]}) == ["A Dog meows"]


def test_of_equals_the_first_is_chosen() -> None:
    assert choose_nearest(["a b c d e"], {"x": ["x a", "a x"], "y": ["a y"]}) == ["x a"]


def test_a_blank_line_is_not_chosen() -> None:
    assert choose_nearest(["a b c"], {"x": ["", "x y z", " "]}) == ["x y z"]


@pytest.mark.parametrize(
    ("references", "candidates", "complaint"),
    [
        (
            REFERENCES,
            {"beams.de": BEAMS, "drawn.de": BEAMS[:3]},
            "drawn.de: 3 lines are not the same number for each of 2 references",
        ),
        (REFERENCES, {"beams.de": BEAMS[:1]}, "beams.de: 1 lines"),
        (["a", " "], {"x": ["a", "b"]}, "line 2 of the references is blank"),
        (["a", "b"], {"x": ["a", ""]}, "line 2 of the references: every candidate is blank"),
    ],
)
def test_what_cannot_be_chosen_from_is_named(references: list[str], candidates: dict[str, list[str]], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        choose_nearest(references, candidates)
