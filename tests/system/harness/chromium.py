"""A real Chromium, the one that the system has, and a page in it that takes note of all that a page should not do."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# Answer by the browser, not by the page: an answer of the server that is an error, which tests of errors want.
REFUSED = "Failed to load resource"
NOTE_VIOLATIONS = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(event.violatedDirective + " " + event.blockedURI));
"""


def program() -> str | None:
    """Return where Chromium is; None if there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium without a window; the test is skipped where it or what drives it is not installed."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = program()
    if path is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with driver.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        try:
            yield browser
        finally:
            browser.close()


class Tab:
    """A page of the console, in a context of its own, and what it did.

    Attributes:
        page: Playwright's page.
        problems: What it said on its console, exceptions, requests to other hosts.
        is_refused: Whether the test wants the server to refuse something, which the browser tells on the console.
    """

    def __init__(self, browser: Any, address: str, *, view: str = "try", is_refused: bool = False, **options: Any) -> None:
        self.problems: list[str] = []
        self.is_refused = is_refused
        self._host = urlsplit(address).netloc
        self._context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
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

    def close(self) -> None:
        """Close it, and fail if it did what it should not."""
        violations = self.page.evaluate("window.violations")
        self._context.close()
        assert not self.problems + violations

    def ask(self, text: str, model: str = "en-de", **options: str) -> None:
        """Fill in the form, with options by the ids of their fields, and send it."""
        page = self.page
        page.locator(f'#model option[value="{model}"]').wait_for(state="attached")
        page.select_option("#model", model)
        page.fill("#text", text)
        if options:
            page.locator(".options").evaluate("(options) => { options.open = true; }")
        for name, value in options.items():
            field = page.locator(f"#{name.replace('_', '-')}")
            if name == "search":
                field.select_option(value)
            else:
                field.fill(value)
        page.click("#go")

    def answer(self) -> str:
        """Return the answer that is shown, once it is whole and looked into."""
        self.page.locator("#looks-into .tokens").wait_for()
        return str(self.page.locator("p.answer").text_content())
