"""Pictures of the console for the documents: a real server under load, its page in a real Chromium.

    python -m benchmarks.console --bundle BUNDLE [--output docs/images]

A bundle of the shipped model `en-de` is meant. Chromium is the system's; fonts are those that it finds.
"""

import argparse
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from playwright.sync_api import Page, sync_playwright

from benchmarks.harness.served import ROOT, ServedModel
from dragoman.client.sync import Client

MAX_BYTES: Final = 300_000
WIDTH, HEIGHT = 1180, 900
TEXT: Final = "Two young girls are playing with a red ball in front of an old house."
WORD: Final = "Mädchen"
# Each of them asks for one answer after the other, of so many beams.
NUM_CALLERS, NUM_BEAMS = 14, 4
CROWD: Final = "A group of people in red and white jackets is standing in front of an old building near the water, "
# Until the lines of the Engine view have something to show.
NUM_VIEWS: Final = 60
IS_DRAWN: Final = f"() => (document.querySelector('.trend polyline').getAttribute('points') ?? '').split(' ').length > {NUM_VIEWS}"
IS_BUSY: Final = "() => document.querySelectorAll('.slot.used').length > 30"
OPEN_ALL: Final = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        parser.error("Chromium is not installed (Debian: apt-get install chromium)")
    with (
        ServedModel(arguments.bundle, "--max-slots", "64", "--num-threads", "1", has_http=True) as served,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium) as browser,
    ):
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"http://{served.http_address}/")
        _try(page)
        _keep(page, arguments.output / "console-try.png")
        page.click("#tab-engine")
        with load(served.address):
            page.wait_for_function(IS_DRAWN)
            page.wait_for_function(IS_BUSY, polling="raf")
            _keep(page, arguments.output / "console-engine.png", page.locator("#engines article").first.bounding_box())
        page.click("#tab-models")
        page.locator("#cards article").first.wait_for()
        page.evaluate(OPEN_ALL)
        _keep(page, arguments.output / "console-models.png", page.locator("#cards article").first.bounding_box())


def _try(page: Page) -> None:
    """Have a text translated, and ask for another word."""
    page.locator("#model option").first.wait_for(state="attached")
    page.fill("#text", TEXT)
    page.locator(".options").evaluate("(options) => { options.open = true; }")
    page.select_option("#search", "beams")
    page.click("#go")
    page.locator(".heat").wait_for()
    page.locator(".word", has_text=WORD).click()
    page.get_by_role("menuitem").first.wait_for()


def _keep(page: Page, path: Path, box: object = None) -> None:
    """Write what is shown, down to the end of a box where there is one."""
    bottom = min(HEIGHT * 2.0, box["y"] + box["height"] + 24) if isinstance(box, dict) else float(HEIGHT)
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": bottom})
    size = path.stat().st_size
    assert size <= MAX_BYTES, f"{path}: {size} bytes; a picture of the documents takes {MAX_BYTES} at most"
    print(f"{path}: {size:,} bytes")


@contextmanager
def load(address: str) -> Iterator[None]:
    """Keep a server busy."""
    is_over = threading.Event()

    def call(client: Client, number: int) -> None:
        while not is_over.is_set():
            text = " ".join([CROWD] * (1 + number % 3))
            client.generate(text, num_beams=NUM_BEAMS, max_new_tokens=30 + 12 * (number % 4), min_new_tokens=20)

    with ExitStack() as stack:
        client = stack.enter_context(Client(address))
        threads = [threading.Thread(target=call, args=(client, number)) for number in range(NUM_CALLERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()


if __name__ == "__main__":
    main()
