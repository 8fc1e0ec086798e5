"""The attention that a running server tells is the checkpoint's."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.attention.maps import PAGE_ROOM, Kind
from dragoman.attention.of_checkpoint import look_into
from dragoman.attention.of_server import ask
from dragoman.client.sync import Client

ROOT = Path(__file__).resolve().parents[2]
SOURCE, TARGET = "A little girl in a pink dress.", "Ein kleines Mädchen in einem rosa Kleid."

pytestmark = pytest.mark.e2e


def test_cross_attention_of_a_server_is_the_checkpoints(shared_server: Any) -> None:
    directory = ROOT / "model/pretrained/en-de"
    (ours,) = look_into(directory, SOURCE, TARGET, PAGE_ROOM, kinds=[Kind.CROSS]).parts
    with Client(shared_server.address) as client:
        look = ask(client, SOURCE, TARGET, PAGE_ROOM, model=("en-de", ""))
    (theirs,) = look.parts
    assert (theirs.rows, theirs.columns) == (ours.rows, ours.columns)
    expected = [
        [[sum(values) / len(maps) for values in zip(*rows, strict=True)] for rows in zip(*(m.weights for m in maps), strict=True)]
        for maps in ours.layers()
    ]
    of_all = [[sum(values) / len(expected) for values in zip(*rows, strict=True)] for rows in zip(*expected, strict=True)]
    assert [told.layer for told in theirs.maps] == [*range(len(expected)), None]
    for told, table in zip(theirs.maps, [*expected, of_all], strict=True):
        for row, wanted in zip(told.weights, table, strict=True):
            assert row == pytest.approx(wanted, abs=1e-4)


def test_a_servers_greedy_answer_is_what_is_looked_at(shared_server: Any) -> None:
    with Client(shared_server.address) as client:
        answer = client.generate(SOURCE, model="en-de", num_beams=1)
        look = ask(client, SOURCE, None, PAGE_ROOM, layer=1, model=("en-de", ""))
    assert (look.model, look.target) == ("en-de", answer.text)
    assert [drawn.layer for part in look.parts for drawn in part.maps] == [1]
