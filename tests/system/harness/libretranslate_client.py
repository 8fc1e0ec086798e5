"""LibreTranslate's API: texts one by one and in lists; of an answer it has the texts alone."""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse, ClientSession

from tests.system.harness.http_client import retry_of, session_of
from tests.system.harness.protocol import Answer, Method, Opened, Query, Refused


class LibreTranslate:
    """A caller of it."""

    name = "LibreTranslate"

    def __init__(self, session: ClientSession, token: str) -> None:
        self._session, self._token = session, token
        self.methods: Mapping[str, Method] = {
            "translate": Method(self._translate),
            "translate of several": Method(self._translate, 10),
        }

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Opened:
        async with session_of(server, {}) as session:
            yield cls(session, token)

    def supports(self, way: str, options: Mapping[str, Any]) -> bool:
        """It knows no options but how many answers there are to be, of a beam search of as many beams."""
        return not options or (
            options.keys() == {"num_beams", "num_return_sequences"} and options["num_beams"] == options["num_return_sequences"]
        )

    def project(self, answer: Answer) -> Answer:
        """It tells each text once."""
        return Answer(list(dict.fromkeys(answer.texts)))

    async def call_unimplemented(self) -> None:
        async with self._session.post("/suggest", json={"q": "a", "s": "b", "api_key": self._token}) as response:
            await check(response)

    async def _translate(self, asked: Query) -> list[Answer]:
        source, target = asked.languages
        message: dict[str, Any] = {"q": list(asked.texts), "source": source, "target": target, "model": asked.model}
        if len(asked.texts) == 1:
            message["q"] = asked.texts[0]
        if asked.options:
            message["alternatives"] = asked.options["num_return_sequences"] - 1
        if self._token:
            message["api_key"] = self._token
        async with self._session.post("/translate", json=message) as response:
            await check(response)
            answer = await response.json()
        best, others = answer["translatedText"], answer.get("alternatives", [])
        if len(asked.texts) == 1:
            best, others = [best], [others]
        return [Answer([text, *rest]) for text, rest in zip(best, others or [[]] * len(best), strict=True)]


async def check(response: ClientResponse) -> None:
    if response.status != 200:
        told = await response.json()
        assert list(told) == ["error"]
        raise Refused(str(response.status), told["error"], retry_of(response))
