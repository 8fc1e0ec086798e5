"""OpenAI's completions over HTTP (https://platform.openai.com/docs/api-reference; differences in docs/call.md)."""

from collections.abc import Awaitable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.http.middleware import own_ending
from dragoman.server.protocols.http.requests import Endpoint, Exchange
from dragoman.server.protocols.http.responses import OPENAI_ERRORS, json_response
from dragoman.server.protocols.openai.reading import Completion, read_chat, read_completion
from dragoman.server.protocols.v1.messages import MessageLimit
from dragoman.server.service.answers import Answer, Generated, Piece, TokenLogProb
from dragoman.server.service.context import Call
from dragoman.server.service.service import Service

FINISH_REASONS = {"eos": "stop", "length": "length"}
DONE = "[DONE]"


class OpenAiApi:
    """Endpoints of completions; `max_message_bytes` limits the answer to a prompt."""

    def __init__(self, service: Service, max_message_bytes: int) -> None:
        self._service, self._limit = service, MessageLimit(max_message_bytes)

    def endpoints(self) -> Iterable[Endpoint]:
        """Return the endpoints."""
        counted = partial(Endpoint, "POST", errors=OPENAI_ERRORS, is_counted=True)
        return (
            counted("/v1/completions", self.complete, read=read_completion),
            counted("/v1/chat/completions", self.complete, read=read_chat),
        )

    async def complete(self, exchange: Exchange) -> web.StreamResponse:
        """Return the answers, or stream them."""
        asked: Completion = exchange.message
        [request, *others] = asked.requests
        has_details = request.has_log_probs or (request.num_return_sequences or 1) > 1
        if asked.is_streamed and not (others or has_details):
            return await self._stream(exchange, asked)
        answered = await self._answers(exchange, asked)
        if not asked.is_streamed:
            return json_response(to_response(asked, answered, exchange.call.request_id))
        for number, answer in enumerate(_all(answered)):
            await _send(exchange, asked, [_choice(asked, number, answer, is_delta=True)])
        return await _end(exchange, asked, answered)

    async def _answers(self, exchange: Exchange, asked: Completion) -> Sequence[Generated]:
        generation, call, requests = self._service.generation, exchange.call, asked.requests
        if len(requests) == 1:
            return [await generation.generate(requests[0], call, exchange.remaining_seconds, self._limit)]
        call.is_counted = False  # its prompts are counted
        items = ItemRecords(self._service.calls, call, own_ending)

        def serve(number: int, item: Call) -> Awaitable[Generated]:
            return generation.generate(requests[number], item, exchange.remaining_seconds, self._limit)

        assert call.window is not None
        named = "{1} (prompt {0})".format
        return await items.each(len(requests), call.request_id, call.window, serve, named)

    async def _stream(self, exchange: Exchange, asked: Completion) -> web.StreamResponse:
        [request], answered = asked.requests, list[Generated]()
        async with self._service.generation.stream(request, exchange.call, exchange.remaining_seconds, self._limit) as pieces:
            if asked.is_chat:
                await _send(exchange, asked, [_delta({"role": "assistant", "content": ""})])
            async for piece in pieces:
                if piece.text:
                    await _send(exchange, asked, [_piece(asked, piece)])
                if piece.result is not None:
                    answered.append(piece.result)
        reason = FINISH_REASONS[answered[0].best.finish_reason]
        await _send(exchange, asked, [_delta({}, reason) if asked.is_chat else _text("", reason)])
        return await _end(exchange, asked, answered)


def models_list(names: Iterable[str]) -> dict[str, Any]:
    """Return OpenAI's list of models, whose times of creation are unknown."""
    return {"object": "list", "data": [model_object(name) for name in names]}


def model_object(name: str) -> dict[str, Any]:
    """Return OpenAI's description of a model."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "dragoman"}


def to_response(asked: Completion, answered: Sequence[Generated], request_id: str) -> dict[str, Any]:
    """Return the response with the answers to a request that is not streamed."""
    choices = [_choice(asked, number, answer) for number, answer in enumerate(_all(answered))]
    return _envelope(asked, request_id, answered[0].model, choices) | {"usage": _usage(answered)}


def _all(answered: Sequence[Generated]) -> list[Answer]:
    return [answer for generated in answered for answer in generated.answers]


def _envelope(asked: Completion, request_id: str, model: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    kind = "chat.completion" if asked.is_chat else "text_completion"
    kind += ".chunk" if asked.is_chat and asked.is_streamed else ""
    prefix = "chatcmpl" if asked.is_chat else "cmpl"
    named = {"id": f"{prefix}-{request_id}", "object": kind, "created": asked.created, "model": model}
    return {**named, "choices": choices}


def _usage(answered: Sequence[Generated]) -> dict[str, int]:
    read, generated = sum(one.source_tokens for one in answered), sum(one.generated_tokens for one in answered)
    return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}


async def _send(exchange: Exchange, asked: Completion, choices: Sequence[dict[str, Any]], **more: Any) -> None:
    call = exchange.call
    envelope = _envelope(asked, call.request_id, call.model or asked.requests[0].model, choices)
    await exchange.send_event(msgspec.json.encode(envelope | more).decode())


async def _end(exchange: Exchange, asked: Completion, answered: Sequence[Generated]) -> web.StreamResponse:
    if asked.has_usage:
        await _send(exchange, asked, [], usage=_usage(answered))
    return await exchange.send_event(DONE)


def _piece(asked: Completion, piece: Piece) -> dict[str, Any]:
    return _delta({"content": piece.text}) if asked.is_chat else _text(piece.text, None)


def _delta(delta: dict[str, Any], finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _text(text: str, finish_reason: str | None, index: int = 0) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}


def _choice(asked: Completion, index: int, answer: Answer, *, is_delta: bool = False) -> dict[str, Any]:
    """Return an answer; with `is_delta` as the only chunk of a stream."""
    reason = FINISH_REASONS[answer.finish_reason]
    unmet: dict[str, Any] = {"unmet_terms": list(answer.unmet_terms)} if answer.unmet_terms else {}  # no field of OpenAI's
    if not asked.is_chat:
        return _text(answer.text, reason, index) | {"logprobs": _log_probs(answer.log_probs)} | unmet
    message = {"role": "assistant", "content": answer.text} | ({} if is_delta else {"refusal": None})
    content = [_told(token) | {"top_logprobs": list(map(_told, token.top))} for token in answer.log_probs]
    choice = _delta(message, reason, index) | {"logprobs": {"content": content, "refusal": None} if content else None}
    if not is_delta:
        choice["message"] = choice.pop("delta")
    return choice | unmet


def _told(token: TokenLogProb) -> dict[str, Any]:
    return {"token": token.piece.decode(errors="replace"), "logprob": token.log_prob, "bytes": list(token.piece)}


def _log_probs(tokens: Iterable[TokenLogProb]) -> dict[str, Any] | None:
    """Return the lists of the older format; offsets are in characters."""
    told = list(map(_told, tokens))
    if not told:
        return None
    offsets, end = [], 0
    for token in told:
        offsets.append(end)
        end += len(token["token"])
    return {
        "tokens": [token["token"] for token in told],
        "token_logprobs": [token["logprob"] for token in told],
        "top_logprobs": [{other.piece.decode(errors="replace"): other.log_prob for other in token.top} for token in tokens],
        "text_offset": offsets,
    }
