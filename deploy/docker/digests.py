"""Update the digests of the images in `images.txt`, and the same images in the Dockerfiles and the compose file.

Run `python deploy/docker/digests.py`; it asks the images' registries what their tags stand for now, and needs nothing but Python.
With `--check` nobody is asked, and it only tells which file names an image otherwise than `images.txt` does.
"""

import hashlib
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LIST = FOLDER / "images.txt"
USERS = ("cpu.Dockerfile", "cuda.Dockerfile", "compose.yaml")
IMAGE = re.compile(r"(?P<host>[\w.-]+(?::\d+)?)/(?P<name>[\w./-]+):(?P<tag>[\w.-]+)(?:@(?P<digest>sha256:[0-9a-f]{64}))?")
# Media types of a list of images for several platforms and of a single image, of OCI and of Docker.
TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ANSWER_SECONDS = 30.0


class RegistryError(Exception):
    """A registry did not answer with a digest."""


def current_digest(host: str, name: str, tag: str) -> str:
    """Return the current digest of a tag, computed from the registry's bytes.

    Raises:
        RegistryError: If it gives none, or calls them otherwise.
    """
    registry = "registry-1.docker.io" if host == "docker.io" else host
    scheme = "http" if registry.partition(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{registry}/v2/{name}/manifests/{tag}"
    headers = {"Accept": ", ".join(TYPES)}
    try:
        try:
            content, said = _get(url, headers)
        except urllib.error.HTTPError as error:
            if error.code != 401:
                raise
            content, said = _get(url, headers | {"Authorization": f"Bearer {_token(error.headers.get('WWW-Authenticate', ''))}"})
    except (OSError, ValueError, KeyError) as error:
        raise RegistryError(f"{host}/{name}:{tag}: {error}") from error
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    if said not in ("", digest):
        raise RegistryError(f"{host}/{name}:{tag}: the registry calls it {said}, and it is {digest}")
    return digest


def _get(url: str, headers: dict[str, str]) -> tuple[bytes, str]:
    """Return the content of an address and the digest in the registry's header."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=ANSWER_SECONDS) as answer:
        return answer.read(), answer.headers.get("Docker-Content-Digest", "")


def _token(challenge: str) -> str:
    """Return an anonymous token for reading, from the address that the registry names."""
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({name: asked[name] for name in ("service", "scope") if name in asked})
    content, _ = _get(f"{asked['realm']}?{query}", {})
    answer = json.loads(content)
    return str(answer.get("token") or answer["access_token"])


def renewed(text: str) -> str:
    """Return the list with current digests."""

    def renew(found: re.Match[str]) -> str:
        digest = current_digest(found["host"], found["name"], found["tag"])
        if found["digest"] != digest:
            print(f"{found['host']}/{found['name']}:{found['tag']} is now {digest}")
        return f"{found['host']}/{found['name']}:{found['tag']}@{digest}"

    lines = text.splitlines(keepends=True)
    return "".join(line if line.startswith("#") else IMAGE.sub(renew, line) for line in lines)


def with_digests(text: str, images: str) -> str:
    """Return a file's text with each listed image, of any tag, replaced by the list's reference."""
    for found in IMAGE.finditer("".join(line for line in images.splitlines(keepends=True) if not line.startswith("#"))):
        name = re.escape(f"{found['host']}/{found['name']}")
        text = re.sub(rf"{name}:[\w.-]+(?:@sha256:[0-9a-f]{{64}})?", found[0], text)
    return text


def main(arguments: list[str]) -> int:
    """Update the files, or with `--check` report stale ones; return the exit code."""
    images = LIST.read_text(encoding="utf-8")
    if "--check" not in arguments:
        try:
            images = renewed(images)
        except RegistryError as error:
            print(f"digests: {error}", file=sys.stderr)
            return 1
        LIST.write_text(images, encoding="utf-8")
    stale = False
    for path in (FOLDER / name for name in USERS):
        text = path.read_text(encoding="utf-8")
        if (wanted := with_digests(text, images)) == text:
            continue
        if "--check" in arguments:
            print(f"{path.name} names an image otherwise than {LIST.name}", file=sys.stderr)
            stale = True
        else:
            path.write_text(wanted, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
