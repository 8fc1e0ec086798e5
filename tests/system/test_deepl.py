"""DeepL's API: its own client, unmodified; forms of older ones, documents, refusals with its exceptions."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import deepl
import pytest
import requests
from deepl import DeepLClient, DocumentHandle, Formality, SplitSentences
from docx import Document

from dragoman.client.sync import Client
from tests.system.conftest import ONLY_LINUX
from tests.system.harness.server import Event, Server, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

TEXT, OTHER = "Two young men play football on the grass.", "A dog runs through the snow."
CALLERS = """
[callers.web]
token = "a-key"
[callers.other]
token = "other"
[callers.slow]
token = "slow"
requests_per_second = 0.001
[callers.single]
token = "single"
max_requests = 1
"""
KEY = {"Authorization": "DeepL-Auth-Key a-key"}


@pytest.fixture(scope="module")
def server(bundles: Path) -> Iterator[Server]:
    with serving(bundles, "--max-text-characters", "20000", callers=CALLERS) as started:
        yield started
        assert started.terminate() == 0 and not started.problems()
        assert "a-key" not in str(started.events) and TEXT not in str(started.events)


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> DeepLClient:
    monkeypatch.setattr(deepl.http_client, "max_network_retries", 0)
    return client_of(server, "a-key")


def client_of(server: Server, key: str) -> DeepLClient:
    return DeepLClient(key, server_url=server.http_address)


@pytest.fixture(scope="module")
def german(server: Server) -> dict[str, str]:
    with Client(server.address, token="a-key") as client:
        return {text: client.generate(text, model="en-de").text for text in (TEXT, OTHER, f"{TEXT} {OTHER}")}


def finished(client: DeepLClient, handle: DocumentHandle) -> deepl.DocumentStatus:
    found: list[deepl.DocumentStatus] = []

    def is_finished() -> bool:
        found.append(client.translate_document_get_status(handle))
        return found[-1].done or not found[-1].ok

    wait_until(is_finished, "the document is translated")
    return found[-1]


def test_its_client_translates_texts(client: DeepLClient, german: dict[str, str]) -> None:
    one: Any = client.translate_text(TEXT, target_lang="DE")
    assert (one.text, one.detected_source_lang, one.billed_characters) == (german[TEXT], "EN", len(TEXT))
    many: Any = client.translate_text(
        [TEXT, "", OTHER], source_lang="en", target_lang="de", context="Sport.", preserve_formatting=True
    )
    assert [result.text for result in many] == [german[TEXT], "", german[OTHER]]
    french: Any = client.translate_text(TEXT, source_lang="EN", target_lang="fr", formality=Formality.PREFER_MORE)
    assert "hommes" in french.text
    typed: Any = client.translate_text(TEXT, target_lang="DE", model_type="prefer_quality_optimized")
    assert typed.model_type_used == "quality_optimized"
    same: Any = client.translate_text(OTHER, source_lang="EN", target_lang="EN-US")
    assert same.text == OTHER
    named: Any = client.translate_text(TEXT, target_lang="DE", extra_body_parameters={"model": "en-de"})
    assert named.text == german[TEXT]


def test_sentences_are_split_as_its_client_asks(client: DeepLClient, german: dict[str, str]) -> None:
    def translated(text: str, split: SplitSentences) -> str:
        result: Any = client.translate_text(text, source_lang="EN", target_lang="DE", split_sentences=split)
        return str(result.text)

    apart = f"{german[TEXT]} {german[OTHER]}"
    assert translated(f"{TEXT}\n{OTHER}", SplitSentences.ALL) == f"{german[TEXT]}\n{german[OTHER]}"
    broken = f"{TEXT} {OTHER}".replace(" the ", "\r\nthe ")
    assert translated(broken, SplitSentences.NO_NEWLINES) == apart
    assert translated(f"{TEXT} {OTHER}", SplitSentences.OFF) == german[f"{TEXT} {OTHER}"]


def test_tags_stay_around_their_words_and_ignored_elements_as_they_are(client: DeepLClient) -> None:
    def translated(text: str, **options: Any) -> str:
        result: Any = client.translate_text(text, source_lang="EN", target_lang="DE", **options)
        return str(result.text)

    found = translated("<p>Two <b>men</b> play &amp; run.</p><p>A dog.</p>", tag_handling="html")
    assert re.fullmatch(r"<p>[^<]*<b>Männer</b>[^<]*</p><p>[^<]+</p>", found), found
    with pytest.raises(deepl.DeepLException, match="text: is not well-formed XML"):
        translated("<a>b", tag_handling="xml")
    # As Weblate sends placeholders.
    text = 'Two <x id="1">%(men)s</x> play <x id="2"/> football <g translate="no">as is</g>.'
    found = translated(text, tag_handling="xml", ignore_tags=["x"])
    for kept in ('<x id="1">%(men)s</x>', '<x id="2"/>', '<g translate="no">as is</g>'):
        assert found.count(kept) == 1, found
    found = translated("<p>Two <X>men</X> play.</p>", tag_handling="html", ignore_tags="x,y")
    assert (
        "<X>men</X>" in found
        and translated("<x>Two <X>men</X></x>", tag_handling="xml", ignore_tags="x") == "<x>Two <X>men</X></x>"
    )


def test_elements_divide_texts_of_xml_as_its_client_asks(client: DeepLClient, german: dict[str, str]) -> None:
    """https://developers.deepl.com/docs/xml-and-html-handling/customized-xml-outline-detection, and the page before."""

    def translated(text: str, **options: Any) -> str:
        result: Any = client.translate_text(text, source_lang="EN", target_lang="DE", tag_handling="xml", **options)
        return str(result.text)

    apart = f"<a><p>{german[TEXT]}</p><p>{german[OTHER]}</p></a>"
    source = f"<a><p>{TEXT}</p><p>{OTHER}</p></a>"
    assert translated(source) == translated(source, outline_detection=False, splitting_tags=["p"]) == apart
    assert translated(f"{TEXT}<x/>{OTHER}", splitting_tags="x,y") == f"{german[TEXT]}<x/>{german[OTHER]}"
    first, second = TEXT[:14], TEXT[14:]  # a sentence of two elements
    divided, whole = f"<a><p>{first}</p><p>{second}</p></a>", re.compile("<a><p>.+</p> ?<p>.+</p></a>")
    assert re.sub("</?.>", "", translated(divided)) != german[TEXT]
    for options in ({"non_splitting_tags": ["p"]}, {"outline_detection": False}):
        found = translated(divided, **options)
        assert whole.fullmatch(found) and re.sub("</?.>", "", found) == german[TEXT], found


def test_its_client_lists_languages_and_usage(client: DeepLClient, server: Server) -> None:
    assert [(each.code, each.name) for each in client.get_source_languages()] == [("EN", "English")]
    targets = [(each.code, each.name, each.supports_formality) for each in client.get_target_languages()]
    assert targets == [("DE", "German", False), ("FR", "French", False)]
    before = client.get_usage().character
    client.translate_text([TEXT, OTHER], target_lang="DE")
    after = client.get_usage()
    assert after.character.count == (before.count or 0) + len(TEXT + OTHER) and not after.any_limit_reached
    assert client_of(server, "other").get_usage().character.count == 0


def test_forms_of_older_clients_are_read(server: Server, german: dict[str, str]) -> None:
    """As `deepl` for Node sends them, and keys in messages."""
    fields = [("text", TEXT), ("text", OTHER), ("target_lang", "de"), ("split_sentences", "1"), ("show_billed_characters", "1")]
    fields += [("preserve_formatting", "0"), ("formality", "default"), ("tag_handling", "")]
    for key, headers in (([], KEY), ([("auth_key", "a-key")], {}), ([], {"Authorization": "Bearer a-key"})):
        found = requests.post(f"{server.http_address}/v2/translate", [*fields, *key], headers=headers, timeout=60)
        assert [one["text"] for one in found.json()["translations"]] == [german[TEXT], german[OTHER]], found.text
    for method in ("GET", "POST"):
        listed = requests.request(method, f"{server.http_address}/v2/languages?type=target&auth_key=a-key", timeout=60)
        assert [each["language"] for each in listed.json()] == ["DE", "FR"]
    twice = requests.post(f"{server.http_address}/v2/translate", [("target_lang", "de")] * 2, headers=KEY, timeout=60)
    assert (twice.status_code, twice.json()["message"]) == (400, "target_lang: is given more than once")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": []}, "text: is missing"),
        ({"text": [""] * 1025}, "text: 1025 texts; at most 1024"),
        ({"text": "Yes. " * 5000}, "text: more than 20000 characters"),
        ({"target_lang": "TLH"}, "target_lang: 'TLH' is not supported; there: de, en, fr"),
        ({"source_lang": "TLH"}, "source_lang: 'TLH' is not supported"),
        ({"source_lang": "DE", "target_lang": "FR"}, "target_lang: no model translates from 'DE' to 'FR'"),
        ({"formality": "more"}, "formality: 'more' is not offered; default, prefer_more, prefer_less are"),
        ({"tag_handling": "tex"}, "tag_handling: 'tex' is not one of none, html, xml"),
        ({"splitting_tags": ["x"]}, "splitting_tags: has names of tags, and goes with tag_handling"),
        ({"tag_handling": "xml", "ignore_tags": ["x y"]}, "ignore_tags: has names of tags"),
        ({"tag_handling": "html", "outline_detection": False}, "outline_detection: .* goes with tag_handling=xml"),
        ({"glossary": "id", "source_lang": "EN"}, "glossary_id: 'id' is not known"),
        ({"style_rule": "id"}, "style_id: 'id' is not offered"),
        ({"custom_instructions": ["Be brief."]}, "custom_instructions: .* is not offered"),
        ({"extra_body_parameters": {"unheard_of": 1}}, "unheard_of: is not known"),
        ({"extra_body_parameters": {"model": "nobody"}}, "model: 'nobody' is not loaded"),
    ],
)
def test_refusals_name_the_parameter(client: DeepLClient, fields: Any, message: str) -> None:
    with pytest.raises(deepl.DeepLException, match=f"Bad request, message: {message}") as caught:
        client.translate_text(**({"text": TEXT, "target_lang": "DE"} | fields))
    assert caught.value.http_status_code == 400


def test_refusals_have_its_exceptions(client: DeepLClient, server: Server) -> None:
    for call in (lambda each: each.get_usage(), lambda each: each.translate_text(TEXT, target_lang="DE")):
        with pytest.raises(deepl.AuthorizationException, match="authorization: a bearer token that this server knows"):
            call(client_of(server, "wrong"))
    slow = client_of(server, "slow")
    slow.get_usage()
    with pytest.raises(deepl.TooManyRequestsException, match="requests_per_second"):
        slow.get_usage()
    with pytest.raises(deepl.DeepLException, match="texts and documents are translated"):
        client.get_all_style_rules()
    for path in ("/v2/document/a", "/v2/translate"):
        found = requests.get(server.http_address + path, timeout=60)
        assert (found.status_code, found.json()["detail"]) == (405, "invalid_argument")


def test_its_client_translates_a_document(client: DeepLClient, german: dict[str, str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text(f"{TEXT}\n\n{OTHER}\n")
    status = client.translate_document_from_filepath(source, target, target_lang="DE")
    assert status.done and status.billed_characters == len(source.read_text())
    assert target.read_text() == f"{german[TEXT]}\n\n{german[OTHER]}\n"
    page = "<!DOCTYPE html>\n<title>{}</title>\n<p>{}<script>x</script>\n"
    output = BytesIO()
    client.translate_document(page.format(TEXT, OTHER).encode(), output, filename="a.html", target_lang="DE")
    assert output.getvalue().decode() == page.format(german[TEXT], german[OTHER])


def test_its_client_translates_a_word_document(client: DeepLClient, german: dict[str, str], tmp_path: Path) -> None:
    source, target, document = tmp_path / "in.docx", tmp_path / "out.docx", Document()
    document.add_paragraph(OTHER)
    paragraph = document.add_paragraph("Two young ")
    paragraph.add_run("men").bold = True
    paragraph.add_run(" play football.")
    document.save(str(source))
    status = client.translate_document_from_filepath(source, target, target_lang="DE")
    assert status.billed_characters == len(f"{OTHER}Two young men play football.")
    first, second = Document(str(target)).paragraphs
    assert first.text == german[OTHER]
    assert [run.text for run in second.runs if run.bold] == ["Männer"] and second.text.startswith("Zwei junge Männer ")


def test_a_document_is_found_by_its_owner_with_the_key_and_once(
    client: DeepLClient, server: Server, german: dict[str, str]
) -> None:
    handle = client.translate_document_upload(TEXT, filename="a.txt", source_lang="EN", target_lang="DE")
    other, key = DocumentHandle(handle.document_id, "0" * 64), DocumentHandle("0" * 48, handle.document_key)
    for caller, shown in ((client, other), (client, key), (client_of(server, "other"), handle)):
        for ask in (caller.translate_document_get_status, caller.translate_document_download):
            with pytest.raises(deepl.DeepLException, match="Not found"):
                ask(shown)
    assert finished(client, handle).billed_characters == len(TEXT)
    output = BytesIO()
    client.translate_document_download(handle, output)
    assert output.getvalue().decode() == german[TEXT]
    with pytest.raises(deepl.DeepLException, match="Not found"):
        client.translate_document_download(handle, output)
    [line] = [event for event in server.logged(Event.ITEM) if event["method"] == "POST /v2/document"][-1:]
    assert (line["code"], line["caller"]) == ("OK", "web") and line["generated_tokens"] > 0


def test_a_document_under_way_counts_in_its_callers_limits_and_its_state_does_not(client: DeepLClient, server: Server) -> None:
    single = client_of(server, "single")
    with stopped(*server.engines("en-de")):
        handle = single.translate_document_upload(f"{TEXT}\n{OTHER}", filename="a.txt", target_lang="DE")
        wait_until(lambda: str(single.translate_document_get_status(handle)) == "translating", "the translation begins")
        assert (single.translate_document_get_status(handle).seconds_remaining or 0) >= 1
        with pytest.raises(deepl.DocumentNotReadyException):
            single.translate_document_download(handle)
        with pytest.raises(deepl.TooManyRequestsException, match="max_requests: 1 are under way"):
            single.translate_document_upload(TEXT, filename="a.txt", target_lang="DE")
    assert finished(single, handle).done


def test_a_document_waits_for_the_queue_and_others_are_bounded(client: DeepLClient, translators: Path) -> None:
    with serving(translators, "--max-slots", "1", "--max-waiting-requests", "1") as server, ThreadPoolExecutor(4) as pool:
        anyone, languages = client_of(server, "any"), {"source_lang": "EN", "target_lang": "DE"}

        def upload() -> DocumentHandle:
            return anyone.translate_document_upload("a dog", filename="a.txt", **languages)

        def is_refused() -> bool:
            return any(line["code"] == "RESOURCE_EXHAUSTED" for line in server.logged(Event.ITEM))

        with stopped(*server.engines("alpha")):
            texts = [pool.submit(anyone.translate_text, "a dog", **languages) for _ in range(4)]
            wait_until(lambda: any(text.done() for text in texts), "the queue is full, and one is refused")
            handles = [upload()]
            wait_until(is_refused, "there is no place for the document")
            assert not anyone.translate_document_get_status(handles[0]).done
            with pytest.raises(deepl.TooManyRequestsException, match="file: too many documents"):
                for _ in range(16):
                    handles.append(upload())
        assert len(handles) == 16 and all(finished(anyone, handle).done for handle in handles)
        assert upload()
        keys = [({"document_key": handle.document_key}, handle.document_id) for handle in handles]
        states = [requests.post(f"{server.http_address}/v2/document/{name}", json=key, timeout=60) for key, name in keys]
        assert sorted(state.status_code for state in states) == [*[200] * 15, 404], "the oldest has given way"


def test_glossaries_without_a_folder_are_kept_until_the_end(client: DeepLClient) -> None:
    made = client.create_glossary("a", "EN", "DE", {"dog": "Hund"})
    assert client.list_glossaries() != [] and client.get_glossary_entries(made) == {"dog": "Hund"}
    client.delete_glossary(made)
    assert client.list_glossaries() == []


def test_documents_of_other_kinds_are_refused(client: DeepLClient) -> None:
    for content, filename, message in (
        (b"PK", "a.pdf", "file: documents of the kind 'pdf' are not translated; those of txt, htm, html, srt, vtt"),
        (b"PK", "a.docx", "file: is no ZIP archive, or is damaged"),
        (b"\xff\xfe", "a.txt", "file: is no UTF-8"),
        (b" ", "a.txt", "file: is missing or blank"),
    ):
        with pytest.raises(deepl.DeepLException, match=f"Bad request, message: {message}"):
            client.translate_document_upload(content, filename=filename, target_lang="DE")
    with pytest.raises(deepl.DeepLException, match="output_format: "):
        client.translate_document_upload("a", filename="a.txt", target_lang="DE", output_format="pdf")
    with pytest.raises(deepl.DeepLException, match="413"):
        client.translate_document_upload("a" * 20001, filename="a.txt", target_lang="DE")


@ONLY_LINUX
def test_any_frontend_finds_a_document(translators: Path) -> None:
    with serving(translators, "--front-ends", "2") as server:
        address = f"{server.http_address}/v2/document"

        def ask(path: str, **arguments: Any) -> requests.Response:
            """Ask on a connection of its own, which any frontend may get."""
            return requests.post(address + path, timeout=60, headers={"Connection": "close"}, **arguments)

        handle = ask("", data={"source_lang": "EN", "target_lang": "DE"}, files={"file": ("a.txt", "a dog")}).json()
        path, key = f"/{handle['document_id']}", {"document_key": handle["document_key"]}
        states = [ask(path, json=key).json() for _ in range(16)]
        assert {state.get("status") for state in states} <= {"queued", "translating", "done"}
        wait_until(lambda: ask(path, json=key).json()["status"] == "done", "the document is translated")
        assert ask(f"{path}/result", json=key).content
        assert {ask(path, json=key).status_code for _ in range(8)} == {404}
