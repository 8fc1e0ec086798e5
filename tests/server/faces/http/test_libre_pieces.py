"""How texts are taken apart and put together again, and what languages are called."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.model.generation import Language
from dragoman.server.faces.http.libre.languages import code_of, name_of
from dragoman.server.faces.http.libre.pieces import pieces_of, put_together


def sentences(text: str) -> list[str]:
    return [piece for piece, is_translated in pieces_of(text) if is_translated]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A dog runs. A cat sleeps! Does it? Yes.", ["A dog runs.", "A cat sleeps!", "Does it?", "Yes."]),
        ("  A dog.\n\n\tA cat\r\n", ["A dog.", "A cat"]),
        ("Dr. Smith met J. S. Bach, e.g. Mr. X, in the U.S. Army.", ["Dr. Smith met J. S. Bach, e.g. Mr. X, in the U.S. Army."]),
        ("Am 3. Mai 1990. Danach z. B. Brot. Usw. Ende.", ["Am 3. Mai 1990.", "Danach z. B. Brot.", "Usw. Ende."]),
        (
            '"Go!" He went (home). "Why?" asked she… Then nothing.',
            ['"Go!"', "He went (home).", '"Why?" asked she…', "Then nothing."],
        ),
        ("It costs 3.50 at www.example.org. ¿Qué? «Oui.» Non.", ["It costs 3.50 at www.example.org.", "¿Qué?", "«Oui.»", "Non."]),
        ("犬です。猫です！「はい。」そう", ["犬です。", "猫です！", "「はい。」", "そう"]),
        ("... --- 😀\n!!!", []),
        ("", []),
    ],
)
def test_sentences_are_found(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@pytest.mark.parametrize("line", ["-", "_", "\u2013 ", ". ", "\r"])
def test_what_is_not_translated_is_one_piece_however_many_lines_it_has(line: str) -> None:
    rest = f"\n{line}" * 100_000
    pieces = list(pieces_of(f"{rest}\nOne.{rest}\nTwo{rest}"))
    assert [piece for piece, is_translated in pieces if is_translated] == ["One.", "Two"] and len(pieces) == 5


@given(st.text(alphabet=st.sampled_from("aB1.!? \n\r\t\"'()-。😀é\x00"), max_size=60))
def test_nothing_but_sentences_changes(text: str) -> None:
    pieces = list(pieces_of(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert all(piece == piece.strip() != "" for piece, is_translated in pieces if is_translated)
    answers = [[piece] for piece, is_translated in pieces if is_translated]
    assert put_together(pieces, answers, 0) == text == put_together(pieces, answers, 5)


@pytest.mark.parametrize(
    "text", ["." * 10**6, ". " * 10**5, "a." * 10**5, '."' * 10**5, ("." + " " * 1000) * 300, ("." + "-" * 1000) * 300]
)
def test_a_hostile_text_takes_no_square_of_its_length(text: str) -> None:
    began = time.process_time()
    assert "".join(piece for piece, _ in pieces_of(text)) == text
    assert time.process_time() - began < 20, "the square would be minutes"


@pytest.mark.parametrize("text", ["\n" * 10**6, " \r\n" * 10**6, "a" + "\n\t" * 10**6])
def test_blank_lines_are_few_pieces(text: str) -> None:
    assert len(list(pieces_of(text))) <= 3


@pytest.mark.parametrize(
    ("code", "names", "expected"),
    [
        ("en", ["eng", "english"], ("en", "English")),
        ("deu_Latn", ["de_latn", "ger_latn", "de", "deu", "german"], ("de", "German")),
        ("zho_Hant", ["zh_hant", "chi_hant", "chinese_traditional", "zh_tw"], ("zh-Hant", "Chinese Traditional")),
        ("pt_BR", ["por_br", "portuguese_brazil"], ("pt-BR", "Portuguese Brazil")),
        ("ast_Latn", ["ast", "asturian"], ("ast", "Asturian")),
        ("xx-strange", [], ("xx-STRANGE", "xx-STRANGE")),
    ],
)
def test_a_language_is_told_as_others_write_it(code: str, names: list[str], expected: tuple[str, str]) -> None:
    language = Language(code=code, names=names)
    assert (code_of(language), name_of(language)) == expected
