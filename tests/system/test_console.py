"""The console in a real Chromium, on the real server with shipped models: every flow, errors, hostile texts, keyboard, phone, axe.

No page may say anything on its console, ask another host, or break its own policy (`Tab.close`).
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.chromium import Tab, chromium
from tests.system.harness.models import ModelFolder

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
TEXT = "Two young girls are playing with a red ball in front of an old house."
VIEWS = ("try", "engine", "models")
REFUSED_AGAIN = "() => document.querySelector('#token-text').value === '' && !document.querySelector('#token').hidden"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def folder(shipped_bundle: Callable[..., Path], endless: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator, a language model, and one that never ends."""
    folder = tmp_path_factory.mktemp("console")
    for name in ("en-de", "en-captions"):
        (folder / name).symlink_to(shipped_bundle(name))
    (folder / "alpha").symlink_to(endless / "alpha")
    return folder


@pytest.fixture(scope="module")
def server(browser: Any, serve: Callable[..., Any], folder: Path) -> Any:
    """A server of all of them; `browser` comes first, so that nothing is made where it is missing."""
    with serve(folder) as started:
        yield started
        assert started.terminate() == 0


@pytest.fixture
def tab(browser: Any, server: Any) -> Iterator[Tab]:
    opened = Tab(browser, server.http_address)
    yield opened
    opened.close()


@contextmanager
def on(browser: Any, address: str, **options: Any) -> Iterator[Tab]:
    opened = Tab(browser, address, **options)
    try:
        yield opened
    finally:
        opened.close()


def rules(page: Any) -> list[str]:
    """Return what axe-core finds wrong with a page."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed").Axe()
    found = axe.run(page).response["violations"]
    return [f"{one['id']}: {node['html'][:160]} {node['failureSummary']}" for one in found for node in one["nodes"]]


# Try


def test_pieces_arrive_before_the_answer_is_whole(tab: Tab) -> None:
    """The model goes on for 900 tokens; what is there grows while it does."""
    tab.is_refused = True
    tab.ask("a dog", "alpha", max_new_tokens="900")
    tab.page.wait_for_function("() => document.querySelector('p.writing')?.textContent.length > 20")
    first = len(tab.page.locator("p.writing").text_content() or "")
    tab.page.wait_for_function(f"() => (document.querySelector('p.answer')?.textContent.length ?? 0) > {first}")
    tab.page.locator("#status", has_text="900 written").wait_for(timeout=60_000)
    # What it writes ends inside characters; as text that is more tokens than the model takes, and the page says so.
    tab.page.locator("#looks-into", has_text="cannot be looked into: target").wait_for()


def test_an_answer_is_what_the_server_answers(tab: Tab, server: Any) -> None:
    tab.ask(TEXT)
    with grpc.insecure_channel(server.address) as channel:
        expected = GenerationStub(channel).Generate(GenerateRequest(model="en-de", text=TEXT))
    assert tab.answer() == expected.text
    assert expected.model_version in tab.page.inner_text("#status")


def test_beams_are_listed_with_their_scores_and_each_can_be_looked_into(tab: Tab, server: Any) -> None:
    tab.ask(TEXT, search="beams", num_beams="4", num_answers="3", length_penalty="0.6")
    shown = tab.answer()
    request = GenerateRequest(model="en-de", text=TEXT, num_beams=4, num_return_sequences=3, length_penalty=0.6, do_sample=False)
    with grpc.insecure_channel(server.address) as channel:
        answers = GenerationStub(channel).Generate(request).answers
    choices = tab.page.locator(".choice")
    assert [choices.nth(i).locator(".offer").inner_text() for i in range(3)] == [answer.text for answer in answers]
    assert [f"score {answer.score:.3f}" in choices.nth(i).inner_text() for i, answer in enumerate(answers)] == [True] * 3
    assert shown == answers[0].text and choices.nth(0).get_attribute("aria-pressed") == "true"
    choices.nth(2).click()
    assert tab.answer() == answers[2].text


def test_samples_with_a_seed_are_the_same_again(tab: Tab) -> None:
    texts = []
    for _ in range(2):
        tab.ask(TEXT, search="sampling", temperature="1.3", top_k="50", top_p="0.95", seed="11", num_answers="2")
        tab.page.locator(".choice").nth(1).wait_for()
        texts.append([tab.answer(), tab.page.locator(".choice .offer").nth(1).inner_text()])
    assert texts[0] == texts[1]


def test_another_word_is_chosen_and_the_rest_is_translated_anew(tab: Tab, server: Any) -> None:
    tab.ask(TEXT)
    before = tab.answer()
    words = tab.page.locator(".word")
    place = [words.nth(i).inner_text() for i in range(words.count())].index("Mädchen")
    prefix = before[: before.index(" Mädchen")]
    words.nth(place).click()
    items = tab.page.get_by_role("menuitem")
    items.first.wait_for()
    with grpc.insecure_channel(server.address) as channel:
        wanted = GenerateRequest(model="en-de", text=TEXT, forced_prefix=prefix, return_alternatives=True, num_return_sequences=8)
        expected = [answer.text for answer in GenerationStub(channel).Generate(wanted).answers]
    offered = [items.nth(i).locator(".offer").inner_text() for i in range(items.count())]
    assert 2 <= len(offered) <= 8 and offered[0] == "Mädchen"
    assert all(any(text.startswith(f"{prefix} {one}") for text in expected) for one in offered)
    chosen = offered[1]
    items.nth(1).click()
    tab.page.wait_for_function("(old) => document.querySelector('p.answer')?.textContent !== old", arg=before)
    after = tab.answer()
    assert after.startswith(f"{prefix} {chosen}") and after != before
    with grpc.insecure_channel(server.address) as channel:
        anew = GenerationStub(channel).Generate(GenerateRequest(model="en-de", text=TEXT, forced_prefix=f"{prefix} {chosen}"))
    assert after == anew.text
    kept = tab.page.locator(".word.kept")
    assert " ".join(kept.nth(i).inner_text() for i in range(kept.count())) == f"{prefix} {chosen}"


def test_a_word_marks_the_source_words_it_looks_at(tab: Tab) -> None:
    tab.ask("A dog runs through the snow.")
    answer = tab.answer()
    tab.page.locator(".heat").wait_for()
    assert tab.page.inner_text(".source") == "A dog runs through the snow."
    word = tab.page.locator(".word", has_text="Hund")
    word.hover()
    assert "dog" in tab.page.locator(".source .seen").all_inner_texts()
    assert re.match(r"“Hund” looks at dog \d+ %", tab.page.inner_text("#looks"))
    word.focus()
    assert tab.page.inner_text("#looks").startswith("“Hund” looks at dog")
    rows = tab.page.locator(".heat tbody tr")
    names = [rows.nth(i).locator("th").inner_text() for i in range(rows.count())]
    assert "".join(names) == answer.replace(" ", "")
    for i in range(rows.count()):  # rounded each, and what is below half a percent is not shown
        assert abs(sum(float(cell or 0) for cell in rows.nth(i).locator("td").all_inner_texts()) - 100) <= 4


def test_tokens_have_their_probabilities_as_numbers(tab: Tab, server: Any) -> None:
    tab.ask("A dog runs through the snow.")
    answer = tab.answer()
    with grpc.insecure_channel(server.address) as channel:
        request = GenerateRequest(model="en-de", text="A dog runs through the snow.", return_log_probs=True)
        told = GenerationStub(channel).Generate(request).answers[0].log_probs
    tokens = tab.page.locator(".tokens li")
    assert tokens.count() == len(told)
    assert "".join(str(tokens.nth(i).locator(".piece").text_content()) for i in range(len(told) - 1)).strip() == answer
    for i, one in enumerate(told):
        assert abs(float(tokens.nth(i).locator(".share").nth(1).inner_text()) - one.log_prob) < 0.02


def test_a_language_model_continues_and_says_what_it_cannot(tab: Tab) -> None:
    tab.ask("A dog", "en-captions", max_new_tokens="8")
    assert tab.page.inner_text("#text-label") == "Prompt" and tab.page.inner_text("#go") == "Continue"
    assert tab.answer()
    assert "goes on with its prompt" in tab.page.inner_text("#no-attention")
    assert tab.page.locator(".heat").count() == 0
    assert tab.page.locator("#source-language").is_hidden()


def test_cancel_frees_the_slot_and_says_so(tab: Tab, server: Any) -> None:
    tab.ask("a dog", "alpha", max_new_tokens="900")
    tab.page.wait_for_function("() => document.querySelector('p.writing')?.textContent.length > 5")
    tab.page.click("#cancel")
    tab.page.wait_for_function("() => document.querySelector('#status').textContent.startsWith('Cancelled')")
    assert tab.page.locator("#cancel").is_hidden()
    assert server.wait_for("call", method="POST /v1/generate:stream", code="CANCELLED")["code"] == "CANCELLED"


def test_leaving_cancels(browser: Any, server: Any) -> None:
    opened = Tab(browser, server.http_address)
    opened.ask("a dog", "alpha", max_new_tokens="900")
    opened.page.wait_for_function("() => document.querySelector('p.writing')?.textContent.length > 5")
    opened.close()
    assert server.wait_for("call", method="POST /v1/generate:stream", code="CANCELLED")["code"] == "CANCELLED"


def test_the_copied_calls_give_the_answer_on_the_page(browser: Any, server: Any) -> None:
    """Quotes of every kind are in the text; curl and Python are run as they stand, what grpcurl would send is sent."""
    text = 'A man\'s "red" $HOME `car` \\n on a bench.'
    with on(browser, server.http_address, permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab.ask(text, search="beams", num_beams="2", num_answers="2", length_penalty="0.8", max_new_tokens="30")
        shown = tab.answer()
        copied = {}
        for name in ("curl", "gRPC", "Python"):
            tab.page.locator(f'[data-call="{name}"] summary').click()
            tab.page.get_by_role("button", name=f"Copy {name}").click()
            copied[name] = tab.page.evaluate("navigator.clipboard.readText()")
    streamed = subprocess.run(["bash", "-c", copied["curl"]], capture_output=True, text=True, check=True, timeout=60).stdout
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line]
    assert events[-1]["result"]["text"] == shown
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run([sys.executable, "-c", copied["Python"]], capture_output=True, text=True, timeout=60, env=environment)
    assert printed.stdout == shown, printed.stderr
    program, *words = shlex.split(copied["gRPC"])
    assert (
        program == "grpcurl"
        and words[0] == "-plaintext"
        and words[-2:] == [server.address, "dragoman.v1.Generation/GenerateStream"]
    )
    with grpc.insecure_channel(words[-2]) as channel:
        request = json_format.Parse(words[words.index("-d") + 1], GenerateRequest())
        assert [*GenerationStub(channel).GenerateStream(request)][-1].result.text == shown


# Engine and Models


def test_the_grid_shows_what_runs_and_that_it_ends(browser: Any, server: Any) -> None:
    with on(browser, server.http_address, view="engine") as watching, on(browser, server.http_address) as asking:
        panel = watching.page.get_by_role("article", name=re.compile("^alpha "))
        grid = panel.locator(".slots")
        grid.wait_for()
        slots = grid.locator("i").count()
        assert str(grid.get_attribute("aria-label")).startswith(f"0 of {slots} slots")
        asking.ask("a dog", "alpha", search="sampling", num_answers="3", max_new_tokens="900")
        watching.page.wait_for_function("() => document.querySelectorAll('.slot.used').length === 3")
        assert "3 of" in str(grid.get_attribute("aria-label")) and "by 1 request" in str(grid.get_attribute("aria-label"))
        hues = grid.locator(".used").evaluate_all("(cells) => cells.map((cell) => cell.style.getPropertyValue('--hue'))")
        assert len(set(hues)) == 1
        assert "of at most 900 written" in str(grid.locator(".used").first.get_attribute("title"))
        assert panel.locator("dd").first.inner_text() == f"3 of {slots}"
        watching.page.wait_for_function(
            "() => [...document.querySelectorAll('article')].some((one) => one.ariaLabel.startsWith('alpha') && "
            "Number(one.querySelector('.trend dd').textContent) > 0)"
        )
        asking.page.click("#cancel")
        watching.page.wait_for_function("() => document.querySelectorAll('.slot.used').length === 0")
        assert watching.page.inner_text("#engine-state") == "Ready"


def test_slots_of_several_engines_lie_one_engine_after_the_other_and_cells_are_kept(tab: Tab) -> None:
    shown = tab.page.evaluate(
        """async () => {
          const { Slots } = await import('/console/assets/slots.js');
          const slots = new Slots();
          const other = { state: 'decode', numSourceTokens: 3, numTokens: 1, maxNewTokens: 4 };
          const use = (engine, slot, request) => ({ engine, slot, request, ...other });
          const used = () => [...slots.room.children].flatMap((cell, i) => (cell.classList.contains('used') ? [i] : []));
          slots.show({ numSlots: 512, numEngines: 2, slots: [use(0, 1, 9), use(1, 0, 9), use(1, 255, 9)] });
          const [first, cells] = [used(), [...slots.room.children]];
          slots.show({ numSlots: 512, numEngines: 2, slots: [use(1, 255, 9), use(7, 3, 1)] });
          const label = slots.room.getAttribute('aria-label');
          return { first, second: used(), label, isKept: cells.every((cell, i) => cell === slots.room.children[i]) };
        }"""
    )
    assert shown["first"] == [1, 256, 511] and shown["second"] == [511] and shown["isKept"]
    assert shown["label"] == "2 of 512 slots are in use, by 2 requests"


def test_nothing_is_asked_of_the_engine_while_another_view_is_shown(tab: Tab) -> None:
    asked: list[str] = []
    tab.page.on("request", lambda request: asked.append(request.url))
    ended: list[str] = []
    tab.page.on("requestfailed", lambda request: ended.append(request.url))
    tab.page.click("#tab-models")
    tab.page.locator("#cards article").first.wait_for()
    assert not any("console/engine" in url for url in asked)
    tab.page.click("#tab-engine")
    tab.page.locator(".slots").first.wait_for()
    assert sum("console/engine" in url for url in asked) == 1
    with tab.page.expect_event("requestfailed", lambda request: "console/engine" in request.url):
        tab.page.click("#tab-try")
    assert sum("console/engine" in url for url in asked) == 1


def test_models_are_described_by_their_cards_and_reports(browser: Any, server: Any) -> None:
    with on(browser, server.http_address, view="models") as tab:
        panel = tab.page.get_by_role("article", name="en-de", exact=True)
        panel.wait_for()
        told = panel.inner_text()
        assert "fp32" in told and "transformer" in told
        assert "captions of photographs" in panel.locator(".card").inner_text()
        panel.locator("summary", has_text="Parity").click()
        assert re.search(
            r"\d", panel.locator("details", has=tab.page.locator("summary", has_text="Parity")).locator(".told").first.inner_text()
        )
        assert "does not change models over HTTP" in tab.page.inner_text("#lifecycle-note")
        assert panel.get_by_role("button").count() == 0


def test_an_operator_changes_models_and_is_told_what_became_of_it(
    browser: Any, serve: Callable[..., Any], models: ModelFolder, tmp_path: Path
) -> None:
    operators = tmp_path / "operators"
    operators.write_text("anna:an-operators-long-token\n")
    models.put("alpha", "1", "one")
    flags = ("--admin-tokens-file", str(operators), "--http-admin", "true", "--models-poll-seconds", "3600")
    with serve(models.path, *flags) as server, on(browser, server.http_address, view="models", is_refused=True) as tab:
        page = tab.page
        panel = page.get_by_role("article", name="alpha", exact=True)
        panel.wait_for()
        assert "operator's token" in page.inner_text("#lifecycle-note") and panel.get_by_role("button").count() == 0
        for token in ("wrong", "an-operators-long-token"):
            page.get_by_role("button", name="Give one").click()
            page.fill("#token-text", token)
            page.keyboard.press("Enter")
        panel.get_by_role("button", name="Reload alpha").wait_for()
        assert "serving" in panel.get_by_role("table").inner_text()
        models.put("alpha", "2", "two")
        panel.get_by_role("button", name="Reload alpha").click()
        page.locator("#lifecycle-note", has_text="alpha: reload was done.").wait_for()
        panel.get_by_role("row", name=re.compile("^2 (trial|serving)")).wait_for()
        panel.get_by_role("button", name="Unload alpha").click()  # asks whether that is meant
        assert "sure" in panel.inner_text()
        panel.get_by_role("button", name="Unload alpha").click()
        page.locator("#lifecycle-note", has_text="alpha: unload was done.").wait_for()
        panel.get_by_role("button", name="Load alpha").click()
        page.locator("#lifecycle-note", has_text="alpha: load was done.").wait_for()
        panel.locator(".badge", has_text="ready").wait_for()


# What goes wrong


def test_a_token_is_asked_for_kept_in_the_session_and_never_copied(
    browser: Any, serve: Callable[..., Any], shipped_bundle: Callable[..., Path], tmp_path: Path
) -> None:
    """Then the server goes away, which is said, and what was there stays."""
    tokens = tmp_path / "tokens"
    tokens.write_text("web:a-long-and-random-token\n")
    flags = ("--auth-tokens-file", str(tokens))
    with (
        serve(shipped_bundle("en-de"), *flags) as server,
        on(browser, server.http_address, is_refused=True) as tab,
    ):
        page = tab.page
        page.locator("#token").wait_for()
        page.fill("#token-text", "wrong")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelector('#token-text').value === '' && !document.querySelector('#token').hidden"
        )
        page.fill("#token-text", "a-long-and-random-token")
        page.keyboard.press("Enter")
        tab.ask("A dog runs through the snow.")
        assert tab.answer().startswith("Ein Hund")
        assert page.locator("#token").is_hidden()
        assert page.evaluate("Object.values(localStorage).join() + document.cookie + location.href").count("random") == 0
        assert page.evaluate("Object.values(sessionStorage)") == ["a-long-and-random-token"]
        calls = " ".join(page.locator(".call code").all_text_contents())
        assert "random" not in calls and calls.count("DRAGOMAN_TOKEN") == 3
        page.reload()
        tab.ask("A dog runs through the snow.")
        assert tab.answer().startswith("Ein Hund")
        server.process.kill()
        server.wait()
        page.click("#go")
        page.locator("#try-problem", has_text="The server cannot be reached.").wait_for()
        assert page.get_by_role("button", name="Try again").is_visible()
        page.click("#tab-models")
        page.locator("#models-state", has_text="The server cannot be reached.").wait_for()
        page.click("#tab-engine")
        page.locator("#engine-state", has_text="The server cannot be reached.").wait_for()


def test_a_refusal_is_said_in_the_servers_words(tab: Tab) -> None:
    tab.is_refused = True
    tab.ask(" ")
    tab.page.locator("#try-problem").wait_for()
    assert "text" in tab.page.inner_text("#try-problem")
    tab.ask("A dog runs through the snow.")
    assert tab.answer() and tab.page.locator("#try-problem").is_hidden()


HOSTILE = (
    "<script>window.hit = 1</script> a dog",
    "<img src=x onerror='window.hit = 1'> \" ' & </textarea>",
    "\u202eكلب يركض في الثلج \u2066 שלום",
    "a 🐕‍🦺 👩🏽‍🚀 runs \ud7ff 🇩🇪 \u0000 \u0007",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_text(tab: Tab, text: str) -> None:
    tab.ask(text.replace("\0", ""), max_new_tokens="20")
    tab.answer()
    tab.page.locator(".heat").wait_for()
    assert tab.page.inner_text(".source").split() == text.replace("\0", "").split()
    assert tab.page.evaluate("window.hit") is None
    assert tab.page.locator("#try script, #try img").count() == 0


def test_ten_thousand_characters_are_refused_or_cut_and_the_page_stands(tab: Tab) -> None:
    tab.is_refused = True
    text = "a dog runs " * 909 + "x"
    tab.ask(text)
    tab.page.locator("#try-problem").wait_for()
    assert "512" in tab.page.inner_text("#try-problem")
    tab.page.locator(".options").evaluate("(options) => { options.open = true; }")
    tab.page.check("#truncate")
    tab.ask(text, max_new_tokens="40")
    tab.page.locator("#status", has_text="the text was cut").wait_for()
    tab.page.locator("#looks-into > *").first.wait_for()
    assert tab.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("view", ["constructor", "<img>", "%", ""])
def test_an_address_that_names_no_view_shows_the_first(browser: Any, server: Any, view: str) -> None:
    with on(browser, server.http_address, view=view) as tab:
        tab.page.locator('#model option[value="en-de"]').wait_for(state="attached")
        assert tab.page.locator("#try").is_visible()


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


def test_a_hostile_card_is_text(tab: Tab) -> None:
    show = "async (card) => document.body.append((await import('/console/assets/markdown.js')).markdown(card))"
    tab.page.evaluate(show, CARD)
    card = tab.page.locator(".card")
    assert card.locator("h3").inner_text() == "<b>Title</b> code"
    assert card.locator("a").evaluate_all("(links) => links.map((link) => link.href)") == ["https://example.org/"]
    assert card.locator("li").all_inner_texts() == ["one <img src=x onerror=window.hit=1> goes on", "two"]
    assert card.locator("td").all_inner_texts() == ["1", "<i>2</i>"]
    assert card.locator("script, img, b, i").count() == 0 and "license" not in card.inner_text()
    assert tab.page.evaluate("window.hit") is None


def test_pieces_that_end_inside_characters_are_joined(tab: Tab) -> None:
    joined = tab.page.evaluate(
        """async () => {
          const { join, words, wordOf } = await import('/console/assets/words.js');
          const pieces = [[0xf0, 0x9f], [0x90, 0x95, 0x20], [0xc3], [0xbc, 0x62], [0x65, 0x72], []];
          const found = join(pieces.map((piece) => btoa(String.fromCharCode(...piece))));
          return { ...found, words: wordOf(found.spans, found.text, words(found.text)) };
        }"""
    )
    assert joined["text"] == "🐕 über"
    assert joined["words"] == [-1, 0, -1, 1, 1, -1]


# Keyboard, phone, rules


def test_everything_can_be_done_by_keyboard(tab: Tab) -> None:
    page, keys = tab.page, tab.page.keyboard
    page.locator('#model option[value="en-de"]').wait_for(state="attached")
    page.select_option("#model", "en-de")
    page.focus("#tab-try")
    focused = "document.activeElement.id"
    for _ in range(20):
        if page.evaluate(focused) == "text":
            break
        keys.press("Tab")
    keys.type("A dog runs through the snow.")
    keys.press("Control+Enter")
    before = tab.answer()
    page.locator(".heat").wait_for()
    for _ in range(20):
        if page.evaluate("document.activeElement.classList.contains('word')"):
            break
        keys.press("Tab")
    keys.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == "Hund"
    keys.press("Enter")
    page.get_by_role("menuitem").first.wait_for()
    keys.press("Escape")
    assert page.get_by_role("menu").count() == 0 and page.evaluate("document.activeElement.textContent") == "Hund"
    keys.press("Enter")
    page.get_by_role("menuitem").first.wait_for()
    keys.press("ArrowDown")
    chosen = page.evaluate("document.activeElement.querySelector('.offer').textContent")
    keys.press("Enter")
    page.locator(".word.kept").first.wait_for()
    after = tab.answer()
    assert after != before and after.split()[1].startswith(chosen)
    assert page.evaluate("document.activeElement.textContent") == chosen
    page.focus("#tab-try")
    keys.press("ArrowRight")
    assert page.evaluate(focused) == "tab-engine" and page.locator("#engine").is_visible()
    keys.press("End")
    assert page.evaluate(focused) == "tab-models" and page.locator("#models").is_visible()


def test_a_phone_needs_no_scrolling_sideways(browser: Any, server: Any) -> None:
    with on(browser, server.http_address) as tab:
        tab.page.set_viewport_size({"width": 360, "height": 740})
        tab.ask(TEXT, search="beams")
        tab.answer()
        tab.page.locator(".word").last.click()
        tab.page.get_by_role("menuitem").first.wait_for()
        tab.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for view in VIEWS:
            if view != "try":
                tab.page.click(f"#tab-{view}")
                tab.page.locator(f"#{view} article").first.wait_for()
            tab.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert tab.page.evaluate("document.documentElement.scrollWidth") == 360, view


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(browser: Any, server: Any, scheme: str) -> None:
    with on(browser, server.http_address, color_scheme=scheme, reduced_motion="reduce", is_refused=True) as tab:
        assert rules(tab.page) == []  # empty
        tab.ask(TEXT, search="beams")
        tab.answer()
        tab.page.locator(".heat").wait_for()
        tab.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        tab.page.locator(".word").nth(2).hover()
        assert rules(tab.page) == []
        tab.page.locator(".word").nth(2).click()
        tab.page.get_by_role("menuitem").first.wait_for()
        assert rules(tab.page) == []
        tab.page.keyboard.press("Escape")
        tab.ask(" ")
        tab.page.locator("#try-problem").wait_for()
        tab.page.evaluate("document.querySelector('#token').hidden = false")
        assert rules(tab.page) == []
        for view in ("engine", "models"):
            tab.page.click(f"#tab-{view}")
            tab.page.locator(f"#{view} article").first.wait_for()
            tab.page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            assert rules(tab.page) == [], view


def test_the_theme_is_switched_and_kept(browser: Any, server: Any) -> None:
    with on(browser, server.http_address, color_scheme="light") as tab:
        ground = "getComputedStyle(document.documentElement).backgroundColor"
        light = tab.page.evaluate(ground)
        button = tab.page.get_by_role("button", name="Theme")
        assert button.inner_text() == "Theme: auto"
        button.click()
        assert button.inner_text() == "Theme: light" and tab.page.evaluate(ground) == light
        button.click()
        assert button.inner_text() == "Theme: dark" and tab.page.evaluate(ground) != light
        tab.page.reload()
        assert button.inner_text() == "Theme: dark" and tab.page.evaluate(ground) != light
