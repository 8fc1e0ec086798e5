"""LibreTranslate's API: texts one by one and in lists; it carries the texts of answers alone."""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession

from tests.system.harness.http_client import HttpClient, session_of
from tests.system.harness.protocol import Answer, Connection, Method, Query


class LibreTranslate(HttpClient):
    """A client of it; its token is the key in each message."""

    name = "LibreTranslate"

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {
            "translate": Method(self._translate),
            "translate of several": Method(self._translate, 10),
        }

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Connection:
        async with session_of(server) as session:
            yield cls(session, token)

    def supports(self, method: str, options: Mapping[str, Any]) -> bool:
        """Its only option is the number of answers, of a beam search of as many beams."""
        return not options or (
            options.keys() == {"num_beams", "num_return_sequences"} and options["num_beams"] == options["num_return_sequences"]
        )

    def project(self, answer: Answer) -> Answer:
        """Keep each text once."""
        return Answer(list(dict.fromkeys(answer.texts)))

    async def call_unimplemented(self) -> None:
        async with self.post("/suggest", json={"q": "a", "s": "b", "api_key": self._token}):
            pass

    async def _translate(self, query: Query) -> list[Answer]:
        source, target = query.languages
        message: dict[str, Any] = {"q": list(query.texts), "source": source, "target": target, "model": query.model}
        if len(query.texts) == 1:
            message["q"] = query.texts[0]
        if query.options:
            message["alternatives"] = query.options["num_return_sequences"] - 1
        if self._token:
            message["api_key"] = self._token
        async with self.post("/translate", query, json=message) as response:
            answer = await response.json()
        best, others = answer["translatedText"], answer.get("alternatives", [])
        if len(query.texts) == 1:
            best, others = [best], [others]
        return [Answer([text, *rest]) for text, rest in zip(best, others or [[]] * len(best), strict=True)]
