"""From a caller's request to one the engine can trust: every field checked, the text tokenised. The engine never sees raw input."""

import asyncio
import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from model.tokenizer import Tokenizer
from protos import generation_pb2
from server.api.ports import Model
from server.engine import messages
from server.errors import DeadlineExceeded, InvalidRequest

MAX_NAME_CHARACTERS = 128
MAX_ID_CHARACTERS = 128
# Tokenising more than this takes long enough for other requests to notice, so it is done on a thread.
MAX_INLINE_CHARACTERS = 2048
# How much text beyond the longest that could be kept is tokenised when cutting, so that the last word kept is a whole one.
CUT_MARGIN_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine, and what only the answer needs to know about it."""

    request: messages.Request
    is_truncated: bool


class Validator:
    """Checks requests; remembers of each tokeniser how many bytes its longest token has."""

    def __init__(self) -> None:
        self._longest_tokens: WeakKeyDictionary[Tokenizer, int] = WeakKeyDictionary()

    async def prepare(
        self,
        request: generation_pb2.GenerateRequest,
        model: Model,
        *,
        arrival: float,
        remaining_seconds: float | None,
        is_streamed: bool,
    ) -> Prepared:
        """Return the request for the engine.

        Args:
            request: What the caller sent.
            model: The model it is for.
            arrival: `time.monotonic()` when it came.
            remaining_seconds: Until its deadline, None if it has none.
            is_streamed: Whether tokens are wanted as they come.

        Raises:
            InvalidRequest: Naming the field and the limit.
            DeadlineExceeded: If the deadline has passed already.
        """
        deadline = None
        if remaining_seconds is not None:
            if remaining_seconds <= 0:
                raise DeadlineExceeded("the deadline passed before the request was read")
            deadline = time.monotonic() + remaining_seconds
        max_new_tokens = check_max_new_tokens(request, model)
        source_ids, is_truncated = await self._tokenise(request.text, model, may_cut=request.truncate)
        return Prepared(
            messages.Request(
                id=model.engine.next_id(),
                source_ids=source_ids,
                max_new_tokens=max_new_tokens,
                arrival=arrival,
                deadline=deadline,
                is_streamed=is_streamed,
            ),
            is_truncated,
        )

    async def _tokenise(self, text: str, model: Model, *, may_cut: bool) -> tuple[list[int], bool]:
        """Return the source ids [S], end-of-sequence included, and whether the text was cut."""
        limit = model.manifest.max_source_tokens
        if not text or text.isspace():
            raise InvalidRequest("text", "is blank")
        # A character is at least a byte: more characters than this are certainly more tokens than fit, whatever they are.
        max_characters = limit * self._longest_token(model.tokenizer)
        if len(text) > max_characters:
            if not may_cut:
                at_least = f"more than {max_characters} characters, which no {limit} tokens can hold"
                raise InvalidRequest("text", f"{at_least}; max_source_tokens of model {model.name} is {limit}")
            text = text[: max_characters + CUT_MARGIN_CHARACTERS]
        if len(text) > MAX_INLINE_CHARACTERS:
            ids = await asyncio.to_thread(model.tokenizer.encode, text)
        else:
            ids = model.tokenizer.encode(text)
        count = len(ids) + 1
        if count > limit and not may_cut:
            raise InvalidRequest(
                "text", f"{count} tokens, end-of-sequence included; max_source_tokens of model {model.name} is {limit}"
            )
        return [*ids[: limit - 1], model.manifest.eos_id], count > limit

    def _longest_token(self, tokenizer: Tokenizer) -> int:
        """Return the bytes of the tokeniser's longest token."""
        longest = self._longest_tokens.get(tokenizer)
        if longest is None:
            longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
            self._longest_tokens[tokenizer] = longest
        return longest


def check_model_name(name: str) -> str:
    """Return a model's name as it is.

    Raises:
        InvalidRequest: If no model can have it.
    """
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest("model", f"{len(name)} characters; at most {MAX_NAME_CHARACTERS} are allowed")
    return name


def check_request_id(field: str, value: str) -> str:
    """Return a caller's request id as it is; it goes into logs, so it must be harmless there.

    Args:
        field: What to call it in the error.
        value: The id.

    Raises:
        InvalidRequest: If it is too long or has other characters than printable ASCII.
    """
    if len(value) > MAX_ID_CHARACTERS:
        raise InvalidRequest(field, f"{len(value)} characters; at most {MAX_ID_CHARACTERS} are allowed")
    if not (value.isascii() and value.isprintable()):
        raise InvalidRequest(field, "only printable ASCII characters are allowed")
    return value


def check_max_new_tokens(request: generation_pb2.GenerateRequest, model: Model) -> int:
    """Return how many tokens may be generated, the model's default where the request does not say.

    Raises:
        InvalidRequest: If the model cannot generate so many, or none are asked for.
    """
    if not request.HasField("max_new_tokens"):
        return model.manifest.default_max_new_tokens
    limit = model.manifest.max_target_tokens
    if not 1 <= request.max_new_tokens <= limit:
        raise InvalidRequest(
            "max_new_tokens", f"{request.max_new_tokens} is not in 1 to {limit}, max_target_tokens of model {model.name}"
        )
    return request.max_new_tokens
