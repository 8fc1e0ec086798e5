import json
from io import StringIO
from pathlib import Path

import pytest

from dragoman.client.errors import Unavailable
from dragoman.client.score_files import Pairs, ScoreOptions, score_pairs
from dragoman.model.errors import InputError


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("".join(f"Hund {n}\n" for n in range(70)))
    target.write_text("".join("x" * (n % 7) + "\n" for n in range(70)))
    return source, target


def scored(client, pair: tuple[Path, Path], **options) -> list[str]:
    out = StringIO()
    score_pairs(client, Pairs(*pair), out, ScoreOptions(**options))
    return out.getvalue().splitlines()


def test_each_pair_has_its_line_in_order(client, pair) -> None:
    assert scored(client, pair, concurrency=4) == [f"-1.500000\t{-1.5 * (n % 7 + 1):.6f}" for n in range(70)]


def test_links_are_a_third_column(client, pair) -> None:
    assert scored(client, pair, is_aligned=True)[0] == "-1.500000\t-1.500000\t0-0 1-1"


def test_options_reach_the_server(client, service, pair) -> None:
    scored(client, pair, model="en-fr", length_penalty=0.5, is_aligned=True, alignment_layer=2)
    for request in service.requests:
        assert (request.model, request.length_penalty, request.alignment_layer) == ("en-fr", 0.5, 2)
        assert request.return_word_alignment and not request.return_alignment


def test_json_has_the_whole_score_in_a_line(client, service, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("犬\n")
    (tmp_path / "b").write_text("Ü\n")
    (line,) = scored(client, (tmp_path / "a", tmp_path / "b"), is_json=True)
    assert json.loads(line) == {
        "log_prob": -3.0,
        "score": -1.5,
        "tokens": [
            {"token": 220, "piece": "Ü", "log_prob": -1.5, "top": []},
            {"token": 1, "piece": "", "log_prob": -1.5, "top": []},
        ],
        "alignment": None,
        "word_alignment": None,
        "source_tokens": 2,
        "model": "en-de",
        "model_version": "3",
        "request_id": service.requests[0].request_id,
    }
    assert "Ü" in line


def test_different_numbers_of_lines_are_refused_before_any_call(client, service, pair) -> None:
    pair[1].write_text("x\n" * 69)
    with pytest.raises(InputError, match=rf"^{pair[0]} has 70 lines but {pair[1]} has 69$"):
        scored(client, pair)
    assert service.requests == []


def test_refused_pair_is_named_and_those_before_it_are_written(client, service, failing, pair) -> None:
    service.behaviours["Hund 2"] = failing("INVALID_ARGUMENT", "target: 600 tokens; the limit is 512")
    out = StringIO()
    with pytest.raises(InputError, match=rf"^line 3 of {pair[0]} and {pair[1]}: target: 600 tokens; the limit is 512$"):
        score_pairs(client, Pairs(*pair), out, ScoreOptions())
    assert len(out.getvalue().splitlines()) == 2


def test_servers_failure_stays_what_it_is(client, service, failing, pair) -> None:
    service.script.extend([failing("UNAVAILABLE", "gone")] * 1000)
    with pytest.raises(Unavailable, match="gone"):
        scored(client, pair)


def test_missing_file_is_named(client, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none"):
        scored(client, (tmp_path / "none", tmp_path / "none"))


def test_a_blank_pair_has_a_blank_line_and_asks_nothing(client, service, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("Hund\n\n \t\nKatze\n")
    (tmp_path / "b").write_text("dog\n\n  \n\n")
    lines = scored(client, (tmp_path / "a", tmp_path / "b"), is_aligned=True)
    assert lines == ["-1.500000\t-6.000000\t0-0 1-1", "", "", "-1.500000\t-1.500000\t0-0 1-1"]
    assert sorted(request.text for request in service.requests) == ["Hund", "Katze"]
    blank = json.loads(scored(client, (tmp_path / "a", tmp_path / "b"), is_json=True)[1])
    assert blank["log_prob"] is None and blank["tokens"] == [] and "word_alignment" in blank


def test_a_blank_source_with_a_target_is_named_before_any_call(client, service, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("Hund\n\n")
    (tmp_path / "b").write_text("dog\ncat\n")
    with pytest.raises(InputError, match=rf"^{tmp_path}/a, line 2: the line is blank, but that of {tmp_path}/b is not$"):
        scored(client, (tmp_path / "a", tmp_path / "b"))
    assert service.requests == []


def test_a_refused_option_is_named_as_its_flag_without_a_line(client, service, failing, pair) -> None:
    service.behaviours["Hund 0"] = failing("INVALID_ARGUMENT", "alignment_layer: 9 is not in 0 to 5; return_word_alignment is set")
    with pytest.raises(InputError, match=r"^--alignment-layer: 9 is not in 0 to 5; --alignment is set$"):
        scored(client, pair)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"concurrency": 0}, "--concurrency: 0 is less than 1"), ({"alignment_layer": 0}, "--alignment-layer goes with --alignment")],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ScoreOptions(**options)
