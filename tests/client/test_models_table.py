import json
from dataclasses import asdict, replace
from io import StringIO

import pytest

from dragoman.client.models_table import print_models
from dragoman.client.results import ModelInfo


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


def test_domains_are_told_below_the_table_by_those_that_have_one(models) -> None:
    out = StringIO()
    captions = "short descriptions, [b]as in captions[/b] of photographs; " * 5
    print_models([replace(models[0], domain=captions.strip()), models[1]], out)
    assert out.getvalue().splitlines()[-2:][1:] == [f"Domain of en-de: {captions.strip()}"]
    assert out.getvalue().count("Domain") == 1


def test_what_a_server_says_cannot_steer_the_terminal(models) -> None:
    out = StringIO()
    print_models([replace(models[0], version="\x1b[2J", domain="a\x1b]0;mine\x07b\u202ec")], out)
    assert out.getvalue().replace("\n", "").isprintable()
    assert "a\ufffd]0;mine\ufffdb\ufffdc" in out.getvalue()


def test_json_has_an_object_for_each_model(models) -> None:
    out = StringIO()
    print_models(models, out, is_json=True)
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [asdict(model) for model in models]


def test_no_models_is_an_empty_table_and_no_json() -> None:
    table, lines = StringIO(), StringIO()
    print_models([], table)
    print_models([], lines, is_json=True)
    assert "model" in table.getvalue()
    assert lines.getvalue() == ""
