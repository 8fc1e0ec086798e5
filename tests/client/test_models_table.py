import json
from dataclasses import asdict
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
