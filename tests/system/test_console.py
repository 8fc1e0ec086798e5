"""The console in a real Chromium, on the real server with shipped models: every flow, errors, hostile texts, keyboard, phone, axe.

No page may log anything on its console, call another host, or break its own policy (`Tab`).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import grpc
import pytest
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.models import ModelFolder
from tests.system.harness.server import ROOT, Event, Server, serving

pytestmark = pytest.mark.e2e

TEXT = "Two young girls are playing with a red ball in front of an old house."
DOG = "A dog runs through the snow."
PHONE = {"width": 375, "height": 812}
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Answer by the browser, not by the page: an answer of the server that is an error, which tests of errors want.
REFUSED = "Failed to load resource"
NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


class Tab:
    """A page of the console, in a context of its own, and its problems: lines on its console, exceptions, calls of other hosts.

    With `is_refused` the test wants the server to refuse something, which the browser tells on the console.
    """

    def __init__(self, browser: Any, address: str, *, view: str = "try", is_refused: bool = False, **options: Any) -> None:
        self.problems: list[str] = []
        self.is_refused = is_refused
        self._host = urlsplit(address).netloc
        self._context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}} | options)
        self._context.set_default_timeout(20_000)
        self._context.add_init_script(NOTE_VIOLATIONS)
        self.page = self._context.new_page()
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        self.page.on("request", lambda request: self._check(request.url))
        self.page.goto(f"{address}/#{view}")

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not (self.is_refused and text.startswith(REFUSED)):
            self.problems.append(f"{kind}: {text}")

    def _check(self, url: str) -> None:
        if urlsplit(url).scheme != "data" and urlsplit(url).netloc != self._host:
            self.problems.append(f"another host: {url}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        violations = self.page.evaluate("window.violations")
        self._context.close()
        assert not self.problems + violations

    def ask(self, text: str, model: str = "en-de", **options: str) -> None:
        page = self.page
        page.locator(f'#model option[value="{model}"]').wait_for(state="attached")
        page.select_option("#model", model)
        page.fill("#text", text)
        if options:
            page.locator(".options").evaluate("(options) => { options.open = true; }")
        for name, value in options.items():
            field = page.locator(f"#{name.replace('_', '-')}")
            if name in ("search", "split", "markup"):
                field.select_option(value)
            else:
                field.fill(value)
        page.click("#go")

    def answer(self) -> str:
        self.page.locator('#result[aria-busy="false"]').wait_for()
        self.page.locator("#looks-into .tokens").wait_for()
        return str(self.page.locator("p.answer").text_content())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window; tests are skipped where it or what drives it is not installed."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with driver.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture(scope="module")
def server(browser: Any, shipped_bundle: Callable[..., Path], endless: Path, tmp_path_factory: Any) -> Iterator[Server]:
    """A server of a translator, a language model, and a model that never ends; without a browser nothing is made."""
    folder = tmp_path_factory.mktemp("console")
    for name in ("en-de", "en-captions"):
        (folder / name).symlink_to(shipped_bundle(name))
    (folder / "alpha").symlink_to(endless / "alpha")
    with serving(folder) as started:
        yield started


@pytest.fixture
def tab(browser: Any, server: Server) -> Iterator[Tab]:
    with Tab(browser, server.http_address) as tab:
        yield tab


def native(server: Server, text: str = TEXT, **fields: Any) -> Any:
    with grpc.insecure_channel(server.address) as channel:
        return GenerationStub(channel).Generate(GenerateRequest(model="en-de", text=text, **fields))


def luminance(colour: str) -> float:
    """Return a colour's relative luminance (WCAG 2), with what it adds to both sides of a contrast."""
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)][:3]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.05 + 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def violations(page: Any) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    found = axe.run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:160]} {node['failureSummary']}" for one in found for node in one["nodes"]]


def test_an_answer_and_its_beams_are_those_of_the_api(tab: Tab, server: Server) -> None:
    tab.ask(TEXT)
    expected = native(server)
    assert tab.answer() == expected.text and expected.model_version in tab.page.inner_text("#status")
    assert "Warning" not in tab.page.inner_text("#status")
    tab.ask(f"{TEXT} {TEXT}")
    tab.page.locator("#status", has_text="Warning: the text has several sentences").wait_for()
    tab.ask(TEXT, search="beams", num_beams="4", num_answers="3", length_penalty="0.6")
    shown, answers = tab.answer(), native(server, num_beams=4, num_return_sequences=3, length_penalty=0.6).answers
    choices = tab.page.locator(".choice")
    assert [choices.nth(i).locator(".offer").inner_text() for i in range(3)] == [answer.text for answer in answers]
    assert all(f"score {answer.score:.3f}" in choices.nth(i).inner_text() for i, answer in enumerate(answers))
    assert shown == answers[0].text and choices.nth(0).get_attribute("aria-pressed") == "true"
    choices.nth(2).click()
    assert tab.answer() == answers[2].text
    texts = []
    for _ in range(2):  # samples of one seed are the same
        tab.ask(TEXT, search="sampling", temperature="1.3", top_k="50", top_p="0.95", seed="11", num_answers="2")
        choices.nth(1).wait_for()
        texts.append([tab.answer(), choices.nth(1).locator(".offer").inner_text()])
    assert texts[0] == texts[1]


def test_a_divided_text_shows_its_segments_and_a_document_its_tags(tab: Tab, server: Server) -> None:
    long_text = f"{TEXT}\n\n{TEXT}"
    tab.ask(long_text, split="sentences")
    rows = tab.page.locator("#segments tbody tr")
    rows.nth(1).wait_for()
    expected = native(server, long_text, split="sentences")
    assert tab.page.text_content("#answer .answer") == expected.text and "\n\n" in expected.text
    cells = [rows.nth(i).locator("td").all_inner_texts() for i in range(2)]
    assert cells == [[TEXT, native(server).text, f"{segment.score:.3f}"] for segment in expected.segments]
    document = f"<b>{TEXT}</b> <script>x</script>"
    tab.ask(document, markup="html", split="")
    tab.page.locator("#answer .answer", has_text="<script>").wait_for()
    assert tab.page.text_content("#answer .answer") == native(server, document, markup="html").text
    assert "<b>" in native(server, document, markup="html").text and not tab.page.locator("#segments").count()


def test_another_word_is_chosen_and_the_rest_is_translated_anew(tab: Tab, server: Server) -> None:
    tab.ask(TEXT)
    before, words, items = tab.answer(), tab.page.locator(".word"), tab.page.get_by_role("menuitem")
    prefix = before[: before.index(" Mädchen")]
    words.nth([words.nth(i).inner_text() for i in range(words.count())].index("Mädchen")).click()
    items.first.wait_for()
    expected = [
        answer.text for answer in native(server, forced_prefix=prefix, return_alternatives=True, num_return_sequences=8).answers
    ]
    offered = [items.nth(i).locator(".offer").inner_text() for i in range(items.count())]
    assert 2 <= len(offered) <= 8 and offered[0] == "Mädchen"
    assert all(any(text.startswith(f"{prefix} {one}") for text in expected) for one in offered)
    items.nth(1).click()
    tab.page.wait_for_function("(old) => document.querySelector('p.answer')?.textContent !== old", arg=before)
    chosen = f"{prefix} {offered[1]}"
    assert tab.answer() == native(server, forced_prefix=chosen).text != before
    assert " ".join(tab.page.locator(".word.kept").all_inner_texts()) == chosen


def test_words_are_linked_to_the_source_and_tokens_have_log_probabilities(tab: Tab, server: Server) -> None:
    tab.ask(DOG)
    answer = tab.answer()
    tab.page.locator(".heat").wait_for()
    assert tab.page.inner_text(".source") == DOG
    word = tab.page.locator(".word", has_text="Hund")
    word.hover()
    assert "dog" in tab.page.locator(".source .seen").all_inner_texts()
    assert re.match(r"“Hund” attends to dog \d+ %", tab.page.inner_text("#looks"))
    word.focus()
    assert tab.page.inner_text("#looks").startswith("“Hund” attends to dog")
    rows = tab.page.locator(".heat tbody tr")
    assert "".join(rows.nth(i).locator("th").inner_text() for i in range(rows.count())) == answer.replace(" ", "")
    for i in range(rows.count()):  # rounded each, and below half a percent not shown
        assert abs(sum(float(cell or 0) for cell in rows.nth(i).locator("td").all_inner_texts()) - 100) <= 4
    expected, tokens = native(server, DOG, return_log_probs=True).answers[0].log_probs, tab.page.locator(".tokens li")
    assert tokens.count() == len(expected)
    assert "".join(str(tokens.nth(i).locator(".piece").text_content()) for i in range(len(expected) - 1)).strip() == answer
    for i, token in enumerate(expected):
        assert abs(float(tokens.nth(i).locator(".share").nth(1).inner_text()) - token.log_prob) < 0.02


def test_a_language_model_continues_its_prompt(tab: Tab) -> None:
    tab.ask("A dog", "en-captions", max_new_tokens="8")
    assert tab.page.inner_text("#text-label") == "Prompt" and tab.page.inner_text("#go") == "Continue"
    assert tab.answer() and "language model" in tab.page.inner_text("#no-attention")
    assert tab.page.locator(".heat").count() == 0 and tab.page.locator("#source-language").is_hidden()


def test_pieces_are_shown_as_they_come_and_leaving_or_cancelling_frees_the_slot(browser: Any, server: Server) -> None:
    """The model goes on for 900 tokens, which end inside characters: as text that is more tokens than the model takes."""
    with Tab(browser, server.http_address, is_refused=True) as tab:
        tab.ask("a dog", "alpha", max_new_tokens="900")
        tab.page.wait_for_function("() => document.querySelector('p.writing')?.textContent.length > 20")
        first = len(tab.page.locator("p.writing").text_content() or "")
        tab.page.wait_for_function(f"() => (document.querySelector('p.answer')?.textContent.length ?? 0) > {first}")
        tab.page.locator("#status", has_text="900 written").wait_for(timeout=60_000)
        tab.page.locator("#looks-into", has_text="not available: target").wait_for()
    for is_cancelled in (True, False):
        with Tab(browser, server.http_address) as tab:
            tab.ask("a dog", "alpha", max_new_tokens="900")
            tab.page.wait_for_function("() => document.querySelector('p.writing')?.textContent.length > 5")
            if is_cancelled:
                tab.page.click("#cancel")
                tab.page.wait_for_function("() => document.querySelector('#status').textContent.startsWith('Cancelled')")
                assert tab.page.locator("#cancel").is_hidden()
        assert server.wait_for(Event.CALL, method="POST /v1/generate:stream", code="CANCELLED")


def test_a_reload_leaves_the_form_as_it_is(tab: Tab, server: Server) -> None:
    tab.ask(DOG, "en-captions", search="sampling", seed="7", max_new_tokens="12")
    tab.page.check("#truncate")
    before = tab.page.text_content("[data-call=Python] code")
    tab.page.reload()
    tab.page.locator('#model option[value="en-captions"]').wait_for(state="attached")
    assert "truncate=True" in before and "seed=7" in before and tab.page.text_content("[data-call=Python] code") == before


def test_the_copied_calls_give_the_answer_on_the_page(browser: Any, server: Server) -> None:
    """Quotes of every kind are in the text; curl and Python are run as they stand, the message for grpcurl is sent."""
    text = 'A man\'s "red" $HOME `car` \\n on a bench.'
    with Tab(browser, server.http_address, permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab.ask(text, search="beams", num_beams="2", num_answers="2", length_penalty="0.8", max_new_tokens="30")
        shown, copied = tab.answer(), {}
        tab.page.get_by_role("button", name="Copy the answer").click()
        assert tab.page.evaluate("navigator.clipboard.readText()") == shown
        for name in ("curl", "gRPC", "Python"):
            tab.page.locator(f'[data-call="{name}"] summary').click()
            tab.page.get_by_role("button", name=f"Copy {name}").click()
            copied[name] = tab.page.evaluate("navigator.clipboard.readText()")
    streamed = subprocess.run(["bash", "-c", copied["curl"]], capture_output=True, text=True, check=True, timeout=60).stdout
    assert [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line][-1]["result"]["text"] == shown
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, "-c", copied["Python"]], capture_output=True, text=True, timeout=60, env=environment)
    assert printed.stdout == shown, printed.stderr
    program, plain, *words, address, method = shlex.split(copied["gRPC"])
    assert (program, plain, address, method) == ("grpcurl", "-plaintext", server.address, "dragoman.v1.Generation/GenerateStream")
    with grpc.insecure_channel(address) as channel:
        request = json_format.Parse(words[words.index("-d") + 1], GenerateRequest())
        assert [*GenerationStub(channel).GenerateStream(request)][-1].result.text == shown


def test_the_grid_shows_running_sequences_until_they_end(browser: Any, server: Server) -> None:
    with Tab(browser, server.http_address, view="engine") as watching, Tab(browser, server.http_address) as asking:
        panel = watching.page.get_by_role("article", name=re.compile("^alpha "))
        grid = panel.locator(".slots")
        grid.wait_for()
        slots = grid.locator("i").count()
        assert str(grid.get_attribute("aria-label")).startswith(f"0 of {slots} slots")
        asking.ask("a dog", "alpha", search="sampling", num_answers="3", max_new_tokens="900")
        watching.page.wait_for_function("() => document.querySelectorAll('.slot.used').length === 3")
        assert "3 of" in str(grid.get_attribute("aria-label")) and "by 1 request" in str(grid.get_attribute("aria-label"))
        hues = grid.locator(".used").evaluate_all("(cells) => cells.map((cell) => cell.style.getPropertyValue('--hue'))")
        assert len(set(hues)) == 1 and "of at most 900 written" in str(grid.locator(".used").first.get_attribute("title"))
        assert panel.locator("dd").first.inner_text() == f"3 of {slots}"
        watching.page.wait_for_function(
            "() => [...document.querySelectorAll('article')].some((one) => one.ariaLabel.startsWith('alpha') && "
            "Number(one.querySelector('.trend dd').textContent) > 0)"
        )
        scales = panel.locator(".trend").all_inner_texts()
        assert len(scales) == 4 and all(re.search(r"max [\d.]*[1-9][\d.]*( m?s)? in 30 s", scale) for scale in scales)
        asking.page.click("#cancel")
        watching.page.wait_for_function("() => document.querySelectorAll('.slot.used').length === 0")
        assert watching.page.inner_text("#engine-state") == "Ready"


def test_models_are_described_by_cards_and_reports(browser: Any, server: Server) -> None:
    with Tab(browser, server.http_address, view="models") as tab:
        panel = tab.page.get_by_role("article", name="en-de", exact=True)
        panel.wait_for()
        assert "fp32" in panel.inner_text() and "transformer" in panel.inner_text()
        for part in ("Card", "Parity"):
            panel.locator("summary", has_text=part).click()
        assert "captions of photographs" in panel.locator(".card").inner_text()
        report = panel.locator("details", has=tab.page.locator("summary", has_text="Parity"))
        assert re.search(r"\d", report.locator(".told").first.inner_text())
        assert "does not change models over HTTP" in tab.page.inner_text("#lifecycle-note")
        assert panel.get_by_role("button").count() == 0


def test_an_operator_changes_models_and_sees_the_outcome(browser: Any, models: ModelFolder) -> None:
    operators = '[callers.anna]\ntoken = "an-operators-long-token"\n'
    models.put("alpha", "1", "one")
    started = serving(models.path, "--http-admin", "true", "--models-poll-seconds", "3600", operators=operators)
    with started as server, Tab(browser, server.http_address, view="models", is_refused=True) as tab:
        page, panel = tab.page, tab.page.get_by_role("article", name="alpha", exact=True)
        panel.wait_for()
        assert "operator's token" in page.inner_text("#lifecycle-note") and panel.get_by_role("button").count() == 0
        for token in ("wrong", "an-operators-long-token"):
            page.get_by_role("button", name="Enter token").click()
            page.fill("#token-text", token)
            page.keyboard.press("Enter")
        panel.get_by_role("button", name="Reload alpha").wait_for()
        assert "serving" in panel.get_by_role("table").inner_text()
        models.put("alpha", "2", "two")
        panel.get_by_role("button", name="Reload alpha").click()
        page.locator("#lifecycle-note", has_text="alpha: reload was done.").wait_for()
        panel.get_by_role("row", name=re.compile("^2 (trial|serving)")).wait_for()
        panel.get_by_role("button", name="Unload alpha").click()  # is to be confirmed
        assert "sure" in panel.inner_text()
        for verb in ("Unload", "Load"):
            panel.get_by_role("button", name=f"{verb} alpha").click()
            page.locator("#lifecycle-note", has_text=f"alpha: {verb.lower()} was done.").wait_for()
        panel.locator(".badge", has_text="ready").wait_for()


def test_a_token_stays_in_the_session_and_a_server_that_is_gone_is_shown(browser: Any, shipped_bundle: Callable[..., Path]) -> None:
    token = "a-long-and-random-token"
    started = serving(shipped_bundle("en-de"), callers=f'[callers.web]\ntoken = "{token}"\n')
    with started as server, Tab(browser, server.http_address, is_refused=True) as tab:
        page = tab.page
        page.locator("#token").wait_for()
        for given in ("wrong", token):
            page.fill("#token-text", given)
            page.keyboard.press("Enter")
            if given == "wrong":
                page.wait_for_function(
                    "() => !document.querySelector('#token-text').value && !document.querySelector('#token').hidden"
                )
        tab.ask(DOG)
        assert tab.answer().startswith("Ein Hund") and page.locator("#token").is_hidden()
        assert token not in page.evaluate("Object.values(localStorage).join() + document.cookie + location.href")
        assert page.evaluate("(token) => Object.entries(sessionStorage).filter((one) => one[1].includes(token)).length", token) == 1
        calls = " ".join(page.locator(".call code").all_text_contents())
        assert token not in calls and calls.count("DRAGOMAN_TOKEN") == 3
        page.reload()
        for view in ("engine", "models"):
            page.click(f"#tab-{view}")
            page.locator(".badge:visible", has_text=re.compile("serving|ready")).wait_for()
        page.click("#tab-try")
        tab.ask(DOG)
        assert tab.answer().startswith("Ein Hund")
        server.process.kill()
        server.wait()
        page.click("#go")
        page.locator("#try-problem", has_text="The server cannot be reached.").wait_for()
        assert page.get_by_role("button", name="Try again").is_visible() and tab.answer().startswith("Ein Hund")
        for view in ("models", "engine"):
            page.click(f"#tab-{view}")
            page.locator(f"#{view}-state", has_text="The server cannot be reached.").wait_for()
            assert page.locator(".badge:visible").all_inner_texts() == ["unknown"]


def test_refusals_leave_the_answer_and_offer_no_second_try_and_long_texts_may_be_cut(tab: Tab) -> None:
    tab.is_refused = True
    tab.ask(DOG)
    shown, status = tab.answer(), tab.page.inner_text("#status")
    long = "a dog runs " * 909 + "x"
    for text, reason in ((" ", "text"), (long, "512")):
        tab.ask(text)
        tab.page.locator("#try-problem", has_text=reason).wait_for()
        assert tab.page.get_by_role("button", name="Try again").count() == 0
        assert (tab.answer(), tab.page.inner_text("#status")) == (shown, status)
    tab.page.locator(".options").evaluate("(options) => { options.open = true; }")
    tab.page.check("#truncate")
    tab.ask(long, max_new_tokens="40")
    tab.page.locator("#status", has_text="the text was cut").wait_for()
    tab.page.locator("#looks-into > *").first.wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.ask(DOG)
    assert tab.answer() and tab.page.locator("#try-problem").is_hidden()


HOSTILE = (
    "<script>window.hit = 1</script> a dog",
    "<img src=x onerror='window.hit = 1'> \" ' & </textarea>",
    "\u202eكلب يركض في الثلج \u2066 שלום",
    "a 🐕‍🦺 👩🏽‍🚀 runs \ud7ff 🇩🇪 \u0007",
)
CARD = """---
license: x
---
# <b>Title</b> `code`
<script>window.hit = 1</script> **strong** [web](https://example.org/) [script](javascript:alert(1)) [file](../x)

- one <img src=x onerror=window.hit=1>
  goes on
- two

| a | b |
|---|---|
| 1 | <i>2</i> |

```
<pre>
"""


def test_hostile_texts_and_cards_are_shown_as_text(tab: Tab) -> None:
    for text in HOSTILE:
        tab.ask(text, max_new_tokens="20")
        tab.answer()
        tab.page.locator(".heat").wait_for()
        assert tab.page.inner_text(".source").split() == text.split()
        assert tab.page.locator("#view-try script, #view-try img").count() == 0
    tab.page.evaluate("async (card) => document.body.append((await import('/console/assets/markdown.js')).markdown(card))", CARD)
    card = tab.page.locator(".card")
    assert card.locator("h3").inner_text() == "<b>Title</b> code"
    assert card.locator("a").evaluate_all("(links) => links.map((link) => link.href)") == ["https://example.org/"]
    assert card.locator("li").all_inner_texts() == ["one <img src=x onerror=window.hit=1> goes on", "two"]
    assert card.locator("td").all_inner_texts() == ["1", "<i>2</i>"]
    assert card.locator("script, img, b, i").count() == 0 and "license" not in card.inner_text()
    assert tab.page.evaluate("window.hit") is None


def test_no_page_can_show_the_console_in_a_frame(browser: Any, server: Server) -> None:
    page = browser.new_page()
    page.set_content(f'<iframe src="{server.http_address}/"></iframe>')
    page.frame_locator("iframe").locator("body").wait_for(state="attached")
    (frame,) = page.main_frame.child_frames
    assert frame.url.startswith("chrome-error:") and frame.locator("#go").count() == 0
    page.close()


@pytest.mark.parametrize("view", ["try", "engine", "models"])
def test_a_phone_shows_the_header_then_a_short_view_and_the_keyboard_begins_there(browser: Any, server: Server, view: str) -> None:
    with Tab(browser, server.http_address, view=view, viewport=PHONE) as tab:
        for _ in range(2):
            tab.page.get_by_role("tabpanel").wait_for()
            assert tab.page.evaluate("scrollY") == 0
            tab.page.keyboard.press("Tab")
            assert tab.page.evaluate("document.activeElement.id") == f"tab-{view}"
            tab.page.reload()
        if view == "try":
            for options in ({}, {"search": "beams", "num_answers": "2"}):
                tab.ask(DOG, **options)
                tab.answer()
                [top] = tab.page.locator("p.answer").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().top)")
                assert 0 <= top < PHONE["height"] - 100
        else:
            tab.page.locator("article").nth(2).wait_for()
            assert tab.page.evaluate("document.documentElement.scrollHeight") < 200 + 3 * 500


def test_everything_can_be_done_by_keyboard(tab: Tab) -> None:
    page, keys, focused, menu = tab.page, tab.page.keyboard, "document.activeElement.id", tab.page.get_by_role("menuitem")

    def press_tab_until(condition: str) -> None:
        for _ in range(20):
            if page.evaluate(condition):
                return
            keys.press("Tab")

    page.locator('#model option[value="en-de"]').wait_for(state="attached")
    page.select_option("#model", "en-de")
    page.focus("#tab-try")
    press_tab_until(f"{focused} === 'text'")
    keys.type(DOG)
    keys.press("Control+Enter")
    before = tab.answer()
    page.locator(".heat").wait_for()
    press_tab_until("document.activeElement.classList.contains('word')")
    keys.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Hund"
    keys.press("Enter")
    menu.first.wait_for()
    keys.press("Escape")
    assert page.get_by_role("menu").count() == 0 and page.evaluate("document.activeElement.textContent") == "Hund"
    keys.press("Enter")
    menu.first.wait_for()
    keys.press("ArrowDown")
    chosen = page.evaluate("document.activeElement.querySelector('.offer').textContent")
    keys.press("Enter")
    page.locator(".word.kept").first.wait_for()
    after = tab.answer()
    assert after != before and after.split()[1].startswith(chosen)
    assert page.evaluate("document.activeElement.textContent") == chosen
    page.focus("#tab-try")
    for key, view in (("ArrowRight", "engine"), ("End", "models")):
        keys.press(key)
        assert page.evaluate(focused) == f"tab-{view}" and page.locator(f"#view-{view}").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken_and_a_phone_needs_no_scrolling_sideways(
    browser: Any, server: Server, scheme: str
) -> None:
    def check(page: Any, what: str) -> None:
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert violations(page) == [], what
        page.set_viewport_size({"width": 360, "height": 740})
        assert page.evaluate("document.documentElement.scrollWidth") == 360, what
        cut = "(all) => all.filter((one) => one.offsetWidth > innerWidth).map((one) => one.textContent)"
        assert page.locator("caption, .note").evaluate_all(cut) == [], what
        page.set_viewport_size({"width": 1200, "height": 900})

    with Tab(browser, server.http_address, color_scheme=scheme, reduced_motion="reduce", is_refused=True) as tab:
        page = tab.page
        check(page, "empty")
        tab.ask(TEXT, search="beams")
        tab.answer()
        page.locator(".heat").wait_for()
        page.locator(".word").nth(2).hover()
        check(page, "an answer")
        cells = page.locator(".heat td").evaluate_all(
            "(cells) => cells.map((cell) => [Number(cell.textContent), getComputedStyle(cell).backgroundColor])"
        )
        strong, weak = ({luminance(colour) for share, colour in cells if low <= share <= high} for low, high in ((50, 100), (1, 5)))
        assert strong and weak and all(max(a, b) > 3 * min(a, b) for a in strong for b in weak), "cells look alike"
        page.locator(".word").nth(2).click()
        page.get_by_role("menuitem").first.wait_for()
        check(page, "a menu")
        page.keyboard.press("Escape")
        tab.ask(" ")
        page.locator("#try-problem").wait_for()
        page.evaluate("document.querySelector('#token').hidden = false")
        check(page, "an error")
        for view in ("engine", "models"):
            page.click(f"#tab-{view}")
            page.locator(f"#view-{view} article").first.wait_for()
            check(page, view)
        background = "getComputedStyle(document.documentElement).backgroundColor"
        paper = page.evaluate(background)
        page.get_by_role("link", name="API").click()
        page.wait_for_url("**/docs")
        assert page.evaluate(background) == paper
        check(page, "the API's page")
