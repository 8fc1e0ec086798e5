"""Fill a folder with models from archives, each checked against its SHA-256 before it is opened.

Run by the init container of the chart, and needs nothing but Python: `fetch.py archives.json FOLDER`. The file says
`{"archives": [{"url": ..., "sha256": ...}], "timeout_seconds": ...}`; an archive is a tar, compressed or not, of bundle folders.
FETCH_TOKEN, if set, is sent as a bearer token. If anything is not as it should be, the exit code is 1 and standard error says what.
"""

import hashlib
import http.client
import json
import os
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

CHUNK_BYTES = 1 << 20
QUIET_SECONDS = 30.0


class FetchError(Exception):
    """An archive that cannot be had or is not what it should be."""


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows redirections, and shows the token to the host it is for only."""

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        """Return the next request, without the token if it goes elsewhere."""
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following is not None and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(req.full_url)[:2]:
            following.remove_header("Authorization")
        return following


def main(arguments: list[str]) -> int:
    """Fetch what the file says into the folder; return the exit code."""
    wanted, folder = json.loads(Path(arguments[0]).read_text(encoding="utf-8")), Path(arguments[1])
    deadline = time.monotonic() + wanted["timeout_seconds"]
    try:
        clear(folder)
        for archive in wanted["archives"]:
            fetch(archive["url"], archive["sha256"], folder, deadline)
            print(f"fetched {shown(archive['url'])}", file=sys.stderr, flush=True)
    except (FetchError, OSError) as error:
        print(f"fetch: {error}", file=sys.stderr)
        return 1
    return 0


def clear(folder: Path) -> None:
    """Remove what an earlier, interrupted attempt left."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def fetch(url: str, sha256: str, folder: Path, deadline: float) -> None:
    """Download an archive, check it, unpack it.

    Raises:
        FetchError: If it cannot be had in time, has another checksum, is no tar, or would write outside of the folder.
    """
    incoming = folder / ".incoming"
    digest = download(url, incoming, deadline)
    if digest != sha256.lower():
        incoming.unlink()
        raise FetchError(f"{shown(url)}: its SHA-256 is {digest}, not {sha256}")
    try:
        with tarfile.open(incoming) as archive:
            archive.extractall(folder, filter="data")
    except tarfile.TarError as error:
        raise FetchError(f"{shown(url)}: cannot be unpacked: {error}") from error
    finally:
        incoming.unlink()


def download(url: str, path: Path, deadline: float) -> str:
    """Write what the address gives to a file and return its SHA-256.

    Raises:
        FetchError: If it cannot be had before the deadline.
    """
    digest, size = hashlib.sha256(), 0
    try:
        request = urllib.request.Request(url)
        if token := os.environ.get("FETCH_TOKEN"):
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.build_opener(_SameHost).open(request, timeout=QUIET_SECONDS) as answer, path.open("wb") as file:
            promised = getattr(answer, "length", None)
            # What there is, rather than so much: whoever sends a byte now and then would not let us look at the time.
            while (promised is None or size < promised) and (chunk := answer.read1(CHUNK_BYTES)):
                if time.monotonic() > deadline:
                    raise FetchError(f"{shown(url)}: took too long")
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
            if promised is not None and size < promised:
                raise FetchError(f"{shown(url)}: the connection ended early")
    except urllib.error.URLError as error:
        raise FetchError(f"{shown(url)}: {error.reason}") from error
    except (http.client.HTTPException, ValueError) as error:
        raise FetchError(f"{shown(url)}: {error!r}") from error
    return digest.hexdigest()


def shown(url: str) -> str:
    """Return what messages may say of an address: its query may be a signature that opens it to anybody."""
    return url.partition("?")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
