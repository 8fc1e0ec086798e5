"""LibreTranslate's API: its own client, unmodified; forms and lists, alternatives, languages, keys; refusals with their reason."""

import json
import re
import select
import socket
import urllib.error
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests
from libretranslatepy import LibreTranslateAPI

from tests.system.harness.server import Server, serving

pytestmark = pytest.mark.e2e

CALLERS = """
[callers.pages]
tokens = ["a-key"]
[callers.few]
tokens = ["few"]
max_requests = 2
models = ["en-de"]
[callers.slow]
tokens = ["slow"]
requests_per_second = 0.001
"""
TEXT, GERMAN = "Two young men play football on the grass.", "Ein Hund läuft durch den Schnee."
QUERY = {"q": TEXT, "source": "en", "target": "de"}
KEY = {"api_key": "a-key"}
MAX_MESSAGE_BYTES = 65536


@pytest.fixture(scope="module")
def server(bundles: Path, endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two translators, and of a model without languages before them."""
    folder = tmp_path_factory.mktemp("models")
    for bundle in (endless / "alpha", bundles / "en-de", bundles / "en-fr"):
        (folder / bundle.name).symlink_to(bundle)
    limits = ("--max-message-bytes", str(MAX_MESSAGE_BYTES), "--max-text-characters", "20000")
    with serving(folder, *limits, callers=CALLERS) as started:
        yield started
        assert started.terminate() == 0
        assert not started.problems() and "a-key" not in str(started.events)


def post(server: Server, path: str = "/translate", **arguments: Any) -> requests.Response:
    return requests.post(server.http_address + path, timeout=120, **arguments)


def translated(server: Server, **fields: Any) -> Any:
    response = post(server, json=QUERY | KEY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(response: requests.Response) -> tuple[int, str]:
    message = response.json()
    assert list(message) == ["error"], message
    return response.status_code, message["error"]


@pytest.fixture(scope="module")
def german(server: Server) -> str:
    return str(translated(server)["translatedText"])


def test_its_client_translates_with_the_model_for_the_languages(server: Server, german: str) -> None:
    api = LibreTranslateAPI(server.http_address, "a-key")
    assert api.translate(TEXT, "en", "de") == german and "Männer" in german and "hommes" in api.translate(TEXT, "en", "fr")
    first, blank, second = api.translate(f"{TEXT}\n\n{TEXT} A dog runs.", "en", "de").split("\n")
    assert (first, blank) == (german, "") and second.startswith(german + " ")
    for fields in ({"source": "EN", "target": "de-AT"}, {"format": "text", "secret": "x"}, {"model": "en-de"}):
        assert translated(server, **fields) == {"translatedText": german}
    same = {"target": "EN", "q": ["A dog. A cat."]}
    assert translated(server, **same) == {"translatedText": ["A dog. A cat."]}, "one language is not translated"


def test_its_client_lists_languages_without_a_key_and_detects_them(server: Server) -> None:
    known = LibreTranslateAPI(server.http_address).languages()
    assert known == [
        {"code": "de", "name": "German", "targets": []},
        {"code": "en", "name": "English", "targets": ["de", "fr"]},
        {"code": "fr", "name": "French", "targets": []},
    ]
    few = requests.get(f"{server.http_address}/languages", headers={"Authorization": "Bearer few"}, timeout=60).json()
    assert [language["code"] for language in few] == ["de", "en"]
    settings = requests.get(f"{server.http_address}/frontend/settings", timeout=60).json()
    assert {".txt", ".html", ".srt", ".docx", ".xlf"} < set(settings["supportedFilesFormat"])
    assert (settings["apiKeys"], settings["charLimit"]) == (True, 20_000)
    assert (settings["filesTranslation"], settings["suggestions"]) == (True, False)
    assert "/translate" in requests.get(f"{server.http_address}/spec", timeout=60).json()["paths"]
    assert requests.get(f"{server.http_address}/health", timeout=60).json() == {"status": "ok"}
    pytest.importorskip("py3langid")
    (likeliest, *_) = LibreTranslateAPI(server.http_address, "a-key").detect(GERMAN)
    assert likeliest["language"] == "de" and likeliest["confidence"] > 50
    assert post(server, "/detect", data=KEY | {"q": TEXT}).json()[0]["language"] == "en"
    assert post(server, "/detect", data=KEY | {"q": "123 !"}).json() == [{"language": "en", "confidence": 0.0}]
    assert refusal(post(server, "/detect", json=KEY)) == (400, "q: is missing")
    reason = "target: 'en' is not supported: nothing is translated to it"
    assert refusal(post(server, json=QUERY | KEY | {"q": GERMAN, "source": "auto", "target": "en"})) == (400, reason)
    assert translated(server, source="auto")["detectedLanguage"]["language"] == "en"
    found = translated(server, q=[TEXT, TEXT], source="auto", target="fr")
    assert [each["language"] for each in found["detectedLanguage"]] == ["en", "en"] and len(found["translatedText"]) == 2
    assert translated(server, q=GERMAN, source="auto", target="de")["translatedText"] == GERMAN


def test_forms_and_parameters_mean_the_same_as_json(server: Server, german: str) -> None:
    expected, query = {"translatedText": german}, QUERY | KEY
    files = {name: (None, value) for name, value in (query | {"q": f"{TEXT}\r\n"}).items()}
    assert post(server, data=query).json() == post(server, params=query).json() == expected
    assert post(server, files=files).json() == {"translatedText": german + "\n"}
    assert post(server, params=QUERY | {"q": ""} | KEY).status_code == 400
    languages = {name: value for name, value in query.items() if name != "q"}
    assert post(server, params=languages, data={"q": TEXT}).json() == expected
    assert refusal(post(server, params=query, data={"q": "b"}))[1].startswith("q: is given more than once")


def test_lists_are_answered_in_order_and_the_rest_is_kept(server: Server, german: str) -> None:
    texts = [TEXT, "", " \n", f"{TEXT} {TEXT}\n\n  {TEXT}", "😀 ..."]
    answers = [german, "", " \n", f"{german} {german}\n\n  {german}", "😀 ..."]
    assert translated(server, q=texts) == {"translatedText": answers}
    assert translated(server, q=["..."] * 1024) == {"translatedText": ["..."] * 1024}
    assert translated(server, q="\n") == {"translatedText": "\n"}
    assert translated(server, q="a\x00b \u202e\ufeff")["translatedText"] is not None
    before = server.metric("dragoman_request_success_total", model="en-de")
    assert translated(server, q=["A dog."] * 200)["translatedText"] == [translated(server, q="A dog.")["translatedText"]] * 200
    assert server.metric("dragoman_request_success_total", model="en-de") == before + 201


def test_texts_that_take_long_to_divide_delay_no_other_caller(shared_server: Server) -> None:
    """Sixteen, each of which takes seconds with its sentences; then their callers leave."""
    pytest.importorskip("py3langid")
    body = json.dumps(QUERY | {"q": ("Mr. " * 200 + "dog. A ") * 120}).encode()
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    address = shared_server.http_address.removeprefix("http://").split(":")
    assert post(shared_server, "/detect", json={"q": TEXT}).status_code == 200  # the detector is loaded
    with ExitStack() as stack:
        others = [stack.enter_context(socket.create_connection((address[0], int(address[1])), 60)) for _ in range(16)]
        for other in others:
            other.sendall(head.encode() + body)
        for _ in range(3):
            assert post(shared_server, json=QUERY | {"source": "auto"}).status_code == 200
        assert select.select(others, [], [], 0)[0] == [], "none of them is answered yet"
    shared_server.wait_until_idle()
    too_long = post(shared_server, json=QUERY | {"q": "Mr. " * 10**6})
    assert refusal(too_long)[1].startswith("q: more than "), "refused by its length, before it is divided"


def test_alternatives_are_the_next_best_answers(server: Server) -> None:
    several = translated(server, alternatives=2)
    assert len(several["alternatives"]) == 2 and several["translatedText"] not in several["alternatives"]
    form = post(server, data=QUERY | KEY | {"alternatives": "1", "q": f"{TEXT} {TEXT}"}).json()
    beams = translated(server, alternatives=1)
    for key, [text] in (("translatedText", [beams["translatedText"]]), ("alternatives", beams["alternatives"])):
        assert form[key] in (f"{text} {text}", [f"{text} {text}"])
    mixed = translated(server, alternatives=1, q=[TEXT, ""])
    assert [len(others) for others in mixed["alternatives"]] == [1, 0]
    assert "alternatives" not in translated(server, alternatives=-1)
    reason = refusal(post(server, json=QUERY | KEY | {"alternatives": 10**6}))[1]
    most = int(reason.removeprefix("alternatives: 1000000 is more than ").partition(",")[0])
    assert refusal(post(server, json=QUERY | KEY | {"alternatives": most + 1}))[1].startswith(f"alternatives: {most + 1} is more")
    assert "max_message_bytes" in refusal(post(server, json=QUERY | KEY | {"alternatives": most}))[1], "too long, not too many"


def test_tags_stay_around_their_words_in_html(server: Server) -> None:
    """As Mastodon asks for the parts of a post, and Discourse for one in a form."""
    parts = ["<p>A man in a <b>red shirt</b> &amp; a dog.</p><p>Two dogs.</p>", "", 'A <a href="/x">dog</a>']
    found = translated(server, q=parts, format="html")["translatedText"]
    assert re.fullmatch(r"<p>[^<]+<b>[^<]*rote[^<]*</b>[^<]+</p><p>[^<]+</p>", found[0]), found
    assert found[1] == "" and re.fullmatch(r'[^<]*<a href="/x">[^<]+</a>[^<]*', found[2]), found
    form = post(server, data=QUERY | KEY | {"q": parts[0], "format": "html", "source": "auto"})
    assert form.json()["translatedText"] == found[0]
    both = translated(server, q=parts[2], format="html", alternatives=1)
    assert all('<a href="/x">' in text for text in (both["translatedText"], *both["alternatives"]))
    plain = translated(server, q="Two <b>dogs</b>", format="text")
    assert plain["translatedText"] != translated(server, q="Two <b>dogs</b>", format="html")["translatedText"]


INVALID: list[tuple[dict[str, Any], str]] = [
    *[({"q": value}, "q: is missing") for value in ("", [], None)],
    *[({"q": value}, "q: is neither a text nor a list of texts") for value in (7, [["A dog."]], ["A dog.", 7], {"a": "b"})],
    ({"source": None}, "source: is missing"),
    ({"target": ""}, "target: is missing"),
    ({"target": 7}, "target: is no text"),
    ({"target": "tlh"}, "target: 'tlh' is not supported; there: de, en, fr"),
    ({"source": "x" * 10**4}, f"source: {'x' * 32!r} is not supported; there: de, en, fr"),
    ({"source": "\x00\n"}, "source: '\\x00\\n' is not supported"),
    ({"source": "de", "target": "fr"}, "target: no model translates from 'de' to 'fr'; there: en to de"),
    ({"model": "none"}, "model"),
    ({"format": "pdf"}, "format: 'pdf' is not supported"),
    ({"q": ["A"] * 1025}, "q: 1025 texts; at most 1024 are translated at once"),
    ({"q": ["Yes. " * 2001] * 2}, "q: more than 20000 characters, max_text_characters of the server"),
    *[({"alternatives": value}, "alternatives: is no whole number") for value in ("many", 1.5, True, [1], "9" * 20)],
    *[
        ({"alternatives": 7, "q": "A dog." + kept}, "q: its answers have more than 65536 bytes, max_message_bytes")
        for kept in ("-\n" * 6000, "—\n" * 3000)
    ],
]
FORM, PARTS = "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"
UNREADABLE = [
    *[
        (body, "application/json", 400)
        for body in (
            b"{",
            b"[]",
            b"[" * 10**4,
            b'{"q": "\xff"}',
            b'{"q": "\\ud800", "source": "en"}',
            b'{"q": "a", "q": "b", "source": "en", "target": "de"}',
        )
    ],
    *[(body, FORM, 400) for body in (b"q=%FF&source=en&target=de", b"q=\xff&target=de", b"q=a&q=b&source=en&target=de")],
    (b"&".join([b"x=y"] * 1000), FORM, 400),
    *[(body, PARTS, 400) for body in (b"--a\r\n\r\n--a--", b"--a" * 1000)],
    (b'--a\r\nContent-Disposition: form-data; name="q"; filename="f"\r\n\r\nx\r\n--a--', PARTS, 400),
    *[(b'--a\r\nContent-Disposition: form-data; name="a-key' + end + b"\r\n\r\nx\r\n--a--", PARTS, 400) for end in (b"", b'"; x')],
    (b'--a\r\nContent-Disposition: form-data; name="q"\r\n\r\n\xff\r\n--a--', PARTS, 400),
    (b"", "multipart/form-data", 400),
    (b"A dog.", "text/plain", 415),
    (b"x" * 70_000, "application/json", 413),
]


def test_invalid_fields_are_refused_by_name_before_any_work_and_unreadable_bodies_too(server: Server) -> None:
    before = server.metric("dragoman_request_success_total")
    for fields, message in INVALID:
        status, reason = refusal(post(server, json=QUERY | KEY | fields))
        assert status == 400 and reason.startswith(message), reason[:200]
    for body, kind, expected in UNREADABLE:
        headers = {"Content-Type": kind, "Authorization": "Bearer a-key"}
        assert refusal(post(server, data=body, headers=headers))[0] == expected, body[:40]
    assert server.metric("dragoman_request_success_total") == before


def test_a_key_is_a_token_in_the_message_or_a_header(server: Server, german: str) -> None:
    for arguments in (
        {"json": QUERY | KEY},
        {"data": QUERY | KEY},
        {"params": QUERY | KEY},
        {"json": QUERY, "headers": {"Authorization": "Bearer a-key"}},
        {"json": QUERY | {"api_key": "other"}, "headers": {"Authorization": "Bearer a-key"}},
    ):
        assert post(server, **arguments).json() == {"translatedText": german}
    for arguments in (
        {"json": QUERY},
        *[{"json": QUERY | {"api_key": key}} for key in ("other", "a-key ", "")],
        {"json": QUERY | KEY, "headers": {"Authorization": "Bearer other"}},
        {"data": QUERY | {"api_key": "\x00\n"}},
    ):
        status, reason = refusal(post(server, **arguments))
        assert status == 403 and reason.startswith("authorization: a bearer token")
    assert refusal(post(server, "/detect", json={"q": "a"}))[0] == 403
    assert refusal(post(server, json={"q": "x" * 10**6}))[0] == 413, "its key would have been in the part that is not read"
    assert refusal(post(server, "/translate_file", json=KEY)) == (400, "file: is missing or blank")
    assert refusal(post(server, "/translate_file", json={"file": "a"}))[0] == 403
    assert refusal(post(server, "/suggest", json=KEY)) == (403, "suggestions are disabled on this server")
    assert requests.get(f"{server.http_address}/translate", timeout=60).status_code == 405
    for key in (None, "other"):
        with pytest.raises(urllib.error.HTTPError) as caught:
            LibreTranslateAPI(server.http_address, key).translate(TEXT, "en", "de")
        assert caught.value.code == 403 and list(json.loads(caught.value.read())) == ["error"]


def test_files_are_translated_and_found_by_their_address(server: Server, german: str) -> None:
    def send(filename: str, content: bytes, **fields: str) -> requests.Response:
        languages = {"source": "en", "target": "de"} | KEY
        return post(server, "/translate_file", files={"file": (filename, content)}, data=languages | fields)

    address = send("\u00fc.TXT", f"{TEXT}\r\n\n{TEXT}".encode()).json()["translatedFileUrl"]
    assert address.startswith(f"{server.http_address}/download_file/") and address.endswith(".txt")
    for _ in range(2):
        found = requests.get(address, timeout=60)
        assert found.content.decode() == f"{german}\r\n\n{german}"
        assert found.headers["Content-Disposition"] == "attachment; filename*=UTF-8''%C3%BC.TXT"
        assert found.headers["Content-Type"] == "text/plain; charset=utf-8"
    cue = "1\n00:00:01,000 --> 00:00:02,000\n{}\n"
    address = send("a.srt", cue.format(f"<i>{TEXT}</i>").encode()).json()["translatedFileUrl"]
    found = requests.get(address, timeout=60)
    assert found.text == cue.format(f"<i>{german}</i>") and found.headers["Content-Type"] == "application/x-subrip"
    message = 'msgid "Two %d men."\nmsgstr ""\n'
    found = requests.get(send("a.po", message.encode()).json()["translatedFileUrl"], timeout=60)
    assert re.fullmatch(r'#, fuzzy\nmsgid "Two %d men."\nmsgstr "[^"]*%d[^"]*"\n', found.text), found.text
    nothing = send("a.xliff", b'<xliff version="1.2"/>').json()["translatedFileUrl"]
    assert requests.get(nothing, timeout=60).text.endswith('<xliff version="1.2"/>')
    assert send("a.txt", TEXT.encode(), source="auto").status_code == 200
    for response, message in (
        (send("a.exe", b"MZ\x90"), "file: documents of the kind 'exe' are not translated; those of txt, htm, html, srt, vtt"),
        (send("a.txt", b"\xff"), "file: is no UTF-8"),
        (send("a.txt", b" "), "file: is missing or blank"),
        (send("a.txt", b"a", target="tlh"), "target: 'tlh' is not supported"),
        (send("a.txt", b"a", source=""), "source: is missing"),
        (post(server, files={"q": (None, "a"), "file": ("a.txt", "a")}), "body: has a file that is not read"),
    ):
        assert response.status_code == 400 and refusal(response)[1].startswith(message), response.text
    for path in ("a.txt", f"{'A' * 48}.txt", "%2e%2e%2fetc%2fpasswd"):
        assert requests.get(f"{server.http_address}/download_file/{path}", timeout=60).status_code == 404


def test_texts_of_a_call_are_one_request_to_its_callers_limits(server: Server) -> None:
    response = post(server, json=QUERY | {"q": ["A dog."] * 20, "api_key": "few"})
    assert response.status_code == 200, "texts of a message wait for each other"
    status, reason = refusal(post(server, json=QUERY | {"target": "fr", "api_key": "few"}))
    assert (status, reason) == (400, "target: 'fr' is not supported; there: de, en"), "nothing is told of other models"
    first, slow = (post(server, json=QUERY | {"q": ["A."] * 20, "api_key": "slow"}) for _ in range(2))
    assert (first.status_code, slow.status_code) == (200, 429), "a call is one request"
    assert int(slow.headers["Retry-After"]) > 0
    assert slow.json()["error"].startswith("requests_per_second: 0.001 are allowed")
