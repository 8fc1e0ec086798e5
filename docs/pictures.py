"""Pictures of docs/images: attention of shipped checkpoints, and the console of a real server under load.

python docs/pictures.py attention [NAME ...]
python docs/pictures.py console      # after `make export`; Chromium (Debian: apt-get install chromium)
"""

import argparse
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dragoman.attention.maps import PICTURE_ROOM, Kind  # noqa: E402
from dragoman.attention.of_checkpoint import look_into  # noqa: E402
from dragoman.attention.picture import draw  # noqa: E402
from dragoman.client.sync import Client  # noqa: E402
from tests.system.harness.server import serving  # noqa: E402

WIDTH, HEIGHT, MAX_NEW_TOKENS, NUM_CALLERS = 1180, 900, 24, 14
DOG = "A brown dog runs through the snow with a red ball in its mouth."
CROWD = "A group of people in red and white jackets is standing in front of an old building near the water, "
# Name of the picture: checkpoint, source, kind of attention, layer (None for all).
ATTENTION: dict[str, tuple[str, str, Kind, int | None]] = {
    "attention-encoder": ("en-de", DOG, Kind.ENCODER, 1),
    "attention-encoder-deep": ("en-de", DOG, Kind.ENCODER, 5),
    "attention-decoder": ("en-de", DOG, Kind.DECODER, 0),
    "attention-cross": ("en-de", DOG, Kind.CROSS, 2),
    "attention-cross-layers": ("en-de", "Two men play soccer on a field.", Kind.CROSS, None),
    "attention-cross-french": ("en-fr", "A little girl in a pink dress is climbing up some wooden stairs.", Kind.CROSS, 2),
    "attention-rnn": ("en-de-rnn", DOG, Kind.CROSS, None),
    "attention-language-model": ("en-captions", "A brown dog runs", Kind.DECODER, 0),
}
IS_DRAWN = "() => (document.querySelector('.trend polyline').getAttribute('points') ?? '').split(' ').length > 60"


def console(models: Path, output: Path) -> None:
    """Draw the three views of the console."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with serving(models, "--num-threads=1") as server, sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium).new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(server.http_address)
        page.locator("#model option").first.wait_for(state="attached")
        page.fill("#text", "Two young girls are playing with a red ball in front of an old house.")
        page.locator(".options").evaluate("(options) => { options.open = true; }")
        page.select_option("#search", "beams")
        page.click("#go")
        page.locator(".heat").wait_for()
        page.locator(".word", has_text="Mädchen").click()
        page.get_by_role("menuitem").first.wait_for()
        keep(page, output / "console-try.png")
        page.click("#tab-engine")
        with load(server.address):
            page.wait_for_function(IS_DRAWN)
            page.wait_for_function("() => document.querySelectorAll('.slot.used').length > 30", polling="raf")
            keep(page, output / "console-engine.png", page.locator("#engines article").first.bounding_box())
        page.click("#tab-models")
        page.locator("#cards article").first.wait_for()
        keep(page, output / "console-models.png", page.locator("#cards article").first.bounding_box())


def keep(page: Page, path: Path, box: object = None) -> None:
    """Write a screenshot, down to the end of a box if there is one."""
    bottom = min(HEIGHT * 2.0, box["y"] + box["height"] + 24) if isinstance(box, dict) else HEIGHT
    page.screenshot(path=path, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": bottom})


@contextmanager
def load(address: str) -> Iterator[None]:
    """Keep a server busy."""
    is_over = threading.Event()

    def call(client: Client, number: int) -> None:
        while not is_over.is_set():
            text = " ".join([CROWD] * (1 + number % 3))
            client.generate(text, model="en-de", num_beams=4, max_new_tokens=30 + 12 * (number % 4), min_new_tokens=20)

    with Client(address) as client, ThreadPoolExecutor(NUM_CALLERS) as pool:
        for number in range(NUM_CALLERS):
            pool.submit(call, client, number)
        yield
        is_over.set()


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", choices=("attention", "console"))
    parser.add_argument("--models", type=Path, default=ROOT / "bundles", help="Folder of bundles, with en-de.")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images")
    arguments = parser.parse_args()
    if arguments.pictures == "console":
        console(arguments.models, arguments.output)
        return
    for name, (checkpoint, source, kind, layer) in ATTENTION.items():
        path = ROOT / "model/pretrained" / checkpoint
        look = look_into(path, source, None, PICTURE_ROOM, kinds=[kind], layer=layer, max_new_tokens=MAX_NEW_TOKENS)
        draw(arguments.output / f"{name}.png", look)


if __name__ == "__main__":
    main()
