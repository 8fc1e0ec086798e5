"""Glossaries of a model on a real server: by name and by default, changed while it runs, in every frontend, and for operators."""

import re
from pathlib import Path

import pytest
import requests

from dragoman.client.errors import CallError, InvalidArgument, ModelNotFound
from dragoman.client.repository import RepositoryClient
from dragoman.client.search import Term
from dragoman.client.sync import Client
from tests.system.conftest import ONE_ENGINE, ONLY_LINUX
from tests.system.harness.server import Event, Server, dragoman, serving, wait_until

pytestmark = pytest.mark.e2e

TEXT = "A man sees a dog."
TBX = b"""<martif xml:lang="en"><termEntry><langSet xml:lang="de"><term>K\xc3\xb6ter</term></langSet>
<langSet xml:lang="en"><term>dog</term></langSet></termEntry></martif>"""
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
        change_glossaries(server, client, admin, tmp_path)


def change_glossaries(server: Server, client: Client, admin: RepositoryClient, tmp_path: Path) -> None:
    """Write and remove glossaries as an operator; what is refused changes nothing."""
    glossaries = tmp_path / "en-de" / "glossaries"
    other = tmp_path / "other.tsv"
    other.write_text("dog\tTier\n")
    where = {"DRAGOMAN_ADMIN_SERVER": server.admin_address, "DRAGOMAN_ADMIN_TOKEN": "anna-s"}
    done = dragoman("models", "put-glossary", "en-de", str(other), **where)
    assert done.returncode == 0 and "glossaries: house, legal, other" in done.stdout, done.stderr
    assert "Tier" in client.generate(TEXT, glossary="other").text
    for content, format, message in (
        (b"dog\tHund\n\tKatze", "tsv", "content: line 2: a term has"),
        (b"<!DOCTYPE a [<!ENTITY a 'b'>]><a>&a;</a>", "tbx", "content: line 1: declares an entity"),
        (b"", "tsv", "content: has no terms"),
        (b"dog", "csv", 'format: "csv" is not tsv or tbx'),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(message)):
            admin.put_glossary("en-de", "other", content, format)
    for name in ("../model", "a/b", "", ".hidden", "x" * 200, "other\n"):
        with pytest.raises(InvalidArgument, match="name: "):
            admin.put_glossary("en-de", name, b"dog\tHund")
    assert "Tier" in client.generate(TEXT, glossary="other").text, "what is refused changes nothing"
    assert admin.put_glossary("en-de", "other", TBX, "tbx").glossaries == ("house", "legal", "other")
    assert sorted(path.name for path in glossaries.iterdir()) == ["house.tsv", "legal.tsv", "other.tbx"]
    wait_until(lambda: "Köter" in client.generate(TEXT, glossary="other").text, "the new content is in use")
    done = dragoman("models", "delete-glossary", "en-de", "other", **where)
    assert done.returncode == 0 and sorted(path.name for path in glossaries.iterdir()) == ["house.tsv", "legal.tsv"]
    with pytest.raises(ModelNotFound, match='name: "other" is not there; there: house, legal'):
        admin.delete_glossary("en-de", "other")
    made = [(event["change"], event["glossary"], event["by"]) for event in server.logged(Event.OPERATOR_CHANGE)]
    assert made == [("put_glossary", "other", "anna")] * 2 + [("delete_glossary", "other", "anna")]
    outside = tmp_path / "outside"
    for make in (lambda: glossaries.symlink_to(outside), lambda: glossaries.write_text("")):
        glossaries.rename(tmp_path / "before") if glossaries.is_dir() else glossaries.unlink()
        make()
        with pytest.raises(CallError, match="glossaries: the model's folder cannot be written") as refused:
            admin.put_glossary("en-de", "other", b"dog\tHund")
        assert refused.value.code == "FAILED_PRECONDITION" and not outside.exists()
