"""LibreTranslate's API in front of scripted engines: what it answers, what it refuses and how, and whose requests they are."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import FormData

from dragoman.server.errors import Unavailable
from tests.server.faces.http.libre_world import TEXT, LibreWorld, languages, pair_models, serving

ASKED = {"q": "A dog.", "source": "en", "target": "de"}
CALLERS = """
[callers.some]
tokens = ["secret"]
models = ["en-de"]
max_requests = 2

[callers.slow]
tokens = ["slow"]
requests_per_second = 0.001
requests_burst = 3
"""


@pytest.fixture
def run(make_model: Callable[..., Any], tmp_path: Path, logged: Any) -> Callable[..., None]:
    """Run a test with a server."""

    def running(test: Callable[[LibreWorld], Any], *models: Any, **settings: Any) -> None:
        async def main() -> None:
            async with serving(tmp_path, *(models or pair_models(make_model)), **settings) as world:
                await test(world)

        asyncio.run(main())

    return running


def sources(model: Any) -> list[str]:
    """Return the texts that a model's engine was given."""
    return [model.tokenizers.source.decode(request.source_ids) for request in model.engine.requests]


def test_a_text_is_translated_by_the_model_for_its_languages(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        assert await world.post(json=ASKED) == (200, {"translatedText": TEXT})
        assert await world.post(json=ASKED | {"target": "fr", "format": "text", "secret": "x"}) == (200, {"translatedText": TEXT})
        assert await world.post(json=ASKED | {"source": "de", "target": "zt"}) == (200, {"translatedText": TEXT})
        assert await world.post(json=ASKED | {"source": "DE", "target": "zh-Hant"}) == (200, {"translatedText": TEXT})
        assert await world.post(json=ASKED | {"source": "de", "target": "fr", "model": "many"}) == (200, {"translatedText": TEXT})
        assert [len(model.engine.requests) for model in world.models.values()] == [0, 1, 1, 3]
        assert world.counted() == {"eos": 5}

    run(test)


def test_forms_and_queries_say_the_same_as_json(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        expected = (200, {"translatedText": TEXT})
        assert await world.post(data=ASKED) == expected
        assert await world.post(
            data=FormData({"q": "Ein Büchse\r\n"} | {k: ASKED[k] for k in ("source", "target")}, default_to_multipart=True)
        ) == (
            200,
            {"translatedText": TEXT + "\n"},
        )
        assert await world.post(params=ASKED) == expected
        assert await world.post(params={"source": "en", "target": "de"}, data={"q": "A dog."}) == expected
        assert sources(world.models["en-de"])[1] == "Ein Büchse"
        assert await world.post(params=ASKED | {"q": "50%25 & ü+%C3"}) == expected
        assert sources(world.models["en-de"])[-1] == "50%25 & ü+%C3", "what is escaped is read once"

    run(test)


def test_a_list_is_answered_in_order_and_what_is_blank_stays(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        q = ["A dog.", "", " \n", "One. Two.\n\n  Three", "😀 ..."]
        status, told = await world.post(json=ASKED | {"q": q})
        assert (status, told) == (200, {"translatedText": [TEXT, "", " \n", f"{TEXT} {TEXT}\n\n  {TEXT}", "😀 ..."]})
        assert sources(world.models["en-de"]) == ["A dog.", "One.", "Two.", "Three"]
        assert await world.post(json=ASKED | {"q": "\n"}) == (200, {"translatedText": "\n"})

    run(test)


def test_a_huge_list_joins_the_batch_a_few_at_a_time(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine = world.models["en-de"].engine
        status, told = await world.post(json=ASKED | {"q": ["A dog."] * 1024})
        assert (status, told["translatedText"]) == (200, [TEXT] * 1024)
        assert engine.max_running <= 16 and len(engine.requests) == 1024
        assert await world.refused(json=ASKED | {"q": ["A dog."] * 1025}) == (
            400,
            "q: 1025 texts; at most 1024 are translated at once",
        )
        status, message = await world.refused(json=ASKED | {"q": "Yes. " * 5000})
        assert (status, message) == (400, "q: more than 4096 sentences; send fewer at once") and len(engine.requests) == 1024

    run(test)


def test_alternatives_are_no_way_to_larger_answers_than_the_server_sends(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        asked = ASKED | {"q": "A dog." + "-\n" * 6000}
        assert (await world.post(json=asked | {"alternatives": 1}))[0] == 200
        before = len(sources(world.models["en-de"]))
        status, message = await world.refused(json=asked | {"alternatives": 7})
        assert (status, message) == (400, "q: answers have more than 65536 bytes, max_message_bytes of the server")
        assert len(sources(world.models["en-de"])) == before, "nothing is generated for it"

    run(test, max_message_bytes=65536)


def test_alternatives_are_the_next_best_answers(run: Any, make_model: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine, tokenizer = world.models["en-de"].engine, world.models["en-de"].tokenizers.target
        engine.answer = tokenizer.encode("Hunde")
        texts = [tokenizer.decode(engine.answer[: len(engine.answer) - index]) for index in range(3)]
        status, told = await world.post(json=ASKED | {"alternatives": 2})
        assert (status, told) == (200, {"translatedText": texts[0], "alternatives": texts[1:]})
        assert (engine.requests[0].search.num_beams, engine.requests[0].search.num_answers) == (3, 3)
        _, told = await world.post(data=ASKED | {"alternatives": "1", "q": "One. Two."})
        assert told == {"translatedText": f"{texts[0]} {texts[0]}", "alternatives": [f"{texts[1]} {texts[1]}"]}
        status, told = await world.post(json=ASKED | {"alternatives": 1, "q": ["One.", ""]})
        assert [len(others) for others in told["alternatives"]] == [1, 0]
        assert (await world.post(json=ASKED | {"alternatives": -1}))[1] == {"translatedText": texts[0]}
        for number in (8, 10**6, "1000000"):
            status, message = await world.refused(json=ASKED | {"alternatives": number})
            assert (status, message) == (400, f"alternatives: {number} is more than 7, which model en-de can give")
        for value in ("many", 1.5, True, [1], 10**30 * 1.0, "9" * 20):
            assert await world.refused(json=ASKED | {"alternatives": value}) == (400, "alternatives: is no whole number")

    run(test)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ""}, "q: is missing"),
        ({"q": []}, "q: is missing"),
        ({"q": None}, "q: is missing"),
        ({"q": 7}, "q: is neither a text nor a list of texts"),
        ({"q": [["A dog."]]}, "q: is neither a text nor a list of texts"),
        ({"q": ["A dog.", 7]}, "q: is neither a text nor a list of texts"),
        ({"q": {"a": "b"}}, "q: is neither a text nor a list of texts"),
        ({"source": None}, "source: is missing"),
        ({"target": ""}, "target: is missing"),
        ({"target": 7}, "target: is no text"),
        ({"target": "tlh"}, "target: 'tlh' is not supported; there: de, en, fr, zh-Hant"),
        ({"source": "x" * 10**5}, f"source: {'x' * 32!r} is not supported; there: de, en, fr, zh-Hant"),
        ({"source": "\x00\n"}, "source: '\\x00\\n' is not supported; there: de, en, fr, zh-Hant"),
        ({"format": "html"}, "format: html is not translated here, for tags could not be kept in their places; send text"),
        ({"format": "pdf"}, "format: 'pdf' is not supported"),
        ({"q": "A" * 5000}, "q: more than"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(run: Any, changes: dict[str, Any], message: str) -> None:
    async def test(world: LibreWorld) -> None:
        status, told = await world.refused(json=ASKED | changes)
        assert status == 400 and told.startswith(message)

    run(test)


def test_pairs_that_no_model_translates_are_refused_and_one_language_is_not_translated(run: Any, make_model: Any) -> None:
    async def test(world: LibreWorld) -> None:
        status, message = await world.refused(json=ASKED | {"target": "zh-Hant"})
        assert status == 400 and message.startswith("target: no model translates from 'en' to 'zh-Hant'; there: en to de")
        assert await world.post(json=ASKED | {"target": "EN", "q": ["A dog. A cat."]}) == (
            200,
            {"translatedText": ["A dog. A cat."]},
        )
        assert world.models["en-de"].engine.requests == []
        assert (await world.refused(json=ASKED | {"model": "none"}))[0] == 400

    run(test)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b"[" * 10**5, "application/json"),
        (b'{"q": "\xff", "source": "en", "target": "de"}', "application/json"),
        (b'{"q": "\\ud800", "source": "en", "target": "de"}', "application/json"),
        (b"q=%FF&source=en&target=de", "application/x-www-form-urlencoded"),
        (b"q=\xff&source=en&target=de", "application/x-www-form-urlencoded"),
        (b"q=a&q=b&source=en&target=de", "application/x-www-form-urlencoded"),
        (b"&".join([b"x=y"] * 1000), "application/x-www-form-urlencoded"),
        (b"--a\r\n\r\n--a--", "multipart/form-data; boundary=a"),
        (b"--a" * 1000, "multipart/form-data; boundary=a"),
        (b"", "multipart/form-data"),
        (b'--a\r\nContent-Disposition: form-data; name="q"; filename="f"\r\n\r\nx\r\n--a--', "multipart/form-data; boundary=a"),
        (b'--a\r\nContent-Disposition: form-data; name="q"\r\n\r\n\xff\r\n--a--', "multipart/form-data; boundary=a"),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(run: Any, body: bytes, kind: str) -> None:
    async def test(world: LibreWorld) -> None:
        status, _ = await world.refused(data=body, headers={"Content-Type": kind})
        assert status == 400

    run(test)


def test_other_kinds_sizes_and_methods_have_their_statuses(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        assert (await world.refused(data=b"A dog.", headers={"Content-Type": "text/plain"}))[0] == 415
        assert (await world.refused(data=b"x" * 70000, headers={"Content-Type": "application/json"}))[0] == 413
        assert (await world.refused(params={"q": "a"}, data={"q": "b"}))[1].startswith("q: is given more than once")
        assert (await world.get("/translate"))[0] == 405
        assert await world.refused("/translate_file") == (403, "files and suggestions are not taken here")

    run(test, max_message_bytes=65536)


def test_a_text_with_any_characters_is_a_text(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        assert await world.post(json=ASKED | {"q": "a\x00b \u202e\ufeff"}) == (200, {"translatedText": TEXT})

    run(test)


def test_languages_settings_and_health_tell_what_there_is(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        assert await world.get("/languages") == (
            200,
            [
                {"code": "de", "name": "German", "targets": ["fr", "zh-Hant"]},
                {"code": "en", "name": "English", "targets": ["de", "fr"]},
                {"code": "fr", "name": "French", "targets": ["de", "zh-Hant"]},
                {"code": "zh-Hant", "name": "Chinese Traditional", "targets": []},
            ],
        )
        status, told = await world.get("/frontend/settings")
        assert status == 200 and told["language"]["source"] == {"code": "de", "name": "German"}
        assert (told["apiKeys"], told["charLimit"], told["supportedFilesFormat"]) == (False, -1, [])
        assert await world.get("/health") == (200, {"status": "ok"})
        for model in world.models.values():
            model.engine.is_ready = False
        world.core.note_models()
        assert await world.get("/health") == (503, {"error": "the server is not ready"})
        assert world.counted() == {}

    run(test)


def test_languages_are_detected_among_those_that_can_be_translated(run: Any) -> None:
    pytest.importorskip("py3langid")

    async def test(world: LibreWorld) -> None:
        english = "A man is riding a bicycle down the street with his dog."
        german = "Ein Mann fährt mit seinem Hund auf einem Fahrrad die Straße entlang."
        status, told = await world.post("/detect", json={"q": english})
        assert status == 200 and told[0]["language"] == "en" and 50 < told[0]["confidence"] <= 100
        assert (await world.post("/detect", data={"q": german}))[1][0]["language"] == "de"
        assert (await world.post("/detect", json={"q": "123 !"})) == (200, [{"confidence": 0.0, "language": "en"}])
        assert await world.refused("/detect", json={}) == (400, "q: is missing")
        status, told = await world.post(json={"q": [german, "Ja."], "source": "auto", "target": "fr"})
        assert (
            status == 200
            and told["translatedText"] == [TEXT] * 2
            and [x["language"] for x in told["detectedLanguage"]] == ["de"] * 2
        )
        assert len(world.models["many"].engine.requests) == 2
        status, told = await world.post(json={"q": german, "source": "auto", "target": "de"})
        assert told["translatedText"] == german and told["detectedLanguage"]["language"] == "de"
        status, message = await world.refused(json={"q": german, "source": "auto", "target": "en"})
        assert (status, message) == (400, "target: 'en' is not supported: nothing is translated to it")

    run(test)


def test_without_a_detector_the_only_source_there_is_is_meant(run: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dragoman.server.faces.http.libre.detection.find_spec", lambda _: None)

    async def test(world: LibreWorld) -> None:
        _status, told = await world.post(json=ASKED | {"source": "auto"})
        assert told == {"translatedText": TEXT, "detectedLanguage": {"confidence": 0.0, "language": "en"}}
        needed = (400, "source: languages are not detected here; the server's extra `detect` is not installed")
        assert await world.refused("/detect", json={"q": "a"}) == needed
        assert await world.refused(json=ASKED | {"source": "auto", "target": "fr"}) == needed

        _, told = await world.post(json=ASKED | {"source": "auto", "target": "cs"})
        assert told["detectedLanguage"]["language"] == "en", "what is in the target's language already needs no model"

    pairs = (("en-de", "en", "de", None), ("x-fr", "en de", "fr", 340), ("both", "en cs", "en cs", 341))
    run(test, *(make_model(name, languages=languages(*sides)) for name, *sides in pairs))


def test_a_key_is_a_token_wherever_it_is_said(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine = world.models["en-de"].engine
        for arguments in (
            {"json": ASKED | {"api_key": "secret"}},
            {"data": ASKED | {"api_key": "secret"}},
            {"params": ASKED | {"api_key": "secret"}},
            {"json": ASKED, "headers": {"Authorization": "Bearer secret"}},
            {"json": ASKED | {"api_key": "other"}, "headers": {"Authorization": "Bearer secret"}},
        ):
            assert await world.post(**arguments) == (200, {"translatedText": TEXT})
        assert len(engine.requests) == 5
        for arguments in (
            {"json": ASKED},
            {"json": ASKED | {"api_key": "other"}},
            {"json": ASKED | {"api_key": "secret "}},
            {"json": ASKED | {"api_key": "secret"}, "headers": {"Authorization": "Bearer other"}},
            {"json": ASKED | {"api_key": ""}},
            {"data": ASKED | {"api_key": "\x00\n"}},
        ):
            status, message = await world.refused(**arguments)
            assert status == 403 and message.startswith("authorization: a bearer token")
        assert (await world.refused("/detect", json={"q": "a"}))[0] == 403
        assert (await world.refused(json={"q": "x" * 10**6}))[0] == 413, "its key would have been in what is not read"
        assert (await world.refused(json={"q": "x" * 10**6}, headers={"Authorization": "Bearer secret"}))[0] == 413
        assert len(engine.requests) == 5
        assert (await world.refused(json=ASKED | {"api_key": "secret", "target": "fr"}))[
            1
        ] == "target: 'fr' is not supported; there: de, en"
        status, told = await world.get("/languages")
        assert [known["code"] for known in told] == ["de", "en", "fr", "zh-Hant"], "those who ask for languages have no key"
        status, told = await world.get("/languages", headers={"Authorization": "Bearer secret"})
        assert [known["code"] for known in told] == ["de", "en"]

    run(test, callers=CALLERS, max_message_bytes=65536)


def test_each_text_is_in_its_callers_limits(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine = world.models["en-de"].engine
        status, _told = await world.post(json=ASKED | {"q": ["A dog."] * 20, "api_key": "secret"})
        assert status == 200 and engine.max_running <= 2
        async with world.session.post(world.url("/translate"), json=ASKED | {"q": ["A."] * 20, "api_key": "slow"}) as response:
            assert response.status == 429 and int(response.headers["Retry-After"]) > 0
            assert (await response.json())["error"].startswith("requests_per_second: 0.001 are allowed")
        assert len(engine.requests) < 25

    run(test, callers=CALLERS)


def test_one_that_fails_fails_the_call_and_the_others_end(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine = world.models["en-de"].engine
        engine.error = Unavailable("the engine is down", retry_after_seconds=2.5)
        async with world.session.post(world.url("/translate"), json=ASKED | {"q": ["A dog."] * 100}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "3")
            assert await response.json() == {"error": "the engine is down"}
        assert len(engine.requests) <= 16 and engine.num_running == 0
        engine.error = ValueError("what nobody foresaw")
        status, message = await world.refused(json=ASKED)
        assert status == 500 and "incident" in message and "foresaw" not in message

    run(test)


def test_a_caller_that_leaves_frees_every_slot(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine = world.models["en-de"].engine
        engine.hold()
        asking = asyncio.ensure_future(world.post(json=ASKED | {"q": ["A dog."] * 100}))
        await engine.arrived.wait()
        asking.cancel()
        async with asyncio.timeout(30):
            while world.core.num_running or engine.num_running:
                await asyncio.sleep(0.01)
        assert len(engine.cancelled) == len(engine.requests) <= 16
        assert set(world.counted()) == {"CANCELLED"}

    run(test)


def test_a_drain_waits_for_calls_and_refuses_new_ones(run: Any) -> None:
    async def test(world: LibreWorld) -> None:
        engine = world.models["en-de"].engine
        engine.hold()
        asking = asyncio.ensure_future(world.post(json=ASKED | {"q": ["A dog."] * 40}))
        await engine.arrived.wait()

        async def tell() -> None:
            return None

        draining = asyncio.ensure_future(world.core.drain(30, tell))
        await asyncio.sleep(0)
        assert (await world.refused(json=ASKED)) == (503, "the server is shutting down")
        engine.gate.set()
        assert await asking == (200, {"translatedText": [TEXT] * 40}) and await draining

    run(test)


def test_pages_of_other_origins_are_answered_as_the_setting_says(run: Any) -> None:
    page, asks = {"Origin": "https://a.example"}, {"Access-Control-Request-Method": "POST"}

    async def none(world: LibreWorld) -> None:
        async with world.session.options(world.url("/translate"), headers=page | asks) as response:
            assert response.status == 405 and "Access-Control-Allow-Origin" not in response.headers
        async with world.session.post(world.url("/translate"), json=ASKED, headers=page) as response:
            assert response.status == 200 and "Access-Control-Allow-Origin" not in response.headers
        assert (await world.refused(data=ASKED, headers=page))[0] == 403
        assert (await world.refused(params=ASKED, headers={"Origin": "null"}))[0] == 403
        own = {"Origin": f"http://127.0.0.1:{world.http.port}"}
        assert (await world.post(data=ASKED, headers=own))[0] == 200

    async def some(world: LibreWorld) -> None:
        for path in ("/translate", "/v1/generate", "/languages"):
            async with world.session.options(world.url(path), headers=page | asks) as response:
                assert response.status == 204 and response.headers["Access-Control-Allow-Origin"] == "https://a.example"
                allowed = response.headers["Access-Control-Allow-Headers"].split(", ")
                assert {"Authorization", "Inference-Header-Content-Length"} <= set(allowed) and response.headers["Vary"] == "Origin"
        async with world.session.post(world.url("/translate"), data=ASKED, headers=page) as response:
            assert response.status == 200 and response.headers["Access-Control-Allow-Origin"] == "https://a.example"
        for headers in (asks | {"Origin": "https://b.example"}, asks):
            async with world.session.options(world.url("/translate"), headers=headers) as response:
                assert response.status == 405 and "Access-Control-Allow-Origin" not in response.headers
        async with world.session.options(world.url("/nothing"), headers=page | asks) as response:
            assert response.status == 404

    async def anybody(world: LibreWorld) -> None:
        async with world.session.post(world.url("/translate"), json=ASKED | {"q": ""}, headers=page) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (400, "*")

    run(none)
    run(some, http_allowed_origins="https://a.example, moz-extension://1-2")
    run(anybody, http_allowed_origins="*")
