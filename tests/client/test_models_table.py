import json
from dataclasses import asdict, replace
from io import StringIO

import pytest

from dragoman.client.model_info import Defaults, Language, ModelInfo, ModelVersion
from dragoman.client.models_table import print_models


@pytest.fixture
def models() -> list[ModelInfo]:
    shipped = ModelInfo("en-de", "3", True, "fp32", "cpu", 256, 200, 128, 64, 6000, 7000)
    return [shipped, ModelInfo("[b]" + "long" * 30, "2026-01", False, "int8", "cuda:0", 512, 511, 100, 8, 1, 2)]


def test_table_has_a_row_for_each_model_and_cuts_nothing(models) -> None:
    out = StringIO()
    print_models(models, out)
    heading, first, second = (line for line in out.getvalue().splitlines() if line[0] in "┃│")
    assert heading.replace("┃", "").split() == (
        ["model", "version", "ready", "precision", "device", "max", "source", "max", "target", "default", "new", "slots"]
    )
    assert first.replace("│", "").split() == ["en-de", "3", "yes", "fp32", "cpu", "256", "200", "128", "64"]
    assert second.replace("│", "").split() == [models[1].name, "2026-01", "no", "int8", "cuda:0", "512", "511", "100", "8"]


def test_architectures_have_a_column_where_one_is_no_transformer(models) -> None:
    out = StringIO()
    print_models([replace(models[0], architecture="transformer"), replace(models[1], architecture="decoder")], out)
    heading, first, second = (line for line in out.getvalue().splitlines() if line[0] in "┃│")
    assert heading.replace("┃", "").split()[:5] == ["model", "version", "ready", "architecture", "precision"]
    assert [row.replace("│", "").split()[3] for row in (first, second)] == ["transformer", "decoder"]


def test_domains_are_told_below_the_table_by_those_that_have_one(models) -> None:
    out = StringIO()
    captions = "short descriptions, [b]as in captions[/b] of photographs; " * 5
    print_models([replace(models[0], domain=captions.strip()), models[1]], out)
    assert out.getvalue().splitlines()[-2:][1:] == [f"Domain of en-de: {captions.strip()}"]
    assert out.getvalue().count("Domain") == 1


def test_versions_are_told_where_there_is_something_to_tell(models) -> None:
    out = StringIO()
    versions = (ModelVersion("4", "0123456789ab", ("canary",), 0.1), ModelVersion("3", "ba9876543210", (), 0.9, True))
    alone = replace(models[1], versions=(ModelVersion("0123456789ab", "0123456789ab", (), 1.0, True),))
    print_models([replace(models[0], versions=versions), alone], out)
    told = [line for line in out.getvalue().splitlines() if line.startswith("Versions")]
    assert told == ["Versions of en-de: 4 (0123456789ab, canary, 10%); 3 (ba9876543210, 90%, default)"]


def languages(*codes: str) -> tuple[Language, ...]:
    return tuple(Language(code, (code.lower(),)) for code in codes)


@pytest.mark.parametrize(
    ("source", "target", "told"),
    [
        (["en"], ["de", "fr"], "en → de, fr"),
        (["de", "en", "fr"], ["de", "en", "fr"], "de, en, fr"),
        ([f"l{number:03}" for number in range(202)], [f"l{number:03}" for number in range(202)], "202: l000, l001, l002, …"),
        (["a", "b", "c", "d"], ["e"], "4: a, b, c, … → e"),
        ([], ["de", "fr"], "any → de, fr"),
        (["x\x1b[2J"], ["y"], "x\ufffd[2J → y"),
        ([], [], ""),
    ],
)
def test_languages_of_a_model_are_few_words(models, source: list[str], target: list[str], told: str) -> None:
    told_model = replace(models[0], source_languages=languages(*source), target_languages=languages(*target))
    other = replace(models[0], name="other", source_languages=languages("en"), target_languages=languages("de"))
    out = StringIO()
    print_models([told_model, other], out)
    heading, first, _ = (line for line in out.getvalue().splitlines() if line[0] in "┃│")
    assert heading.strip("┃ ").endswith("languages")
    assert first.rstrip("│ ").rpartition("│")[2].strip() == (told or "64")  # the cell before an empty one


def test_defaults_are_told_below_the_table_by_those_that_have_any(models) -> None:
    values = Defaults(num_beams=4, length_penalty=0.6, early_stopping=True, no_repeat_ngram_size=0, suppressed_tokens=(7,))
    forced = Defaults(suppressed_tokens=(1, 2, 3), is_end_forced=True)
    out = StringIO()
    print_models(
        [
            replace(models[0], defaults=values, default_source_language="en"),
            replace(models[0], name="b", defaults=forced),
            replace(models[0], name="c"),
        ],
        out,
    )
    assert [line for line in out.getvalue().splitlines() if line.startswith("Defaults")] == [
        "Defaults of en-de: source_language en, num_beams 4, length_penalty 0.6, early_stopping true, no_repeat_ngram_size 0, "
        "suppressed_tokens [7]",
        "Defaults of b: 3 suppressed_tokens, end-of-sequence is forced",
    ]


def test_a_shortlist_is_told_below_the_table(models) -> None:
    out = StringIO()
    print_models([replace(models[0], shortlist_tokens=512), models[1]], out)
    [line] = [line for line in out.getvalue().splitlines() if line.startswith("Shortlist")]
    assert line == "Shortlist of en-de: answers are chosen from 512 of 7000 tokens"


def test_what_a_server_says_cannot_steer_the_terminal(models) -> None:
    out = StringIO()
    print_models([replace(models[0], version="\x1b[2J", domain="a\x1b]0;mine\x07b\u202ec")], out)
    assert out.getvalue().replace("\n", "").isprintable()
    assert "a\ufffd]0;mine\ufffdb\ufffdc" in out.getvalue()


def test_json_has_an_object_for_each_model_with_all_languages(models) -> None:
    out = StringIO()
    many = replace(models[0], source_languages=languages(*map(str, range(202))), defaults=Defaults(suppressed_tokens=(1, 2)))
    print_models([many, models[1]], out, is_json=True)
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert [language["code"] for language in first["source_languages"]] == [*map(str, range(202))]
    assert first["source_languages"][0]["names"] == ["0"] and first["defaults"]["suppressed_tokens"] == [1, 2]
    assert second == json.loads(json.dumps(asdict(models[1])))


def test_no_models_is_an_empty_table_and_no_json() -> None:
    table, lines = StringIO(), StringIO()
    print_models([], table)
    print_models([], lines, is_json=True)
    assert "model" in table.getvalue()
    assert lines.getvalue() == ""
