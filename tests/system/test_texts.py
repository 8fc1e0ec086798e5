"""Long texts beside others: once begun they wait for the queue, within the limits of their caller; any word is cut to fit."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import requests

from dragoman.client.errors import CallError, InvalidArgument, Overloaded
from dragoman.client.sync import Client
from tests.system.harness.callers import NO_RETRY
from tests.system.harness.server import Server, serving

pytestmark = pytest.mark.e2e

CALLERS = """
[callers.text]
token = "text"
[callers.others]
token = "others"
[callers.few]
token = "few"
max_waiting = 2
"""
SENTENCES = [f"A man sees {number} dogs." for number in range(40)]


@pytest.fixture(scope="module")
def server(bundles: Path) -> Iterator[Server]:
    with serving(bundles / "en-de", "--max-slots", "2", "--max-waiting-requests", "8", callers=CALLERS) as server:
        yield server
        server.wait_until_idle()
        assert server.problems() == []


def test_a_text_that_has_begun_is_not_turned_away_by_requests_of_others(server: Server) -> None:
    is_over, num_texts = Event(), 0

    def flood(number: int) -> None:
        with Client(server.address, token="others", retry=NO_RETRY) as client:
            while not is_over.is_set():
                try:
                    client.generate(f"A dog {number}.")
                except Overloaded:
                    is_over.wait(0.005)

    with ThreadPoolExecutor(16) as pool, Client(server.address, token="text", retry=NO_RETRY) as client:
        floods = [pool.submit(flood, number) for number in range(16)]
        try:
            while num_texts < 4:
                try:
                    found = client.generate(" ".join(SENTENCES), split="sentences", timeout_seconds=120)
                    assert len(found.segments) == len(SENTENCES)
                    num_texts += 1
                except Overloaded as error:
                    assert error.message.endswith("(characters 0 to 18)"), "it is refused before it begins"
        finally:
            is_over.set()
        for each in floods:
            each.result()


def test_texts_of_a_message_wait_for_each_other(server: Server) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [6], "data": [" ".join(SENTENCES[:4])] * 6}
    body = {"inputs": [text], "parameters": {"split": "sentences"}}
    headers = {"Authorization": "Bearer few"}
    answer = requests.post(f"{server.http_address}/v2/models/en-de/infer", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text


def letters(text: str) -> str:
    return "".join(filter(str.isalnum, text))


@pytest.mark.parametrize("word", ["q", "😀", "\ufdfa", "é", "ab,"])
def test_what_has_too_many_tokens_is_cut(server: Server, word: str) -> None:
    with Client(server.address, token="text") as client:
        most = client.model("en-de").max_source_tokens
        for count in (most // 4, most - 1, most, 4 * most):
            source = f"A dog. X{word * count}"
            found = client.generate(source, split="sentences", max_new_tokens=2)
            spans = [source[one.source_start : one.source_end] for one in found.segments]
            assert spans[0] == "A dog." and letters("".join(spans)) == letters(source)
            if word.isalnum():
                assert [one.is_cut for one in found.segments[1:]] == [True] * (len(spans) - 2) + [False]
        with pytest.raises(CallError, match="max_source_tokens"):
            client.generate(f"A dog. {word * 4 * most}")


DOCUMENTS = {
    "an entity that expands": ('<!DOCTYPE a [<!ENTITY b "bbbbbbbbbb"><!ENTITY c "&b;&b;&b;">]><a>&c;</a>', "xml", "text: "),
    "an entity of a file": ('<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><a>&x;</a>', "xml", "text: "),
    "deep XML": ("<a>" * 14_000 + "A dog." + "</a>" * 14_000, "xml", "text: |"),
    "deep HTML": ("<b>" * 33_000 + "A dog.", "html", ""),
    "elements around each letter": ("<i>a</i> " * 11_000, "html", ""),
    "ends without beginnings": ("A dog." + "</b>" * 24_000, "html", ""),
    "comments that do not end": ("A dog. " + "<!--" * 24_000, "html", ""),
    "attributes that do not end": ("A dog. " + "<a b='" * 16_000, "html", ""),
    "references": ("&amp;" * 19_000, "html", ""),
    "a word": ("<p>" + "q" * 99_000 + "<b>a</b>", "html", ""),
    "empty elements in a word": ("A d" + "<b></b>" * 14_000 + "og.", "html", ""),
    "placeholders": ("A dog. " + "%s" * 45_000, "none", ""),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_hostile_document_is_answered_or_refused_and_others_do_not_notice(server: Server, name: str) -> None:
    text, markup, refusal = DOCUMENTS[name]
    is_over = Event()

    def neighbour() -> int:
        count = 0
        with Client(server.address, token="others") as client:
            while not is_over.is_set():
                assert client.generate(f"A dog {count}.", no_cache=True).text
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool, Client(server.address, token="text", timeout_seconds=500) as client:
        answers = pool.submit(neighbour)
        try:
            found = client.generate(text, markup=markup, keep_placeholders=markup == "none", max_new_tokens=4).text
            assert refusal in ("", "text: |") and "root:" not in found
            assert found.count("<") == text.count("<")
        except InvalidArgument as error:
            assert refusal and error.message.startswith(refusal.rstrip("|"))
        finally:
            is_over.set()
        assert answers.result() > 0
