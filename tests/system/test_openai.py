"""OpenAI's completions: its own client, unmodified; refusals with its types of errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from openai import OpenAI

from dragoman.client.sync import Client
from tests.system.harness.server import Server, serving

pytestmark = pytest.mark.e2e

TEXT = "Two young men play football on the grass."
USER: Any = [{"role": "system", "content": "Translate."}, {"role": "user", "content": TEXT}]
CALLERS = '[callers.web]\ntoken = "a-key"\n'


@pytest.fixture(scope="module")
def server(bundles: Path) -> Iterator[Server]:
    with serving(bundles, callers=CALLERS) as started:
        yield started
        assert started.terminate() == 0 and not started.problems()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.http_address}/v1", api_key="a-key", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected(server: Server) -> Any:
    with Client(server.address, token="a-key") as client:
        return client.generate(TEXT, model="en-de", top_log_probs=2)


def test_its_client_lists_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["en-de", "en-fr"]
    assert client.models.retrieve("en-fr").id == "en-fr"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_its_client_completes_prompts_and_conversations(client: OpenAI, expected: Any) -> None:
    usage = (expected.usage.source_tokens, expected.usage.generated_tokens)
    for temperature in ({}, {"temperature": 0, "seed": 7, "top_p": 0.5}):
        found: Any = client.completions.create(model="en-de", prompt=TEXT, user="x", **temperature)  # type: ignore[call-overload]
        assert (found.choices[0].text, found.choices[0].finish_reason) == (expected.text, "stop")
        assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.model) == (*usage, "en-de")
    several = client.completions.create(model="en-de", prompt=["A dog.", TEXT], n=2, extra_body={"num_beams": 2})
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    chat = client.chat.completions.create(model="en-de", messages=USER, max_completion_tokens=3)
    assert chat.choices[0].finish_reason == "length" and expected.text.startswith(chat.choices[0].message.content or "?")
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": f"{TEXT}\n\n"}, {"type": "text", "text": TEXT}]}]
    split = client.chat.completions.create(model="en-de", messages=parts, extra_body={"split": "sentences"})
    assert split.choices[0].message.content == f"{expected.text}\n\n{expected.text}"
    drawn = [client.completions.create(model="en-de", prompt=TEXT, temperature=5, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_its_client_reads_log_probabilities(client: OpenAI, expected: Any) -> None:
    told = [(token.piece.decode(), token.log_prob) for token in expected.answers[0].log_probs]
    found: Any = client.completions.create(model="en-de", prompt=TEXT, logprobs=2).choices[0].logprobs
    assert list(zip(found.tokens, found.token_logprobs, strict=True)) == told and len(found.top_logprobs[0]) == 2
    assert found.text_offset[:2] == [0, len(told[0][0])]
    chat: Any = client.chat.completions.create(model="en-de", messages=USER, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert [(token.token, token.logprob) for token in chat.content] == told
    assert [len(token.top_logprobs) for token in chat.content] == [2] * len(told)


def test_its_client_streams(client: OpenAI, expected: Any) -> None:
    options: Any = {"model": "en-de", "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(prompt=TEXT, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text and len(chunks) > 5
    assert chunks[-1].usage.completion_tokens == expected.usage.generated_tokens and chunks[-2].choices[0].finish_reason == "stop"
    chat = list(client.chat.completions.create(messages=USER, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat[:-1]) == expected.text
    assert chat[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chat}) == 1
    several = list(client.chat.completions.create(messages=USER, n=2, extra_body={"num_beams": 2}, **options))
    assert [chunk.choices[0].index for chunk in several[:-1]] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model: 'nobody' is not loaded"),
        ({"prompt": ""}, openai.BadRequestError, "prompt: is blank"),
        ({"prompt": [1, 2]}, openai.BadRequestError, "prompt: is neither a text nor a list of texts"),
        ({"prompt": ["a", " "]}, openai.BadRequestError, "prompt: is blank (prompt 1)"),
        ({"prompt": ["a"] * 1025}, openai.BadRequestError, "prompt: 1025 texts; at most 1024"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens: 1000000 is not in 1 to"),
        ({"n": 2}, openai.BadRequestError, "n: "),
        ({"n": 10**9}, openai.BadRequestError, "n: "),
        ({"stop": ["x"]}, openai.BadRequestError, "stop: is not offered"),
        ({"echo": True}, openai.BadRequestError, "echo: is not offered"),
        ({"logit_bias": {"5": 1}}, openai.BadRequestError, "logit_bias: is not offered"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature: is not a number"),
        ({"logprobs": 21}, openai.BadRequestError, "top_log_probs: 21"),
        ({"extra_body": {"unheard_of": 1}}, openai.BadRequestError, "unheard_of: is not known"),
        ({"extra_body": {"stream_options": 1}}, openai.BadRequestError, "stream_options: is no object"),
        ({"extra_body": {"max_completion_tokens": 3}, "max_tokens": 3}, openai.BadRequestError, "max_completion_tokens: is given"),
    ],
)
def test_refusals_have_its_types(client: OpenAI, fields: Any, kind: type[openai.APIStatusError], message: str) -> None:
    with pytest.raises(kind) as caught:
        client.completions.create(**({"model": "en-de", "prompt": TEXT} | fields))
    body: Any = caught.value.body
    assert body["message"].startswith(message) and body["type"] == "invalid_request_error"
    assert body["param"] == message.partition(":")[0]


def test_conversations_without_a_source_and_callers_without_a_key_are_refused(server: Server, client: OpenAI) -> None:
    for messages in ([], [{"role": "assistant", "content": "a"}], [{"role": "user", "content": [{"type": "image_url"}]}], 7):
        with pytest.raises(openai.BadRequestError, match="messages: "):
            client.chat.completions.create(model="en-de", messages=messages)  # type: ignore[call-overload]
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=f"{server.http_address}/v1", api_key="other").completions.create(model="en-de", prompt=TEXT)
    for body, status in (("{", 400), ("[]", 400)):
        headers = {"Authorization": "Bearer a-key", "Content-Type": "application/json"}
        found = requests.post(f"{server.http_address}/v1/completions", body, headers=headers, timeout=60)
        assert found.status_code == status and found.json()["error"]["type"] == "invalid_request_error"
    assert requests.get(f"{server.http_address}/v1/completions", timeout=60).json()["error"]["code"] == "invalid_argument"
