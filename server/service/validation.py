"""Validation of requests."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dragoman.model.text.special_tokens import Encode
from dragoman.model.text.tokenizer import Tokenizer
from dragoman.server.engine import messages
from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.service.answer_size import AnswerLimit, SizesOfTokens, check_answer
from dragoman.server.service.defaults import default_max_new_tokens, has_special_tokens
from dragoman.server.service.languages import Frame, encode_after
from dragoman.server.service.ports import Limited, Model
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.search_options import check_num_suppressed, search_options
from dragoman.server.service.sentences import on_thread

MAX_NAME_CHARACTERS = 128
MAX_PRIORITY = 10
# Tokenising more than this takes long enough for other requests to notice, so it is done on a thread.
MAX_INLINE_CHARACTERS = 2048
# How much text beyond the longest that could be kept is tokenised when cutting, so that the last word kept is a whole one.
CUT_MARGIN_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request for the engine, and what only the answer needs to know about it.

    Attributes:
        request: For the engine.
        is_truncated: Whether the source was cut.
        frame: What is said around its text.
        has_log_probs: Whether the answer tells its tokens' log-probabilities.
    """

    request: messages.Request
    is_truncated: bool
    frame: Frame
    has_log_probs: bool = False


class Source(NamedTuple):
    """A source for the engine.

    Attributes:
        ids: `[S]`, with all that the frame puts around a text.
        decoder_start_id: What the decoder is fed first; None for the model's.
        is_truncated: Whether the text was cut.
    """

    ids: list[int]
    decoder_start_id: int | None
    is_truncated: bool


class Validator:
    """Checks requests; remembers of each tokeniser how many bytes its tokens have.

    How much there is of a field is looked at before anything else of it, and of all fields before any text is tokenised.

    Attributes:
        sizes: Of tokenisers' tokens.
    """

    def __init__(self) -> None:
        self.sizes = SizesOfTokens()

    async def prepare(
        self,
        request: GenerateRequest,
        model: Model,
        *,
        arrival: float,
        remaining_seconds: float | None,
        is_streamed: bool,
        share: messages.Share = messages.ANYBODY,
        limit: AnswerLimit | None = None,
    ) -> Prepared:
        """Return the request for the engine.

        Args:
            request: What the caller sent.
            model: The model it is for.
            arrival: `time.monotonic()` when it came.
            remaining_seconds: Until its deadline, None if it has none.
            is_streamed: Whether tokens are wanted as they come.
            share: Whose it is.
            limit: What can be answered; None for anything.

        Raises:
            InvalidRequest: Naming the field and the limit.
            DeadlineExceeded: If the deadline has passed already.
        """
        deadline = check_deadline(remaining_seconds)
        priority = check_priority(request.priority)
        frame = model.frames.find(request.source_language, request.target_language)
        if not request.truncate:
            self.check_source_length(request.text, model)
        check_num_suppressed(len(request.suppressed_tokens))
        has_special = has_special_tokens(request, model.manifest, model.tokenizers)
        prompt, is_truncated = await self._prompt_ids(request, model, frame) if frame.has_prompts else ([], False)
        prefix_ids = await self._tokenise_prefix(request.forced_prefix, model, frame, prompt) if request.forced_prefix else []
        max_new_tokens = check_max_new_tokens(request, model, len(prefix_ids), frame)
        source: Source | None = None
        if frame.has_prompts:
            kept, max_new_tokens = fitted(prompt, len(prefix_ids), max_new_tokens, request, model, frame)
            source = Source(*frame.framed(kept), is_truncated or len(kept) < len(prompt))
        search = search_options(request, model, max_new_tokens, prefix_ids, frame)
        has_log_probs = request.return_log_probs or request.top_log_probs > 0
        if limit is not None and (has_log_probs or search.num_answers > 1):
            self._check_answer(search, max_new_tokens, has_log_probs, model, limit)
        if source is None:
            source = await self.tokenise_source(request.text, model, frame, may_cut=request.truncate, has_special=has_special)
        return Prepared(
            messages.Request(
                id=model.engine.next_id(),
                source_ids=source.ids,
                max_new_tokens=max_new_tokens,
                arrival=arrival,
                deadline=deadline,
                is_streamed=is_streamed,
                priority=priority,
                search=search,
                share=share,
                decoder_start_id=source.decoder_start_id,
            ),
            source.is_truncated,
            frame,
            has_log_probs,
        )

    async def tokenise_source(
        self, text: str, model: Model, frame: Frame, *, may_cut: bool = False, has_special: bool = False
    ) -> Source:
        """Return a source, of which, if it may be cut, the beginning is kept; special tokens may be named in it, or are text.

        Raises:
            InvalidRequest: If the text is blank and is no prompt, or is too long and may not be cut.
        """
        assert not (may_cut and frame.has_prompts), "a prompt is cut where it is known what follows it"
        limit = model.manifest.max_source_tokens
        if not may_cut:
            self.check_source_length(text, model)
        if (not text or text.isspace()) and not frame.has_prompts:
            raise InvalidRequest("text", "is blank")
        kept = text[: self._max_source_characters(model) + CUT_MARGIN_CHARACTERS]
        tokenizers = model.tokenizers
        # The reader of special tokens is loaded when it is first used.
        encode = (lambda text: tokenizers.encode_with_special_tokens(text)) if has_special else tokenizers.source.encode
        ids = await _encode("text", frame.task + kept, encode, is_slow=has_special)
        count = len(ids) + frame.num_around
        if count > limit and not may_cut:
            end = "the start token" if frame.has_prompts else "end-of-sequence"
            around = end if frame.num_around == 1 else f"{end} and what its languages put around a text"
            raise InvalidRequest("text", f"{count} tokens, {around} included; max_source_tokens of model {model.name} is {limit}")
        # What is left out was more than most tokenisers could keep, but some make nothing of whole runs of characters.
        return Source(*frame.framed(ids[: limit - frame.num_around]), count > limit or len(kept) < len(text))

    async def _prompt_ids(self, request: GenerateRequest, model: Model, frame: Frame) -> tuple[list[int], bool]:
        """Return the ids of a prompt's text, all that could be kept of it at least, and whether some of it was left unread."""
        kept = request.text[-self._max_source_characters(model) - CUT_MARGIN_CHARACTERS :]
        ids = await _encode("text", frame.task + kept, model.tokenizers.source.encode)
        return ids, len(kept) < len(request.text)

    async def tokenise_target(self, text: str, model: Model, frame: Frame, source: Source) -> list[int]:
        """Return the ids of a given target [T] of a source, what answers are forced to begin with and end-of-sequence included.

        Raises:
            InvalidRequest: If it is too long.
        """
        limit = model.manifest.max_target_tokens
        before = [*source.ids, source.decoder_start_id or 0] if frame.has_prompts else []
        ids = [*frame.target_prefix, *await self._target_ids("target", text, model, before)]
        if frame.has_prompts:
            check_target(len(ids) + 1, len(before), model)
        elif len(ids) >= limit:
            around = "end-of-sequence and what answers begin with" if frame.target_prefix else "end-of-sequence"
            raise InvalidRequest(
                "target", f"{len(ids) + 1} tokens, {around} included; max_target_tokens of model {model.name} is {limit}"
            )
        return [*ids, model.manifest.eos_id]

    def max_characters(self, model: Model) -> int:
        """Return how many characters of a text a model could use at the most."""
        source = self._max_source_characters(model)
        target = self._max_characters(model.manifest.max_target_tokens, model.tokenizers.target)
        return max(source, target) + CUT_MARGIN_CHARACTERS

    def check_target_length(self, text: str, model: Model, field: str = "target") -> None:
        """Do nothing if a text in the target's language may fit the model.

        Raises:
            InvalidRequest: If it has more characters than the longest tokens.
        """
        limit = model.manifest.max_target_tokens
        if len(text) > (max_characters := self._max_characters(limit, model.tokenizers.target)):
            raise InvalidRequest(field, _too_long(max_characters, limit, f"max_target_tokens of model {model.name}"))

    def check_source_length(self, text: str, model: Model) -> None:
        """Do nothing if a source may fit the model.

        Raises:
            InvalidRequest: If it has more characters than the longest tokens.
        """
        limit = model.manifest.max_source_tokens
        if len(text) > (max_characters := self._max_source_characters(model)):
            raise InvalidRequest("text", _too_long(max_characters, limit, f"max_source_tokens of model {model.name}"))

    def _max_source_characters(self, model: Model) -> int:
        """Return the same of a source, which may name special tokens."""
        tokenizers = model.tokenizers
        longest = max(self.sizes.of(tokenizers.source).longest, tokenizers.longest_special_token)
        return model.manifest.max_source_tokens * longest

    def _max_characters(self, num_tokens: int, tokenizer: Tokenizer) -> int:
        """Return how many characters so many of the longest tokens hold at the most; whatever a tokeniser makes of runs."""
        return num_tokens * self.sizes.of(tokenizer).longest

    async def _target_ids(self, field: str, text: str, model: Model, before: Sequence[int]) -> list[int]:
        """Return the ids of a text in the target's language, however many; one that is certainly too long is refused unread.

        Args:
            field: That has it.
            text: It.
            model: The model it is for.
            before: Ids of the prompt that it goes on with; none where it is a text of its own.
        """
        self.check_target_length(text, model, field)
        tokenizer = model.tokenizers.target
        return await _encode(field, text, partial(encode_after, tokenizer, before) if before else tokenizer.encode)

    async def _tokenise_prefix(self, text: str, model: Model, frame: Frame, prompt: Sequence[int]) -> list[int]:
        """Return the ids of a forced prefix, as those of a target, without end-of-sequence; they leave room for one token."""
        ids = await self._target_ids("forced_prefix", text, model, prompt)
        limit = model.manifest.max_target_tokens - len(frame.target_prefix)
        if len(ids) >= limit:
            room = _target_room(model, frame)
            raise InvalidRequest("forced_prefix", f"{len(ids)} tokens leave none to generate; {room} is {limit}")
        return ids

    def _check_answer(
        self, search: messages.SearchOptions, max_new_tokens: int, has_log_probs: bool, model: Model, limit: AnswerLimit
    ) -> None:
        """Refuse what might be answered with more than can be sent."""
        sizes = self.sizes.of(model.tokenizers.target)
        check_answer(search, max_new_tokens, has_log_probs, sizes, model.manifest.target_vocab_size, limit)


def _too_long(max_characters: int, max_tokens: int, limit: str) -> str:
    return f"more than {max_characters} characters, which {max_tokens} of the longest tokens have; {limit} is {max_tokens}"


def _check_name(field: str, name: str) -> str:
    if len(name) > MAX_NAME_CHARACTERS:
        raise InvalidRequest(field, f"{len(name)} characters; at most {MAX_NAME_CHARACTERS} are allowed")
    return name


def check_model_name(name: str) -> str:
    """Return a model's name as it is.

    Raises:
        InvalidRequest: If no model can have it.
    """
    return _check_name("model", name)


def check_model_version(version: str) -> str:
    """Return a version as it is given.

    Raises:
        InvalidRequest: If no model can have it.
    """
    return _check_name("model_version", version)


def check_deadline(remaining_seconds: float | None) -> float | None:
    """Return when a request's deadline is, by `time.monotonic()`.

    Args:
        remaining_seconds: Until it, None if there is none.

    Raises:
        DeadlineExceeded: If it has passed already.
    """
    if remaining_seconds is None:
        return None
    if remaining_seconds <= 0:
        raise DeadlineExceeded("the deadline passed before the request was read")
    return time.monotonic() + remaining_seconds


def check_priority(priority: int) -> int:
    """Return a request's priority as it is.

    Raises:
        InvalidRequest: If it is out of range.
    """
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest("priority", f"{priority} is not in {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return priority


def check_max_new_tokens(request: GenerateRequest, model: Limited, num_prefix_tokens: int, frame: Frame) -> int:
    """Return how many tokens may be generated, the model's default or what the prefix leaves where the request does not say.

    Args:
        request: What the caller sent.
        model: The model it is for.
        num_prefix_tokens: Tokens of `forced_prefix`.
        frame: Of its languages.

    Raises:
        InvalidRequest: If the model cannot generate so many after the prefix, or none are asked for.
    """
    limit = model.manifest.max_target_tokens - len(frame.target_prefix)
    if request.max_new_tokens is None:
        return min(default_max_new_tokens(model.manifest), limit - num_prefix_tokens)
    if not 1 <= request.max_new_tokens <= limit:
        raise InvalidRequest("max_new_tokens", f"{request.max_new_tokens} is not in 1 to {limit}, {_target_room(model, frame)}")
    if num_prefix_tokens + request.max_new_tokens > limit:
        both = f"{num_prefix_tokens} tokens and max_new_tokens of {request.max_new_tokens}"
        raise InvalidRequest("forced_prefix", f"{both} are more than {limit}, {_target_room(model, frame)}")
    return request.max_new_tokens


def _target_room(model: Limited, frame: Frame) -> str:
    """Say where the limit of a target's tokens comes from."""
    forced = f" less the {len(frame.target_prefix)} that its answers begin with" if frame.target_prefix else ""
    return f"max_target_tokens of model {model.name}{forced}"


async def _encode(field: str, text: str, encode: Encode, *, is_slow: bool = False) -> list[int]:
    """Return the ids of a text; a long one is tokenised on a thread, and any where that is slow.

    Raises:
        InvalidRequest: If it has half a surrogate pair, which a protocol that is not UTF-8 lets through.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(field, f"character {error.start + 1} is half a surrogate pair") from None
    return await on_thread(encode, text) if is_slow or len(text) > MAX_INLINE_CHARACTERS else encode(text)


def fitted(
    ids: Sequence[int], num_prefix_tokens: int, max_new_tokens: int, request: GenerateRequest, model: Limited, frame: Frame
) -> tuple[list[int], int]:
    """Return what is kept of a prompt's text, its end, and how many tokens may be generated after it.

    Where the request does not say how many, they are the model's default or what the prompt leaves; a prompt that is cut leaves the
    default, or half of the room where that is more than half.

    Args:
        ids: Of the text.
        num_prefix_tokens: Tokens of `forced_prefix`.
        max_new_tokens: Tokens to generate at the most, after a prompt of one token.
        request: What the caller sent.
        model: The model it is for.
        frame: Of its languages.

    Raises:
        InvalidRequest: If the prompt is too long, by itself or for what is to follow it, and may not be cut.
    """
    limit, room = model.manifest.max_source_tokens, model.manifest.max_target_tokens
    count, num_forced = len(ids) + frame.num_around, len(frame.target_prefix) + num_prefix_tokens
    num_least = 1 if request.max_new_tokens is None else request.max_new_tokens
    most = min(limit, room + 1 - num_forced - num_least)
    if count <= most:
        return list(ids), min(max_new_tokens, room + 1 - num_forced - count)
    forced = f" and {num_forced} that are forced" if num_forced else ""
    if not request.truncate:
        if count > limit:
            raise InvalidRequest("text", f"{_counted(count, frame)}; max_source_tokens of model {model.name} is {limit}")
        if request.max_new_tokens is None:
            whose = f"max_target_tokens of model {model.name} is {room}"
            raise InvalidRequest("text", f"{_counted(count, frame)}{forced}, leave none to generate; {whose}")
        left = room + 1 - num_forced - count
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_least} is more than {max(left, 0)}, which a prompt of {count} tokens{forced} leave of {room}, "
            f"max_target_tokens of model {model.name}",
        )
    if most < frame.num_around:
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_least} tokens{forced} leave no place for the {frame.num_around} around a text; max_target_tokens of model "
            f"{model.name} is {room}",
        )
    if request.max_new_tokens is None:
        wanted = min(max_new_tokens, max((room - num_forced) // 2, 1))
        most = max(min(limit, room + 1 - num_forced - wanted), frame.num_around)
    kept = list(ids[len(ids) - min(most - frame.num_around, len(ids)) :])
    return kept, min(max_new_tokens, room + 1 - num_forced - len(kept) - frame.num_around)


def check_target(num_target_tokens: int, num_prompt_tokens: int, model: Limited) -> None:
    """Do nothing if a target that is given fits behind a prompt.

    Args:
        num_target_tokens: Its tokens, end-of-sequence included.
        num_prompt_tokens: The prompt's, all of them.
        model: The model they are for.

    Raises:
        InvalidRequest: If it does not.
    """
    room = model.manifest.max_target_tokens
    if num_target_tokens > (left := room + 1 - num_prompt_tokens):
        raise InvalidRequest(
            "target",
            f"{num_target_tokens} tokens, end-of-sequence included; a prompt of {num_prompt_tokens} leaves {max(left, 0)} of "
            f"{room}, max_target_tokens of model {model.name}",
        )


def _counted(count: int, frame: Frame) -> str:
    around = "the start token" if frame.num_around == 1 else "the start token and what its languages put around a text"
    return f"{count} tokens, {around} included"
