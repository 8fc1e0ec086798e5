"""The real server behind LibreTranslate's own client, unmodified."""

import json
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from libretranslatepy import LibreTranslateAPI

from tests.system.harness.server import Server

pytestmark = pytest.mark.e2e

CALLERS = '[callers.pages]\ntokens = ["a-key"]\n'
TEXT = "Two young men play football on the grass."


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    callers = tmp_path_factory.mktemp("callers") / "callers.toml"
    callers.write_text(CALLERS)
    with serve(bundles, "--auth-tokens-file", str(callers)) as started:
        yield started


def refusal(error: urllib.error.HTTPError) -> tuple[int, str]:
    told = json.loads(error.read())
    assert list(told) == ["error"]
    return error.code, told["error"]


def test_its_client_translates_with_both_models(server: Server) -> None:
    api = LibreTranslateAPI(server.http_address, "a-key")
    german, french = api.translate(TEXT, "en", "de"), api.translate(TEXT, "en", "fr")
    assert "Männer" in german and "hommes" in french
    both = api.translate(f"{TEXT}\n\n{TEXT} A dog runs.", "en", "de")
    first, blank, second = both.split("\n")
    assert (first, blank) == (german, "") and second.startswith(german + " ")


def test_its_client_lists_languages_without_a_key_and_detects_them(server: Server) -> None:
    known = LibreTranslateAPI(server.http_address).languages()
    assert {"code": "en", "name": "English", "targets": ["de", "fr"]} in known
    assert {language["code"] for language in known} >= {"en", "de", "fr"}
    (likeliest, *_) = LibreTranslateAPI(server.http_address, "a-key").detect("Ein Hund läuft durch den Schnee.")
    assert likeliest["language"] == "de" and likeliest["confidence"] > 50


@pytest.mark.parametrize(
    ("key", "source", "target", "status", "reason"),
    [
        (None, "en", "de", 403, "a bearer token"),
        ("other", "en", "de", 403, "a bearer token"),
        ("a-key", "en", "tlh", 400, "'tlh' is not supported"),
        ("a-key", "de", "fr", 400, "no model translates from 'de' to 'fr'"),
        ("a-key", "", "de", 400, "source: is missing"),
    ],
)
def test_its_client_is_told_what_is_wrong(
    server: Server, key: str | None, source: str, target: str, status: int, reason: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        LibreTranslateAPI(server.http_address, key).translate(TEXT, source, target)
    code, told = refusal(caught.value)
    assert code == status and reason in told
