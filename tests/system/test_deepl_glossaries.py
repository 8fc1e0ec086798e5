"""DeepL's glossaries: made and used by its own client, kept for their caller, in every frontend and after a restart."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import deepl
import pytest
import requests
from deepl import DeepLClient, GlossaryNotFoundException
from deepl.api_data import MultilingualGlossaryDictionaryEntries

from tests.system.conftest import ONLY_LINUX
from tests.system.harness.server import Server, serving

pytestmark = pytest.mark.e2e

TEXT = "A man sees a dog."
CALLERS = """
[callers.web]
token = "web"
[callers.other]
token = "other"
[callers.french]
token = "french"
models = ["en-fr"]
"""
NO_ID = "00000000-0000-4000-8000-000000000000"


@pytest.fixture(scope="module")
def folder(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one of which has glossaries of its operators."""
    models = tmp_path_factory.mktemp("models")
    for name in ("en-de", "en-fr"):
        (models / name / "glossaries").mkdir(parents=True)
        (models / name / "1").symlink_to((bundles / name).resolve())
    (models / "en-de" / "glossaries" / "house.tsv").write_text("dog\tKöter\ncat\tKatze\tKater\ndog\tHund\nman\n")
    (models / "en-de" / "glossaries" / "damaged.tbx").write_text("damaged")
    return models


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def server(folder: Path, kept: Path) -> Iterator[Server]:
    with serving(folder, "--num-threads", "1", "--glossaries-folder", str(kept), callers=CALLERS) as started:
        yield started
        assert started.terminate() == 0 and not started.problems()
        assert "Köter" not in str(started.events)


def client_of(server: Server, key: str = "web") -> DeepLClient:
    return DeepLClient(key, server_url=server.http_address)


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeepLClient]:
    monkeypatch.setattr(deepl.http_client, "max_network_retries", 0)
    client = client_of(server)
    yield client
    for each in client.list_multilingual_glossaries():
        if each.name != "house":
            client.delete_multilingual_glossary(each)


def translated(client: DeepLClient, target: str = "DE", **options: Any) -> str:
    return str(client.translate_text(TEXT, source_lang="EN", target_lang=target, **options).text)  # type: ignore[union-attr]


def test_its_client_makes_and_uses_a_glossary(client: DeepLClient) -> None:
    pairs = [(pair.source_lang, pair.target_lang) for pair in client.get_glossary_languages()]
    assert pairs == [("en", "de"), ("en", "fr")]
    made = client.create_glossary("Mein Glossar", "EN", "DE", {"dog": "Hündchen", "a cat": 'die "Katze", ja'})
    assert (made.name, made.ready, made.source_lang, made.target_lang, made.entry_count) == ("Mein Glossar", True, "EN", "DE", 2)
    assert str(client.get_glossary(made.glossary_id)) == str(made) in map(str, client.list_glossaries())
    assert client.get_glossary_entries(made) == {"dog": "Hündchen", "a cat": 'die "Katze", ja'}
    assert "Hündchen" in translated(client, glossary=made)
    assert "Hündchen" in str(client.translate_text_with_glossary(TEXT, made))
    document = client.translate_document_upload(TEXT, filename="a.txt", source_lang="EN", target_lang="DE", glossary=made)
    client.translate_document_wait_until_done(document)
    client.delete_glossary(made)
    for ask in (client.get_glossary, client.get_glossary_entries, client.delete_glossary):
        with pytest.raises(GlossaryNotFoundException):
            ask(made.glossary_id)
    with pytest.raises(deepl.DeepLException, match=f"glossary_id: '{made.glossary_id}"[:40]):
        translated(client, glossary=made)


def test_csv_may_be_quoted_and_name_its_languages(client: DeepLClient) -> None:
    made = client.create_glossary_from_csv("a", "EN", "DE", '"dog ""Rex""",Köter,EN,de\r\n\r\n"a, b","c"\n')
    assert client.get_glossary_entries(made) == {'dog "Rex"': "Köter", "a, b": "c"}


def test_its_client_edits_a_glossary_of_several_languages(client: DeepLClient) -> None:
    german = MultilingualGlossaryDictionaryEntries("EN", "DE", {"dog": "Köter"})
    french = MultilingualGlossaryDictionaryEntries("EN", "FR", {"dog": "clebs"})
    made = client.create_multilingual_glossary("both", [german, french])
    assert [(each.target_lang, each.entry_count) for each in made.dictionaries] == [("DE", 1), ("FR", 1)]
    assert "Köter" in translated(client, glossary=made) and "clebs" in translated(client, "FR", glossary=made)
    assert made.glossary_id not in [each.glossary_id for each in client.list_glossaries()]
    with pytest.raises(GlossaryNotFoundException):
        client.get_glossary(made.glossary_id)
    client.update_multilingual_glossary_name(made, "renamed")
    client.update_multilingual_glossary_dictionary(made, MultilingualGlossaryDictionaryEntries("EN", "DE", {"man": "Kerl"}))
    client.update_multilingual_glossary_dictionary_from_csv(made, "EN", "DE", "cat,Kater")
    assert "Köter" in (text := translated(client, glossary=made)) and "Kerl" in text
    (found,) = client.get_multilingual_glossary_entries(made, "EN", "DE").dictionaries
    assert found.entries == "dog\tKöter\nman\tKerl\ncat\tKater"  # type: ignore[comparison-overlap]
    replaced = client.replace_multilingual_glossary_dictionary(made, MultilingualGlossaryDictionaryEntries("EN", "DE", {"a": "b"}))
    assert (replaced.target_lang, replaced.entry_count) == ("DE", 1) and "Köter" not in translated(client, glossary=made)
    client.delete_multilingual_glossary_dictionary(made, source_lang="EN", target_lang="DE")
    with pytest.raises(deepl.DeepLException, match="has no entries from EN to DE"):
        translated(client, glossary=made.glossary_id)
    with pytest.raises(GlossaryNotFoundException):
        client.delete_multilingual_glossary_dictionary(made, source_lang="EN", target_lang="DE")
    again = client.get_multilingual_glossary(made.glossary_id)
    assert (again.name, len(again.dictionaries), again.creation_time) == ("renamed", 1, made.creation_time)
    assert client.get_glossary(made.glossary_id).target_lang == "FR"
    client.delete_multilingual_glossary(made)
    assert made.glossary_id not in [each.glossary_id for each in client.list_multilingual_glossaries()]


def test_several_glossaries_are_used_at_once(client: DeepLClient) -> None:
    made = [client.create_glossary(name, "EN", "DE", {word: name}) for word, name in (("dog", "Köter"), ("man", "Kerl"))]
    text = translated(client, glossary_ids=made)
    assert "Köter" in text and "Kerl" in text
    text = translated(client, glossary_ids=[made[1].glossary_id, "house"])
    assert "Köter" in text and "Kerl" in text


def test_glossaries_of_models_are_listed_for_their_callers_and_cannot_be_changed(client: DeepLClient, server: Server) -> None:
    [house] = client.list_glossaries()
    assert (house.name, house.source_lang, house.target_lang, house.entry_count) == ("house", "EN", "DE", 3)
    assert house.glossary_id == client_of(server, "other").list_glossaries()[0].glossary_id
    assert client.get_glossary_entries(house) == {"dog": "Köter", "cat": "Katze", "man": "man"}
    assert "Köter" in translated(client, glossary=house) and "Köter" in translated(client, glossary="house")
    changes: list[Callable[[], object]] = [
        lambda: client.delete_glossary(house),
        lambda: client.update_multilingual_glossary_name(house.glossary_id, "mine"),
        lambda: client.delete_multilingual_glossary_dictionary(house.glossary_id, source_lang="EN", target_lang="DE"),
    ]
    for change in changes:
        with pytest.raises(GlossaryNotFoundException):
            change()
    french = client_of(server, "french")
    assert french.list_glossaries() == []
    with pytest.raises(GlossaryNotFoundException):
        french.get_glossary(house.glossary_id)


def test_a_glossary_belongs_to_its_caller(client: DeepLClient, server: Server) -> None:
    made = client.create_glossary("mine", "EN", "DE", {"dog": "Köter"})
    other = client_of(server, "other")
    assert [each.name for each in other.list_multilingual_glossaries()] == ["house"]
    asks = (other.get_glossary, other.get_glossary_entries, other.delete_glossary, other.get_multilingual_glossary)
    for ask in asks:
        with pytest.raises(GlossaryNotFoundException):
            ask(made.glossary_id)
    with pytest.raises(GlossaryNotFoundException):
        other.update_multilingual_glossary_name(made.glossary_id, "theirs")
    with pytest.raises(deepl.DeepLException, match="is not known"):
        translated(other, glossary=made.glossary_id)
    assert client.get_glossary(made.glossary_id).name == "mine"


GLOSSARY = {"name": "a", "source_lang": "en", "target_lang": "de", "entries": "a\tb", "entries_format": "tsv"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": " "}, "name: is missing"),
        ({"name": "ä" * 513}, "name: has more than 1024 bytes"),
        ({"source_lang": ""}, "source_lang: is missing"),
        ({"target_lang": "tlh"}, "target_lang: no model translates from 'en' to 'tlh'"),
        ({"source_lang": "de", "target_lang": "en"}, "target_lang: no model translates from 'de' to 'en'"),
        ({"target_lang": "../../x"}, "target_lang: no model translates"),
        ({"entries": ""}, "entries: is missing or blank"),
        ({"entries": "a\tb\nc"}, "entries: line 2: has to have a source and a target"),
        ({"entries": "a\tb\tc"}, "entries: line 1: has to have a source and a target"),
        ({"entries": "a\t"}, "entries: line 1: has to have a source and a target"),
        ({"entries": "a\tb\n\na\tc"}, "entries: line 3: its source is that of an earlier line"),
        ({"entries": "a\tb\x0bc"}, "entries: line 1: a source and a target have"),
        ({"entries": f"a\t{'b' * 129}"}, "entries: line 1: a source and a target have"),
        ({"entries": "a\n,b", "entries_format": "csv"}, "entries: line 1: has to have a source"),
        ({"entries": '"a\nb",c', "entries_format": "csv"}, "entries: line 2: a source and a target have"),
        ({"entries": '"a', "entries_format": "csv"}, "entries: line 1: unexpected end of data"),
        ({"entries": "a,b,en,fr", "entries_format": "csv"}, "entries: line 1: has to have"),
        ({"entries_format": "xml"}, "entries_format: 'xml' is not one of tsv, csv"),
        ({"entries": 1}, "body: Expected `str`"),
        ({"entries": "\ud800\tb"}, "body: cannot be read"),
        ({"unheard_of": 1}, "body: Object contains unknown field"),
    ],
)
def test_invalid_glossaries_are_refused_with_the_line(server: Server, fields: dict[str, Any], message: str) -> None:
    asked = requests.post(
        f"{server.http_address}/v2/glossaries",
        data=json.dumps(GLOSSARY | fields),
        headers={"Authorization": "DeepL-Auth-Key web", "Content-Type": "application/json"},
        timeout=60,
    )
    assert asked.status_code == 400 and asked.json()["message"].startswith(message), asked.text


def test_requests_that_no_client_sends_are_refused(server: Server, client: DeepLClient, kept: Path) -> None:
    def ask(method: str, path: str, key: str = "web", **arguments: Any) -> requests.Response:
        headers = {"Authorization": f"DeepL-Auth-Key {key}"} | arguments.pop("headers", {})
        return requests.request(method, server.http_address + path, headers=headers, timeout=60, **arguments)

    before = sorted(kept.rglob("*"))
    for name in ("%2e%2e", "..%2f..%2fetc%2fpasswd", "a" * 4000, "%00", ".lock", NO_ID, NO_ID.upper(), f"{NO_ID}%0a"):
        for method, end in (("GET", ""), ("GET", "/entries"), ("DELETE", "")):
            assert ask(method, f"/v2/glossaries/{name}{end}").status_code == 404, name
        assert ask("PATCH", f"/v3/glossaries/{name}", json={"name": "a"}).status_code == 404, name
    assert ask("POST", "/v2/glossaries", "wrong", json=GLOSSARY).status_code == 403
    both = {"name": "a", "dictionaries": [GLOSSARY, GLOSSARY]}
    for each in both["dictionaries"]:
        each.pop("name", None)  # type: ignore[attr-defined]
    for body, message in ((both, "dictionaries: has two"), ({"name": "a", "dictionaries": []}, "dictionaries: is missing")):
        assert message in ask("POST", "/v3/glossaries", json=body).text
    assert "more than once" in ask("POST", "/v2/glossaries", data=[("name", "a"), ("name", "b")]).text
    assert sorted(kept.rglob("*")) == before
    made = ask("POST", "/v2/glossaries", data=GLOSSARY | {"name": "form"})
    path = f"/v2/glossaries/{made.json()['glossary_id']}"
    assert made.status_code == 201 and ask("GET", f"{path}/entries", headers={"Accept": "text/html"}).status_code == 415
    deleted = ask("DELETE", path)
    assert (deleted.status_code, deleted.content) == (204, b"")


def test_glossaries_of_a_caller_are_bounded_and_others_have_room(server: Server, client: DeepLClient) -> None:
    large = {f"{number} {'a' * 120}": "b" * 120 for number in range(9_500)}
    for _ in range(4):
        client.create_glossary("large", "EN", "DE", large)
    with pytest.raises(deepl.QuotaExceededException, match="bytes: a caller's glossaries would have"):
        client.create_glossary("large", "EN", "DE", large)
    other = client_of(server, "other")
    other.delete_glossary(other.create_glossary("a", "EN", "DE", {"dog": "Köter"}))


def test_concurrent_additions_are_all_kept(server: Server, client: DeepLClient) -> None:
    made = client.create_multilingual_glossary("a", [MultilingualGlossaryDictionaryEntries("EN", "DE", {"a": "b"})])

    def add(number: int) -> None:
        entries = MultilingualGlossaryDictionaryEntries("EN", ("DE", "FR")[number % 2], {f"word{number}": "c"})
        client_of(server).update_multilingual_glossary_dictionary(made, entries)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(32)))
    found = client.get_multilingual_glossary(made.glossary_id)
    assert [each.entry_count for each in found.dictionaries] == [17, 16]


@ONLY_LINUX
def test_every_frontend_has_them_and_a_restart_keeps_them(translators: Path, tmp_path: Path) -> None:
    flags = ("--front-ends", "2", "--num-threads", "1", "--glossaries-folder", str(tmp_path))
    with serving(translators, *flags) as server:
        made = client_of(server).create_glossary("a", "EN", "DE", {"a": "b"})
        for word in ("cat", "man"):
            entries = MultilingualGlossaryDictionaryEntries("EN", "DE", {"dog": word})
            client_of(server).replace_multilingual_glossary_dictionary(made.glossary_id, entries)
            assert all(client_of(server).get_glossary_entries(made) == {"dog": word} for _ in range(8))
        assert server.terminate() == 0
    with serving(translators, *flags) as server:
        assert client_of(server).get_glossary_entries(made) == {"dog": "man"}
