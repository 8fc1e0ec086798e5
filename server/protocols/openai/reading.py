"""Decoding of OpenAI's requests for completions, as vLLM reads them for encoder-decoder models: the prompt is the source text."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from dragoman.server.errors import InvalidRequest
from dragoman.server.protocols.bulk import BulkEnvelope
from dragoman.server.protocols.http.requests import check_content_type, run_by_size
from dragoman.server.protocols.http.responses import JSON
from dragoman.server.protocols.json_text import decode_json, one_line
from dragoman.server.protocols.openinference.requests import FIELDS, to_value
from dragoman.server.service.requests import GenerateRequest, check_length

MAX_PROMPTS = 1024
# Names of OpenAI and vLLM for fields of `GenerateRequest`; others that requests may have, by their own names.
RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
}
OWN = tuple(FIELDS.keys() - {"do_sample", "return_log_probs", "top_log_probs", *RENAMED.values()})
# Fields that are read and change nothing.
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")
# Fields that may have one of these values only: what they ask for is not offered.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "stop": ([], ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


@dataclass(frozen=True, slots=True)
class Completion(BulkEnvelope):
    """A request for completions of one or several prompts, or of a conversation."""

    requests: Sequence[GenerateRequest]  # one per prompt
    is_chat: bool
    is_streamed: bool
    has_usage: bool  # whether a stream ends with the usage
    created: int  # seconds since 1970

    def __len__(self) -> int:
        return len(self.requests)


async def read_completion(request: web.Request, body: bytes) -> Completion:
    """Decode `/v1/completions`; raise `InvalidRequest`."""
    check_content_type(request, JSON)
    return await run_by_size(len(body), to_completion, body, False)


async def read_chat(request: web.Request, body: bytes) -> Completion:
    """Decode `/v1/chat/completions`; raise `InvalidRequest`."""
    check_content_type(request, JSON)
    return await run_by_size(len(body), to_completion, body, True)


def to_completion(body: bytes, is_chat: bool) -> Completion:
    """Convert a message; raise `InvalidRequest` for what is malformed or not offered."""
    content = {name: value for name, value in decode_json(body, dict[str, Any]).items() if value is not None}
    texts = [_last_of_user(content.pop("messages", None))] if is_chat else _prompts(content.pop("prompt", None))
    is_streamed, options = _flag(content, "stream"), content.pop("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", "is no object")
    has_usage = _flag(options, "include_usage")
    request = replace(_to_request(content, is_chat), model=check_length("model", _text(content, "model")))
    if content:
        raise InvalidRequest(one_line(next(iter(content))), "is not known")
    return Completion([replace(request, text=text) for text in texts], is_chat, is_streamed, has_usage, int(time.time()))


def _to_request(content: dict[str, Any], is_chat: bool) -> GenerateRequest:
    """Take the fields of a request out of a message's content."""
    for name in IGNORED:
        content.pop(name, None)
    for name, values in NEUTRAL.items():
        if (value := content.pop(name, values[0])) not in values or isinstance(value, bool) != isinstance(values[0], bool):
            raise InvalidRequest(name, f"is not offered; {values[0]!r} is the only value")
    fields: dict[str, Any] = {}
    for name in (*RENAMED, *OWN):
        if name in content:
            field = FIELDS[RENAMED.get(name, name)]
            if field.name in fields:
                raise InvalidRequest(name, "is given twice, as max_tokens and as max_completion_tokens")
            fields[field.name] = to_value(name, field.kind, content.pop(name))
    if any(name in fields for name in ("temperature", "top_p", "top_k")) and fields.get("temperature") != 0:
        fields["do_sample"] = True
    elif "seed" in fields:
        del fields["seed"]  # nothing is drawn
    return GenerateRequest(**fields, **_log_probs(content, is_chat))


def _log_probs(content: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    """Take `logprobs`, a number or for conversations a flag, and `top_logprobs`."""
    asked = content.pop("logprobs", False)
    count = content.pop("top_logprobs", 0) if is_chat else asked
    if is_chat and not isinstance(asked, bool):
        raise InvalidRequest("logprobs", "is not true or false")
    if asked is False:
        if is_chat and count:
            raise InvalidRequest("top_logprobs", "goes with logprobs only")
        return {}
    return {"return_log_probs": True, "top_log_probs": to_value("top_logprobs" if is_chat else "logprobs", "integer", count)}


def _prompts(prompt: Any) -> list[str]:
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("prompt", "is neither a text nor a list of texts")
    if len(texts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"{len(texts)} texts; at most {MAX_PROMPTS} are completed at once")
    return texts


def _last_of_user(messages: Any) -> str:
    """Return the text of a conversation's last message of the user."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest("messages", "is no list of messages")
    for message in reversed(messages):
        if message.get("role") == "user":
            return _content(message.get("content"))
    raise InvalidRequest("messages", "has no message of the role user, whose text is the source")


def _content(content: Any) -> str:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise InvalidRequest("messages", "the content of the user's last message is no text")
    return "".join(part["text"] for part in parts)


def _text(content: dict[str, Any], name: str) -> str:
    if not isinstance(value := content.pop(name, ""), str):
        raise InvalidRequest(name, "is no text")
    return value


def _flag(content: dict[str, Any], name: str) -> bool:
    if not isinstance(value := content.pop(name, False), bool):
        raise InvalidRequest(name, "is not true or false")
    return value
