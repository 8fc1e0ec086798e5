"""Generate the blocking client from the asyncio one, and the keywords of calls from `Search`; `make client` runs it.

`dragoman/client/aio.py` marks the lines that differ: one with a comment `asyncio only` is left out, and a comment
`blocking: CODE` becomes the code. The rest is renamed by unasync, and the documentation by the table below.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from unasync import Rule, unasync_files

CLIENT = Path(__file__).parents[1] / "dragoman" / "client"
SOURCE, SEARCH = CLIENT / "aio.py", CLIENT / "search.py"
NAMES = {
    "AsyncClient": "Client",
    "AsyncStream": "Stream",
    "AsyncCalls": "Calls",
    "AsyncBatchRun": "BatchRun",
    "aio": "grpc",
    "aio_calls": "calls",
    "aio_batch_stream": "batch_stream",
    "sleep": "wait",
}
# Text before and after; each occurs.
TEXTS = {
    """A connection to a server, for the tasks of one event loop; made inside a coroutine.

    Leaving an `async with` block or `close` cancels what still runs, and so does cancelling the task that waits.
""": """A connection to a server, for any number of threads; leaving a `with` block or `close` cancels what still runs.
""",
    "sleep: Waits so many seconds between attempts; tests put their own in.": (
        "wait: Waits between attempts for a cancellation, at most so many seconds; tests put their own in."
    ),
    """        async with AsyncClient("localhost") as client:
            result = await client.generate("A dog runs through the snow.", model="en-de", num_beams=4)
            print(result.text)
            async for piece in client.stream("A cat sits on a wall.", model="en-de"):
                print(piece.text, end="")
""": """        with Client("localhost") as client:
            print(client.generate("A dog runs through the snow.", model="en-de", num_beams=4).text)
            for result in client.generate_many(["A dog runs.", "A cat sits on a wall."], model="en-de"):
                print(result.text, result.usage.generated_tokens)
""",
    "closing the generator cancels": "dropping the generator cancels",
    "Closing the generator cancels": "Dropping the generator cancels",
    "one that raises ends the batch after what came before it.\n": (
        "one that raises ends the batch after what came before it. While\n"
        "                it is waited for, no outcome is yielded.\n"
    ),
    "            timeout_seconds: Time for this call; None for the client's.\n": (
        "            timeout_seconds: Time for this call; None for the client's.\n"
        "            scope: Cancels this call when it ends.\n"
    ),
    "            timeout_seconds: Of each.\n": (
        "            timeout_seconds: Of each.\n            scope: Cancels what runs when it ends.\n"
    ),
    "            timeout_seconds: Time for all of it; None for as long as it takes.\n": (
        "            timeout_seconds: Time for all of it; None for as long as it takes.\n"
        "            scope: Cancels the batch when it ends.\n"
    ),
    " | AsyncIterable[str]": "",
    " | AsyncIterable[Request]": "",
    "AsyncGenerator[Result, None]": "AsyncGenerator[Result, None, None]",
    "AsyncGenerator[Outcome, None]": "AsyncGenerator[Outcome, None, None]",
    " AsyncIterable, Awaitable,": "",
}


def blocking_client() -> str:
    """Return the source of the blocking client."""
    text = SOURCE.read_text(encoding="utf-8")
    for before, after in TEXTS.items():
        if before not in text:
            raise SystemExit(f"{SOURCE}: {before!r} is not there; change deploy/blocking_client.py with it")
        text = text.replace(before, after)
    about = '"""The blocking client, generated from `aio.py` by `make client`."""'
    text = about + re.sub(r'^""".*?"""', "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"^.*  # asyncio only.*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"# blocking: ", "", text)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "asyncio" / "client.py", Path(folder) / "blocking" / "client.py"
        source.parent.mkdir()
        source.write_text(text, encoding="utf-8")
        unasync_files([str(source)], [Rule("/asyncio/", "/blocking/", additional_replacements=NAMES)])
        return formatted(target.read_text(encoding="utf-8"))


def search_keywords() -> str:
    """Return the source of `search.py`, in which `SearchOptions` has the fields of `Search`."""
    text = SEARCH.read_text(encoding="utf-8")
    own = text[text.index("class Search:") : text.index("class SearchOptions")]
    fields = re.findall(r"^    (\w+: .+?) = .+\n", own, flags=re.MULTILINE)
    keywords = "".join(f"    {field}\n" for field in fields)
    return re.sub(r'(class SearchOptions.*\n    """.+"""\n\n)(?:    \w+: .+\n)+', lambda found: found[1] + keywords, text)


def formatted(text: str) -> str:
    """Return a source as ruff sorts and formats it."""
    for command in (["check", "--fix", "--quiet", "--select", "I"], ["format", "--quiet"]):
        words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(CLIENT / "sync.py"), "-"]
        text = subprocess.run(words, input=text, text=True, capture_output=True, check=True).stdout
    return text


def main(arguments: list[str]) -> int:
    """Write both files, or with `--check` return 1 if one is out of date."""
    wanted = {CLIENT / "sync.py": blocking_client(), SEARCH: search_keywords()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if "--check" in arguments:
            print(f"{path.name} is out of date: run `make client`", file=sys.stderr)
        else:
            path.write_text(wanted[path], encoding="utf-8")
    return int(bool(stale) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
