"""The native API, the Open Inference Protocol, and the APIs of LibreTranslate, OpenAI and DeepL over HTTP."""

import json
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import GenerateResponse, GenerateStreamResponse
from tests.system.harness import openinference as oip
from tests.system.harness.grpc_client import CODES, answer_of, request_of
from tests.system.harness.protocol import NUM_TEXTS, Answer, Connection, Method, ProtocolClient, Query, Refused


def session_of(server: Any, token: str = "") -> ClientSession:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits: dict[str, Any] = {"connector": TCPConnector(limit=0), "timeout": ClientTimeout(300), "read_bufsize": 2**22}
    return ClientSession(server.http_address, headers=headers, **limits)


class HttpClient(ProtocolClient):
    def __init__(self, session: ClientSession, token: str = "") -> None:
        self._session, self._token = session, token

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Connection:
        async with session_of(server, token) as session:
            yield cls(session, token)

    @asynccontextmanager
    async def post(self, path: str, query: Query | None = None, **arguments: Any) -> AsyncIterator[ClientResponse]:
        """Send a message; raise `Refused` if its answer is an error."""
        headers = dict(query.headers) if query else {}
        if query is not None and query.request_id:
            headers["X-Request-Id"] = query.request_id
        if query is not None and query.timeout_seconds is not None:
            headers["Grpc-Timeout"] = f"{round(query.timeout_seconds * 1e6)}u"
        async with self._session.post(path, headers=headers | arguments.pop("headers", {}), **arguments) as response:
            if response.status != 200:
                error = await response.json()
                retry = response.headers.get("Retry-After")
                raise Refused(str(response.status), self.message_of(error), None if retry is None else float(retry))
            yield response

    def message_of(self, error: Mapping[str, Any]) -> str:
        assert list(error) == ["error"]
        return str(error["error"])


async def events(response: ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """Yield server-sent events as they come: name and data."""
    name = ""
    async for line in response.content:
        kind, _, value = line.decode().rstrip("\n").partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, json.loads(value)
            name = ""


class NativeHttp(HttpClient):
    name = "HTTP/JSON"

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {"generate": Method(self._generate), "generate:stream": Method(self._stream)}

    def message_of(self, error: Mapping[str, Any]) -> str:
        assert CODES[error["code"]] != "OK"
        return str(error["message"])

    async def call_unimplemented(self) -> None:
        async with self.post("/v1/nothing", json={}):
            pass

    async def _generate(self, query: Query) -> list[Answer]:
        async with self.post("/v1/generate", query, json=json_format.MessageToDict(request_of(query, 0))) as response:
            return [answer_of(json_format.Parse(await response.read(), GenerateResponse()))]

    async def _stream(self, query: Query) -> list[Answer]:
        async with self.post("/v1/generate:stream", query, json=json_format.MessageToDict(request_of(query, 0))) as response:
            found = [event async for event in events(response)]
        name, last = found[-1]
        if name == "error":
            raise Refused(CODES[last["code"]], self.message_of(last))
        assert not any(name for name, _ in found)
        pieces = [json_format.ParseDict(piece, GenerateStreamResponse()) for _, piece in found]
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return [answer_of(pieces[-1].result)]


def as_lists(named: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: value if isinstance(value, list) else [value] for name, value in named.items()}


class OpenInferenceRest(HttpClient):
    name = "OIP REST"

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {
            "infer": Method(self._infer),
            "infer of several": Method(self._infer, NUM_TEXTS),
            "infer of several in bytes": Method(self._infer_in_bytes, NUM_TEXTS),
            "generate": Method(self._generate),
            "generate_stream": Method(self._stream),
        }

    def project(self, answer: Answer) -> Answer:
        return oip.project(answer)

    async def call_unimplemented(self) -> None:
        async with self.post("/v2/repository/models/en-de/load"):
            pass

    async def _infer(self, query: Query) -> list[Answer]:
        body = oip.infer_body(*query.texts, parameters=dict(query.options))
        async with self.post(f"/v2/models/{query.model}/infer", query, json=body) as response:
            return oip.answers_of(oip.elements(oip.rest_outputs(await response.json())), len(query.texts))

    async def _infer_in_bytes(self, query: Query) -> list[Answer]:
        request = oip.infer_request(*query.texts, model=query.model)
        sent, headers = oip.binary_body(request, parameters=dict(query.options) | {"binary_data_output": True})
        async with self.post(f"/v2/models/{query.model}/infer", query, data=sent, headers=headers) as response:
            body, head = await response.read(), int(response.headers["Inference-Header-Content-Length"])
        return oip.answers_of(oip.elements(oip.rest_outputs(json.loads(body[:head]), body[head:])), len(query.texts))

    async def _generate(self, query: Query) -> list[Answer]:
        body = {"text_input": query.texts[0], **query.options}
        async with self.post(f"/v2/models/{query.model}/generate", query, json=body) as response:
            return oip.answers_of(as_lists(await response.json()), 1)

    async def _stream(self, query: Query) -> list[Answer]:
        body = {"text_input": query.texts[0], **query.options}
        async with self.post(f"/v2/models/{query.model}/generate_stream", query, json=body) as response:
            pieces = [event async for _, event in events(response)]
        if "error" in pieces[-1]:
            raise Refused("error event", self.message_of(pieces[-1]))  # without a status after the first piece
        return [oip.joined(list(map(as_lists, pieces)))]


class TranslateClient(HttpClient):
    """Texts one by one and in lists, by one method."""

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {
            "translate": Method(self._translate),
            "translate of several": Method(self._translate, NUM_TEXTS),
        }

    @abstractmethod
    async def _translate(self, query: Query) -> list[Answer]:
        """Send one call and return its answers."""


class LibreTranslate(TranslateClient):
    """Texts one by one and in lists; answers carry texts alone. The token is the key in each message."""

    name = "LibreTranslate"

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
        return Answer(list(dict.fromkeys(answer.texts)))

    async def call_unimplemented(self) -> None:
        async with self.post("/suggest", json={"q": "a", "s": "b", "api_key": self._token}):
            pass

    async def _translate(self, query: Query) -> list[Answer]:
        source, target = query.languages
        message: dict[str, Any] = {"q": list(query.texts), "source": source, "target": target, "model": query.model}
        if len(query.texts) == 1:
            message["q"] = query.texts[0]
        if "num_return_sequences" in query.options:
            message["alternatives"] = query.options["num_return_sequences"] - 1
        message["format"] = query.options.get("markup", "text")
        if self._token:
            message["api_key"] = self._token
        async with self.post("/translate", query, json=message) as response:
            answer = await response.json()
        best, others = answer["translatedText"], answer.get("alternatives", [])
        if len(query.texts) == 1:
            best, others = [best], [others]
        return [Answer([text, *rest]) for text, rest in zip(best, others or [[]] * len(best), strict=True)]


class OpenAi(HttpClient):
    """Completions and conversations; answers carry texts and how they ended."""

    name = "OpenAI"
    NAMES: Mapping[str, str] = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {
            "completions": Method(self._complete),
            "completions of several": Method(self._complete, NUM_TEXTS),
            "completions in pieces": Method(self._stream),
            "chat": Method(self._chat),
        }

    def supports(self, method: str, options: Mapping[str, Any]) -> bool:
        return not {"return_log_probs", "top_log_probs"} & options.keys()

    def project(self, answer: Answer) -> Answer:
        return Answer(answer.texts, endings=answer.endings)

    async def call_unimplemented(self) -> None:
        async with self.post("/v1/completions", json={"model": "en-de", "prompt": "a", "stop": ["b"]}):
            pass

    def message_of(self, error: Mapping[str, Any]) -> str:
        assert error["error"].keys() == {"message", "type", "param", "code"}
        return str(error["error"]["message"])

    def _body(self, query: Query, **more: Any) -> dict[str, Any]:
        options = {self.NAMES.get(name, name): value for name, value in query.options.items() if name != "do_sample"}
        return {"model": query.model, **options, **more}

    def _answers(self, choices: list[dict[str, Any]], num_texts: int, text: Any) -> list[Answer]:
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        size = len(choices) // num_texts
        groups = [choices[start : start + size] for start in range(0, len(choices), size)]
        endings = {"stop": "eos", "length": "length"}
        return [Answer(list(map(text, group)), endings=[endings[each["finish_reason"]] for each in group]) for group in groups]

    async def _complete(self, query: Query) -> list[Answer]:
        prompt = list(query.texts) if len(query.texts) > 1 else query.texts[0]
        async with self.post("/v1/completions", query, json=self._body(query, prompt=prompt)) as response:
            return self._answers((await response.json())["choices"], len(query.texts), lambda choice: choice["text"])

    async def _chat(self, query: Query) -> list[Answer]:
        messages = [{"role": "system", "content": "Translate."}, {"role": "user", "content": query.texts[0]}]
        async with self.post("/v1/chat/completions", query, json=self._body(query, messages=messages)) as response:
            choices = (await response.json())["choices"]
        return self._answers(choices, 1, lambda choice: choice["message"]["content"])

    async def _stream(self, query: Query) -> list[Answer]:
        body = self._body(query, prompt=query.texts[0], stream=True)
        async with self.post("/v1/completions", query, json=body) as response:
            lines = [line.decode().removeprefix("data: ").strip() async for line in response.content if line.strip()]
        if lines[-1] != "[DONE]":
            raise Refused("error event", self.message_of(json.loads(lines[-1])))
        found: dict[int, dict[str, Any]] = {}
        for line in lines[:-1]:
            (choice,) = json.loads(line)["choices"]
            one = found.setdefault(choice["index"], choice | {"text": ""})
            one |= {"text": one["text"] + choice["text"], "finish_reason": choice["finish_reason"]}
        return self._answers(list(found.values()), 1, lambda choice: choice["text"])


class DeepL(TranslateClient):
    """Texts one by one and in lists; answers carry texts alone. The token has a scheme of its own."""

    name = "DeepL"

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Connection:
        async with session_of(server) as session:
            if token:
                session.headers["Authorization"] = f"DeepL-Auth-Key {token}"
            yield cls(session, token)

    def supports(self, method: str, options: Mapping[str, Any]) -> bool:
        return not options

    def project(self, answer: Answer) -> Answer:
        return Answer(answer.texts)

    def message_of(self, error: Mapping[str, Any]) -> str:
        assert error.keys() == {"message", "detail"}
        return str(error["message"])

    async def call_unimplemented(self) -> None:
        async with self.post("/v2/translate", json={"text": ["a"], "target_lang": "DE", "formality": "more"}):
            pass

    async def _translate(self, query: Query) -> list[Answer]:
        source, target = query.languages
        split = "1" if query.options.get("split") == "sentences" else "0"
        message = {"text": list(query.texts), "source_lang": source.upper(), "target_lang": target.upper(), "model": query.model}
        message |= {"split_sentences": split, "tag_handling": query.options.get("markup", "")}
        async with self.post("/v2/translate", query, json=message) as response:
            return [Answer([one["text"]]) for one in (await response.json())["translations"]]
