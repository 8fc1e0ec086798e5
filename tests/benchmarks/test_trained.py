"""The comparison of models that Transformers' Trainer trained: what is counted as a difference, and what training holds still."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sentencepiece")

from benchmarks.trained.answers import Answer, Original, Way  # noqa: E402
from benchmarks.trained.comparison import TRANSFORMERS, note, row  # noqa: E402
from benchmarks.trained.differences import Difference, differences  # noqa: E402
from benchmarks.trained.families import MAX_LENGTH  # noqa: E402

GREEDY, BEAMS = Way("greedy", 1), Way("beam 4", 4)
END = 0


class Table(Original):
    """A model whose distribution after an answer's tokens is written down; sources do not matter.

    Attributes:
        tables: Log-probabilities by what was answered before; elsewhere all tokens are alike.
    """

    def __init__(self, tables: dict[tuple[int, ...], list[float]]) -> None:
        self.tables = tables

    is_end_forced = False

    def end(self) -> int:
        return END

    def log_probs(self, source: Any, answer: Any) -> list[Any]:
        plain = [-1.0] * 8
        return [torch.tensor(self.tables.get(tuple(answer[:i]), plain), dtype=torch.float64) for i in range(len(answer) + 1)]


def answer(*tokens: int, text: str = "") -> Answer:
    return Answer(list(tokens), text or " ".join(map(str, tokens)))


def compared(model: Table, ours: Answer, theirs: Answer, way: Way = GREEDY) -> list[Difference]:
    return differences(model, [[1], [2]], [answer(3), ours], [answer(3), theirs], way)


def test_the_same_tokens_and_text_are_no_difference() -> None:
    assert compared(Table({}), answer(3, 4), answer(3, 4)) == []


def test_tokens_of_equal_probability_are_a_tie_whatever_follows() -> None:
    model = Table({(3,): [-9.0, -9, -9, -9, -0.70001, -0.70002, -9, -9]})
    [difference] = compared(model, answer(3, 4, 7, 7), answer(3, 5))
    assert difference.index == 1 and difference.is_tie and difference.margin == pytest.approx(1e-5)


def test_tokens_that_the_model_tells_apart_are_no_tie() -> None:
    model = Table({(3,): [-0.5, -9.0, -9, -9, -0.7, -9, -9, -9]})
    [difference] = compared(model, answer(3, 4), answer(3))  # theirs ends there
    assert not difference.is_tie and difference.margin == pytest.approx(-0.2)


def test_beams_are_compared_by_their_scores() -> None:
    model = Table({(): [-1.0, -1, -1, -1, -2.0, -1, -1, -1]})
    [even] = compared(model, answer(5, 6), answer(6, 5, 5), BEAMS)
    [worse] = compared(model, answer(4), answer(5, 5), BEAMS)
    assert even.is_tie and not worse.is_tie
    assert worse.margin == pytest.approx(-1.5 - -1.0)


def test_a_forced_end_is_worth_nothing() -> None:
    model = Table({})
    longest = answer(*[5] * (MAX_LENGTH - 2))
    [difference] = compared(model, longest, answer(6), BEAMS)
    assert difference.is_tie
    model.is_end_forced = True
    [difference] = compared(model, longest, answer(6), BEAMS)
    assert difference.margin == pytest.approx(1 / (MAX_LENGTH - 1))


def test_what_is_longer_than_any_answer_is_no_tie() -> None:
    class Limited(Table):
        def log_probs(self, source: Any, answer: Any) -> list[Any]:
            return super().log_probs(source, answer[: MAX_LENGTH - 2])

    [difference] = compared(Limited({}), answer(*[5] * (MAX_LENGTH + 1)), answer(*[5] * (MAX_LENGTH - 1)))
    assert not difference.is_tie


def test_the_same_tokens_with_another_text_are_no_tie() -> None:
    [difference] = compared(Table({}), answer(3, text="a b"), answer(3, text="ab"))
    assert difference.is_text and not difference.is_tie


def test_a_row_says_how_many_differ_and_why() -> None:
    model = Table({(3,): [-9.0, -9, -9, -9, -0.7, -0.7, -9, -9]})
    found = compared(model, answer(3, 4), answer(3, 5))
    told = row("marian", GREEDY, "Dragoman, fp32", [answer(3, text="ein Hund")], ["ein Hund"], found)
    assert (told["lines unlike Transformers'"], told["of them ties"], told["others"]) == (1, 1, 0)
    unexplained = row("marian", GREEDY, "Dragoman, int8", [answer(3, text="ein Hund")], ["ein Hund"], found)
    assert (unexplained["lines unlike Transformers'"], unexplained["of them ties"]) == (1, "–")
    assert row("marian", GREEDY, TRANSFORMERS, [answer(3, text="a")], ["a"], [])["lines unlike Transformers'"] == "–"
    assert told.keys() == unexplained.keys()
    apart = Table({(): [-1.0, -1, -1, -2.0, -1, -1, -1, -1]})
    cut = compared(apart, answer(*[5] * (MAX_LENGTH - 2)), answer(3, 4))
    told = row("marian", GREEDY, "CTranslate2, fp32", [answer(3, text="ein Hund")], ["ein Hund"], cut)
    assert (told["of them ties"], told["as long as any may be"], told["others"]) == (0, 1, 0)


def test_white_space_at_the_end_is_told_as_what_it_is() -> None:
    [difference] = compared(Table({}), answer(3, text="ein Hund "), answer(3, text="ein Hund"))
    told = note("marian", GREEDY, "Dragoman, fp32", difference)
    assert told == (
        "- marian, greedy, Dragoman, fp32, line 2: white space at an end of the text, of which Transformers' tokeniser has less."
    )


def test_the_start_of_the_decoder_stays_at_zero() -> None:
    from benchmarks.trained.training import ZeroStart

    class Model:
        embeddings = torch.nn.Embedding(4, 2)

        def get_input_embeddings(self) -> Any:
            return self.embeddings

    model = Model()
    others = model.embeddings.weight[:3].tolist()
    ZeroStart(3).on_step_end(None, None, None, model=model)
    assert model.embeddings.weight[3].tolist() == [0.0, 0.0] and model.embeddings.weight[:3].tolist() == others


def test_an_answer_of_generate_is_what_stands_between_start_and_end() -> None:
    model = Table({})
    assert model._generated([9, 3, 4, END, 9, 9]) == [3, 4]
    assert model._generated([9, 3, 4]) == [3, 4]
    assert model._generated([9, END]) == []
