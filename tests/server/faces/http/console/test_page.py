"""The console's page as HTTP has it: what is sent, with which headers, and that nothing else can be had by its paths."""

import asyncio
import re
from pathlib import Path

import pytest

from dragoman.server.faces.http.console.page import POLICY
from tests.server.faces.http.conftest import ServeHttp

ASSETS = Path(__file__).resolve().parents[5] / "server/faces/http/console/assets"
NAMES = sorted(path.name for path in ASSETS.iterdir() if path.name != "index.html")


def test_the_page_and_all_it_names_are_sent_with_their_kinds(serve_http: ServeHttp) -> None:
    async def run() -> None:
        async with serve_http() as world:
            async with world.session.get(world.url("/")) as response:
                page = await response.text()
                assert response.status == 200 and response.content_type == "text/html"
                assert response.headers["Content-Security-Policy"] == POLICY
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers["Referrer-Policy"] == "no-referrer"
            assert f'name="grpc-port" content="{world.server.port}"' in page
            named = re.findall(r'(?:src|href)="/console/assets/([^"]+)"', page)
            assert {"console.js", "console.css"} <= set(named)
            for name in NAMES:
                async with world.session.get(world.url(f"/console/assets/{name}")) as response:
                    assert response.status == 200
                    assert await response.read() == (ASSETS / name).read_bytes()
                    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
                    assert response.content_type == kinds[name.rpartition(".")[2]]

    asyncio.run(run())


def test_who_has_a_file_is_not_sent_it_again(serve_http: ServeHttp) -> None:
    async def run() -> None:
        async with serve_http() as world:
            for path in ("/", "/console/assets/console.js"):
                async with world.session.get(world.url(path)) as response:
                    tag = response.headers["ETag"]
                    assert response.headers["Cache-Control"] == "no-cache"
                async with world.session.get(world.url(path), headers={"If-None-Match": f'"other", {tag}'}) as response:
                    assert response.status == 304 and not await response.read()
                    assert response.headers["ETag"] == tag
                async with world.session.get(world.url(path), headers={"If-None-Match": '"other"'}) as response:
                    assert response.status == 200
                async with world.session.head(world.url(path)) as response:
                    assert response.status == 200 and not await response.read()

    asyncio.run(run())


def test_a_file_is_compressed_for_whoever_takes_it_so(serve_http: ServeHttp) -> None:
    async def run() -> None:
        async with serve_http() as world:
            sizes, tags = [], []
            for taken in ("gzip, br", "identity", "br, gzip;q=1.0", "gzip;q=0, identity"):
                async with world.session.get(
                    world.url("/console/assets/console.css"), headers={"Accept-Encoding": taken}
                ) as response:
                    assert await response.read() == (ASSETS / "console.css").read_bytes()
                    assert response.headers["Vary"] == "Accept-Encoding"
                    sizes.append(int(response.headers["Content-Length"]))
                    tags.append(response.headers["ETag"])
            assert sizes[0] < sizes[1] / 2 and tags[0] != tags[1]
            assert (sizes[2:], tags[2:]) == (sizes[:2], tags[:2]), "a weight of 0 says that it is not taken"

    asyncio.run(run())


def test_the_page_can_be_turned_off(serve_http: ServeHttp) -> None:
    async def run() -> None:
        async with serve_http(console=False) as world:
            for path in ("/", "/console/assets/console.js"):
                async with world.session.get(world.url(path)) as response:
                    assert response.status == 404

    asyncio.run(run())


@pytest.mark.parametrize(
    "name", ["index.html", "page.py", "..%2Fpage.py", "%2e%2e%2f%2e%2e%2fserver.py", "%2Fetc%2Fpasswd", "console.js%00", "x" * 4000]
)
def test_no_other_file_can_be_had(serve_http: ServeHttp, name: str) -> None:
    async def run() -> None:
        async with serve_http() as world, world.session.get(f"{world.url('/console/assets/')}{name}") as response:
            assert response.status == 404
            assert (await response.json())["code"] == 5

    asyncio.run(run())


def test_the_files_hold_no_address_of_another_host_and_no_markup_from_data() -> None:
    for path in ASSETS.iterdir():
        text = path.read_text()
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)\w", text), path.name
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), path.name
    page = (ASSETS / "index.html").read_text()
    assert not re.findall(r"<style|\sstyle=|\son\w+=", page)
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.DOTALL) == [""]
