"""The console's model data over HTTP: what is told of each version, and to whom."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.evidence import Parity, Quality

PATH = "/console/models"


async def told(world: Any, token: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with world.session.get(world.url(PATH), headers=headers) as response:
        return response.status, await response.json()


def test_a_version_is_told_as_the_native_api_does_with_what_its_bundle_says_of_it(serve_http: Any, make_model: Any) -> None:
    quality = Quality(3, 2, 10, 400, 0.99, 0.001, 0.002, 0.003)
    model = make_model(parity=Parity(0.001, 0.0002, 10, 100, 5, 0, 5, 0.0003, 0.0001, quality=quality))

    async def run() -> None:
        async with serve_http(model) as world:
            status, answer = await told(world)
            async with world.session.get(world.url("/v1/models/en-de")) as response:
                native = await response.json()
            assert status == 200
            [one] = answer["models"]
            assert one["model"] == native
            assert one["card"] is None, "its bundle has none"
            assert one["quality"]["numConstantScales"] == 3 and one["quality"]["agreement"] == 0.99
            assert one["parity"]["maxLogProbDifference"] == 0.0002 and "quality" not in one["parity"]
            assert one["origin"]["weightsSha256"] == "ab" * 32
            assert one["limits"] == {
                "maxSourceTokens": 64,
                "maxTargetTokens": 48,
                "maxSlots": 8,
                "maxSlotsPerRequest": 8,
                "maxPriority": None,
            }

    asyncio.run(run())


def test_a_card_is_told_as_it_is(serve_http: Any, make_model: Any) -> None:
    model = make_model()
    model.card = lambda: "# Card\n\n<script>alert(1)</script> 🐕"

    async def run() -> None:
        async with serve_http(model) as world:
            assert (await told(world))[1]["models"][0]["card"] == model.card()

    asyncio.run(run())


def test_a_model_without_8_bit_arithmetic_has_no_quality_to_tell(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            assert (await told(world))[1]["models"][0]["quality"] is None

    asyncio.run(run())


@pytest.mark.parametrize(("token", "names"), [("", None), ("bobs-token", ["en-de"]), ("alices-token", ["en-de", "en-fr"])])
def test_a_caller_is_told_of_the_models_it_may_use(
    serve_http: Any, make_model: Any, tmp_path: Path, token: str, names: list[str] | None
) -> None:
    callers = tmp_path / "callers.toml"
    callers.write_text('[callers.alice]\ntoken = "alices-token"\n[callers.bob]\ntoken = "bobs-token"\nmodels = ["en-de"]\n')

    async def run() -> None:
        async with serve_http(make_model(), make_model("en-fr"), auth_tokens_file=callers) as world:
            status, answer = await told(world, token)
            if names is None:
                assert (status, answer["code"]) == (401, 16)
            else:
                assert [one["model"]["name"] for one in answer["models"]] == names

    asyncio.run(run())


def test_without_a_console_nothing_is_told(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http(console=False) as world:
            assert (await told(world))[0] == 404

    asyncio.run(run())
