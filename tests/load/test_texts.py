import gzip
import random
from pathlib import Path

import pytest

from dragoman.load.texts import FileTexts, MadeUpTexts, parse_lengths
from dragoman.model.errors import InputError


def lengths(text: str) -> list[int]:
    drawn, draws = parse_lengths(text), random.Random(5)
    return [drawn.draw(draws) for _ in range(4000)]


def test_lengths_follow_their_distribution() -> None:
    assert set(lengths("12")) == set(lengths("constant:12")) == {12}
    assert set(lengths("uniform:3:6")) == {3, 4, 5, 6}
    for kind in ("normal", "lognormal"):
        drawn = lengths(f"{kind}:20:5")
        mean = sum(drawn) / len(drawn)
        assert mean == pytest.approx(20, abs=0.4)
        assert (sum((n - mean) ** 2 for n in drawn) / len(drawn)) ** 0.5 == pytest.approx(5, abs=0.4)
    assert min(lengths("normal:2:30")) == 1


def test_made_up_texts_have_the_words_asked_for() -> None:
    assert len(MadeUpTexts(parse_lengths("7"), 3).draw(random.Random(1)).split()) == 21


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:3", "uniform:9:3", "normal:5:-1", "gauss:1:2", "lognormal:nan:1", "20000", "uniform:1:2:3"]
)
def test_lengths_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--words"):
        parse_lengths(text)


@pytest.mark.parametrize("name", ["texts", "texts.gz"])
def test_lines_of_a_file_are_drawn_and_joined(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    content = b"a dog\r\n\n  a cat \n"
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    draws = random.Random(0)
    assert {FileTexts(path).draw(draws) for _ in range(50)} == {"a dog", "a cat"}
    assert FileTexts(path, 2).draw(draws) in {f"{a} {b}" for a in ("a dog", "a cat") for b in ("a dog", "a cat")}


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "blank").write_text("\n \n")
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    (tmp_path / "plain.gz").write_text("a dog\n")
    whole = gzip.compress(random.Random(0).randbytes(1000).hex().encode())
    (tmp_path / "cut.gz").write_bytes(whole[:-20])
    (tmp_path / "broken.gz").write_bytes(whole[:20] + bytes(100))
    (tmp_path / "folder").mkdir()
    for name in ("blank", "latin", "plain.gz", "cut.gz", "broken.gz", "folder", "missing"):
        with pytest.raises(InputError, match=name):
            FileTexts(tmp_path / name)
