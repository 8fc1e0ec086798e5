"""Glossaries of a model on a real server: by name and by default, changed while it runs, in every frontend, and for operators."""

from pathlib import Path

import pytest
import requests

from dragoman.client.errors import InvalidArgument
from dragoman.client.repository import RepositoryClient
from dragoman.client.search import Term
from dragoman.client.sync import Client
from tests.system.conftest import ONE_ENGINE, ONLY_LINUX
from tests.system.harness.server import serving, wait_until

pytestmark = pytest.mark.e2e

TEXT = "A man sees a dog."
TOPOLOGIES = [ONE_ENGINE, pytest.param(("--front-ends", "2"), id="two frontends", marks=ONLY_LINUX)]


@pytest.mark.parametrize("flags", TOPOLOGIES)
def test_glossaries_of_the_models_folder_are_used(bundles: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    model, glossaries = tmp_path / "en-de", tmp_path / "en-de" / "glossaries"
    glossaries.mkdir(parents=True)
    (model / "1").symlink_to((bundles / "en-de").resolve())
    (model / "model.toml").write_text('[settings]\nglossary = "house"\n')
    (glossaries / "house.tsv").write_text("dog\tKöter\n")
    (glossaries / "legal.tsv").write_text("man\tHerr\n")
    operators = '[callers.anna]\ntoken = "anna-s"\n'
    with (
        serving(tmp_path, *flags, "--num-threads", "1", "--admin-port", "0", operators=operators) as server,
        Client(server.address) as client,
        RepositoryClient(server.admin_address, token="anna-s") as admin,
    ):
        assert "Köter" in client.generate(TEXT).text
        named = client.generate(TEXT, glossary="legal", terms=[Term("dog", ["Tier"])])
        assert "Herr" in named.text and "Tier" in named.text and named.answers[0].unmet_terms == ()
        form = {"text": TEXT, "target_lang": "DE", "glossary_id": "legal"}
        deepl = requests.post(f"{server.http_address}/v2/translate", data=form, timeout=60)
        assert "Herr" in deepl.json()["translations"][0]["text"]
        (alone,) = client.generate(f"{TEXT} A cat sleeps.", split="sentences", terms=[Term("cat", ["Kater"])]).answers
        assert "Köter" in alone.text and "Kater" in alone.text
        with pytest.raises(InvalidArgument, match="glossary: 'other' is not known; the model has house, legal"):
            client.generate(TEXT, glossary="other")
        (glossaries / "house.tsv").write_text("dog\tHündchen\n")
        wait_until(lambda: "Hündchen" in client.generate(TEXT).text, "the changed file is in use")
        [status], _ = admin.models()
        assert status.glossaries == ("house", "legal")
