"""Validation: checks every field, tokenises the text and builds the engine's request.

Sizes are checked before contents, and every field before any text is tokenised. A prompt and its continuation share
`max_target_tokens` positions: the first decoder input is the prompt's last token, so p prompt tokens, f forced and n generated ones
must satisfy p - 1 + f + n <= `max_target_tokens`. A prompt alone may have `max_source_tokens`.
"""

import time
import unicodedata
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from dragoman.model.text.tokenizer import Encode, Tokenizer
from dragoman.server.engine import messages
from dragoman.server.errors import DeadlineExceeded, InvalidRequest
from dragoman.server.service.alignment import token_spans
from dragoman.server.service.answers import AnswerLimit, TokenSizes, check_answer, check_scores
from dragoman.server.service.context import Call
from dragoman.server.service.glossaries import on_glossary_thread
from dragoman.server.service.languages import PromptTemplate, encode_after
from dragoman.server.service.requests import (
    MAX_PRIORITY,
    GenerateRequest,
    ScoreRequest,
    check_length_penalty,
    check_num_suppressed,
    check_range,
    default_max_new_tokens,
    has_special_tokens,
    search_options,
)
from dragoman.server.service.sentences import cut_text, on_thread
from dragoman.server.service.terms import Match, TermIndex, index_of, with_terms

if TYPE_CHECKING:
    from dragoman.export.bundle import Manifest
    from dragoman.server.models.loaded import LoadedModel

# Longer texts are tokenised on a thread, so as not to block other requests.
MAX_INLINE_CHARACTERS = 2048
# More terms are indexed on a thread, and files of glossaries read there.
MAX_INLINE_TERMS = 64
# Most tokens that a tokeniser adds to those of a text's bytes.
NUM_ADDED_TOKENS = 8
# Text tokenised beyond the longest that could be kept, so that the last kept word is complete.
CUT_MARGIN_CHARACTERS = 1024


class Validator:
    """Validator of requests; caches the token sizes of each tokeniser."""

    def __init__(self) -> None:
        self._sizes: WeakKeyDictionary[Tokenizer, TokenSizes] = WeakKeyDictionary()

    async def validate(
        self,
        request: GenerateRequest,
        call: Call,
        model: "LoadedModel",
        limit: AnswerLimit | None = None,
        *,
        is_streamed: bool = False,
    ) -> tuple[messages.Request, PromptTemplate, bool, Sequence[Match]]:
        """Return the engine's request, the template around its text, whether the text was cut, and the terms in it.

        Raises `InvalidRequest`, naming the field and the limit, or `DeadlineExceeded` if the deadline has already passed.
        """
        manifest = model.manifest
        _check_deadline(call)
        check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
        template = model.templates.find(request.source_language, request.target_language)
        if not request.truncate:
            self.check_source_length(request.text, model)
        check_num_suppressed(len(request.suppressed_tokens))
        has_special = has_special_tokens(request, manifest, model.tokenizers)
        ids: Sequence[int] = ()
        is_truncated = False
        if template.has_prompts:
            text = request.text[-self._max_source_characters(model) - CUT_MARGIN_CHARACTERS :]
            ids = await _encode("text", template.task + text, model.tokenizers.source.encode)
            is_truncated = len(text) < len(request.text)
        prefix_ids = await self._prefix_ids(request.forced_prefix, model, template, ids) if request.forced_prefix else []
        max_new_tokens = check_max_new_tokens(request, manifest, len(prefix_ids), template)
        if template.has_prompts:
            kept, max_new_tokens = _fit_prompt(ids, len(prefix_ids), max_new_tokens, request, manifest, template)
            is_truncated |= len(kept) < len(ids)
            ids = kept
        search = search_options(request, manifest, model.max_slots_per_request, max_new_tokens, prefix_ids, template.search)
        is_slow = request.glossary or model.traits.glossary or len(request.terms) > MAX_INLINE_TERMS
        reading = partial(_term_indexes, request, model, search)
        indexes = await on_glossary_thread(reading) if is_slow else reading()
        if limit is not None and (request.has_log_probs or search.num_answers > 1):
            sizes = self.sizes_of(model.tokenizers.target)
            check_answer(search, max_new_tokens, request.has_log_probs, sizes, manifest.target_vocab_size, limit)
        if not template.has_prompts:
            ids, is_truncated = await self._source_ids(
                request.text, model, template, may_cut=request.truncate, has_special=has_special
            )
        matches: Sequence[Match] = ()
        if indexes:
            text = model.tokenizers.source.decode(ids) if is_truncated else request.text
            most = (0 if call.caller is None else call.caller.limits.max_slots) or model.max_slots_per_request
            where = model.tokenizers.target, min(most, model.max_slots_per_request)
            search, matches = await on_thread(with_terms, search, text, indexes, *where)
        source_ids, decoder_start_id = template.surround(ids)
        sequence = messages.Request(
            id=model.engine.next_id(),
            source_ids=source_ids,
            max_new_tokens=max_new_tokens,
            arrival=call.arrival,
            deadline=call.deadline,
            is_streamed=is_streamed,
            priority=request.priority,
            search=search,
            share=call.share,
            decoder_start_id=decoder_start_id,
            text_range=_text_range(request.text, ids, model, template) if call.is_aligned else None,
        )
        return sequence, template, is_truncated, matches

    async def validate_score(
        self, request: ScoreRequest, call: Call, model: "LoadedModel", limit: AnswerLimit | None = None
    ) -> tuple[messages.ScoreRequest, PromptTemplate]:
        """Return the engine's score request and the template around its texts; raises as `validate`."""
        manifest, tokenizers = model.manifest, model.tokenizers
        _check_deadline(call)
        check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
        check_length_penalty(request)
        layer = _check_layer(request, manifest)
        template = model.templates.find(request.source_language, request.target_language)
        self._check_target_length("target", request.target, model)
        self.check_source_length(request.text, model)
        has_special = has_special_tokens(request, manifest, tokenizers)
        ids, _ = await self._source_ids(request.text, model, template, has_special=has_special)
        source_ids, decoder_start_id = template.surround(ids)
        sequence = messages.ScoreRequest(
            id=model.engine.next_id(),
            source_ids=source_ids,
            target_ids=await self._scored_ids(request.target, model, template, source_ids, decoder_start_id),
            arrival=call.arrival,
            deadline=call.deadline,
            priority=request.priority,
            is_aligned=request.return_alignment or request.return_word_alignment,
            alignment_layer=layer,
            share=call.share,
            decoder_start_id=decoder_start_id,
        )
        if limit is not None and request.return_alignment:
            check_scores(sequence, tokenizers, manifest.target_vocab_size, limit)
        return sequence, template

    async def cut_source(self, text: str, request: GenerateRequest, model: "LoadedModel") -> list[str]:
        """Return consecutive parts of a source that fit the model: mostly one."""
        manifest, tokenizers = model.manifest, model.tokenizers
        template = model.templates.find(request.source_language, request.target_language)
        limit = manifest.max_source_tokens - template.num_around
        # A token has a byte at least of the text as tokenisers normalise it; they may fold cases, and add a few of their own.
        folded = text if text.isascii() else unicodedata.normalize("NFKC", text).casefold()
        if len((template.task + folded).encode(errors="replace")) + NUM_ADDED_TOKENS <= limit:
            return [text]
        has_special = has_special_tokens(request, manifest, tokenizers)

        def num_tokens(part: str) -> int:  # the special-token reader is loaded on first use, on the thread
            encode = tokenizers.encode_with_special_tokens if has_special else tokenizers.source.encode
            return len(encode(template.task + part.strip()))

        parts = cut_text(text, num_tokens, limit, self._max_source_characters(model))
        found: list[str] = []
        while (part := await on_thread(next, parts, None)) is not None:  # others have their turn, and callers may leave
            found.append(part)
        return found

    def sizes_of(self, tokenizer: Tokenizer) -> TokenSizes:
        """Return the token sizes of a tokeniser; the first call takes 0.1 s for a large vocabulary."""
        sizes = self._sizes.get(tokenizer)
        if sizes is None:
            sizes = self._sizes[tokenizer] = TokenSizes.measured(tokenizer)
        return sizes

    def max_characters(self, model: "LoadedModel") -> int:
        """Return the most characters of a text that a model could use."""
        return max(self._max_source_characters(model), self._max_target_characters(model)) + CUT_MARGIN_CHARACTERS

    def check_source_length(self, text: str, model: "LoadedModel") -> None:
        """Raise `InvalidRequest` if a source has more characters than the model's longest tokens could hold."""
        limit = model.manifest.max_source_tokens
        if len(text) > (characters := self._max_source_characters(model)):
            raise _too_long("text", characters, limit, f"max_source_tokens of model {model.name}")

    def _check_target_length(self, field: str, text: str, model: "LoadedModel") -> None:
        limit = model.manifest.max_target_tokens
        if len(text) > (characters := self._max_target_characters(model)):
            raise _too_long(field, characters, limit, f"max_target_tokens of model {model.name}")

    def _max_source_characters(self, model: "LoadedModel") -> int:
        """Return the most characters of a source, which may name special tokens."""
        tokenizers = model.tokenizers
        longest = max(self.sizes_of(tokenizers.source).longest, tokenizers.longest_special_token)
        return model.manifest.max_source_tokens * longest

    def _max_target_characters(self, model: "LoadedModel") -> int:
        return model.manifest.max_target_tokens * self.sizes_of(model.tokenizers.target).longest

    async def _source_ids(
        self, text: str, model: "LoadedModel", template: PromptTemplate, *, may_cut: bool = False, has_special: bool = False
    ) -> tuple[Sequence[int], bool]:
        """Return the ids of a source text and whether it was cut; not for prompts that may be cut."""
        limit, kept = model.manifest.max_source_tokens, text
        if may_cut:
            kept = text[: self._max_source_characters(model) + CUT_MARGIN_CHARACTERS]
        check_text(text, model)
        tokenizers = model.tokenizers
        # The special-token reader is loaded on first use, on the thread.
        encode = (lambda text: tokenizers.encode_with_special_tokens(text)) if has_special else tokenizers.source.encode
        ids = await _encode("text", template.task + kept, encode, is_slow=has_special)
        count = len(ids) + template.num_around
        if count > limit and not may_cut:
            end = "the start token" if template.has_prompts else "end-of-sequence"
            around = end if template.num_around == 1 else f"{end} and what its languages put around a text"
            raise InvalidRequest("text", f"{count} tokens, {around} included; max_source_tokens of model {model.name} is {limit}")
        # Text beyond the margin counts as cut, although some tokenisers drop whole runs of characters.
        return ids[: limit - template.num_around], count > limit or len(kept) < len(text)

    async def _prefix_ids(self, text: str, model: "LoadedModel", template: PromptTemplate, prompt: Sequence[int]) -> list[int]:
        """Return the ids of a forced prefix, without end-of-sequence; at least one token is left to generate."""
        ids = await self._target_ids("forced_prefix", text, model, prompt)
        limit = model.manifest.max_target_tokens - len(template.target_prefix)
        if len(ids) >= limit:
            room = _target_room(model.manifest, template)
            raise InvalidRequest("forced_prefix", f"{len(ids)} tokens leave none to generate; {room} is {limit}")
        return ids

    async def _scored_ids(
        self,
        text: str,
        model: "LoadedModel",
        template: PromptTemplate,
        source_ids: Sequence[int],
        decoder_start_id: int | None,
    ) -> list[int]:
        """Return the ids of a scored target `[T]` with the forced prefix and end-of-sequence."""
        manifest, limit = model.manifest, model.manifest.max_target_tokens
        before = [*source_ids, decoder_start_id or 0] if template.has_prompts else []
        ids = [*template.target_prefix, *await self._target_ids("target", text, model, before)]
        count = len(ids) + 1
        if template.has_prompts:
            if count > (left := limit + 1 - len(before)):
                raise InvalidRequest(
                    "target",
                    f"{count} tokens, end-of-sequence included; a prompt of {len(before)} leaves {max(left, 0)} of "
                    f"{limit}, max_target_tokens of model {model.name}",
                )
        elif count > limit:
            around = "end-of-sequence and what answers begin with" if template.target_prefix else "end-of-sequence"
            raise InvalidRequest("target", f"{count} tokens, {around} included; max_target_tokens of model {model.name} is {limit}")
        return [*ids, manifest.eos_id]

    async def _target_ids(self, field: str, text: str, model: "LoadedModel", before: Sequence[int]) -> list[int]:
        """Return the ids of a target text, which may continue a prompt, after a length check."""
        self._check_target_length(field, text, model)
        tokenizer = model.tokenizers.target
        return await _encode(field, text, partial(encode_after, tokenizer, before) if before else tokenizer.encode)


def _text_range(text: str, ids: Sequence[int], model: "LoadedModel", template: PromptTemplate) -> tuple[int, int]:
    """Return the range of source tokens that are of the text, not of what is around it."""
    start, num_before = len(template.source_prefix), 0
    if template.task:
        spans = token_spans([*map(model.tokenizers.source.word_bytes, ids)], template.task + text)
        num_before = next((i for i, (_, end) in enumerate(spans) if end > len(template.task)), len(ids) - 1)
    return start + num_before, start + len(ids)


def _term_indexes(request: GenerateRequest, model: "LoadedModel", search: messages.SearchOptions) -> list[TermIndex]:
    """Return the indexes of a request's terms and its glossaries, the model's by default; it may read files.

    Raise `InvalidRequest` if the request's search cannot have terms, or there is no such glossary.
    """
    field = "terms" if request.terms else "glossary" if request.glossary or request.indexes else ""
    reason = ""
    if model.manifest.has_prompts:
        reason = f"model {model.name} continues prompts, which are not translated"
    elif search.sampling is not None or search.has_alternatives:
        reason = f"does not go with {'do_sample' if search.sampling else 'return_alternatives'}"
    if reason and field:
        raise InvalidRequest(field, reason)
    indexes = [*([index_of(request.terms)] if request.terms else ()), *request.indexes]
    if (glossary := request.glossary or (not request.indexes and model.traits.glossary)) and not reason:
        try:
            indexes.append(model.glossaries.find(glossary))
        except InvalidRequest:
            if request.glossary:  # a default that is gone is the operator's fault, and in the log
                raise
    return indexes


def check_text(text: str, model: "LoadedModel") -> None:
    """Raise `InvalidRequest` for a blank text, except as a prompt."""
    if (not text or text.isspace()) and not model.manifest.has_prompts:
        raise InvalidRequest("text", "is blank")


def check_max_new_tokens(request: GenerateRequest, manifest: "Manifest", num_prefix_tokens: int, template: PromptTemplate) -> int:
    """Return the largest number of generated tokens, by default the model's or what the prefix leaves; raise `InvalidRequest`."""
    limit = manifest.max_target_tokens - len(template.target_prefix)
    if request.max_new_tokens is None:
        return min(default_max_new_tokens(manifest), limit - num_prefix_tokens)
    if not 1 <= request.max_new_tokens <= limit:
        room = _target_room(manifest, template)
        raise InvalidRequest("max_new_tokens", f"{request.max_new_tokens} is not in 1 to {limit}, {room}")
    if num_prefix_tokens + request.max_new_tokens > limit:
        both = f"{num_prefix_tokens} tokens and max_new_tokens of {request.max_new_tokens}"
        raise InvalidRequest("forced_prefix", f"{both} are more than {limit}, {_target_room(manifest, template)}")
    return request.max_new_tokens


def _target_room(manifest: "Manifest", template: PromptTemplate) -> str:
    forced = f" less the {len(template.target_prefix)} that its answers begin with" if template.target_prefix else ""
    return f"max_target_tokens of model {manifest.name}{forced}"


def _fit_prompt(
    ids: Sequence[int],
    num_prefix_tokens: int,
    max_new_tokens: int,
    request: GenerateRequest,
    manifest: "Manifest",
    template: PromptTemplate,
) -> tuple[Sequence[int], int]:
    """Return the kept end of a prompt's text and `max_new_tokens`; a cut prompt leaves the default, or half the room if less."""
    limit, room = manifest.max_source_tokens, manifest.max_target_tokens
    count, num_forced = len(ids) + template.num_around, len(template.target_prefix) + num_prefix_tokens
    num_least = 1 if request.max_new_tokens is None else request.max_new_tokens
    most = min(limit, room + 1 - num_forced - num_least)
    if count <= most:
        return ids, min(max_new_tokens, room + 1 - num_forced - count)
    forced = f" and {num_forced} that are forced" if num_forced else ""
    if not request.truncate:
        around = "the start token" if template.num_around == 1 else "the start token and what its languages put around a text"
        counted = f"{count} tokens, {around} included"
        if count > limit:
            raise InvalidRequest("text", f"{counted}; max_source_tokens of model {manifest.name} is {limit}")
        if request.max_new_tokens is None:
            whose = f"max_target_tokens of model {manifest.name} is {room}"
            raise InvalidRequest("text", f"{counted}{forced}, leave none to generate; {whose}")
        left = room + 1 - num_forced - count
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_least} is more than {max(left, 0)}, which a prompt of {count} tokens{forced} leave of {room}, "
            f"max_target_tokens of model {manifest.name}",
        )
    if most < template.num_around:
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_least} tokens{forced} leave no place for the {template.num_around} around a text; max_target_tokens of model "
            f"{manifest.name} is {room}",
        )
    if request.max_new_tokens is None:
        wanted = min(max_new_tokens, max((room - num_forced) // 2, 1))
        most = max(min(limit, room + 1 - num_forced - wanted), template.num_around)
    kept = ids[len(ids) - min(most - template.num_around, len(ids)) :]
    return kept, min(max_new_tokens, room + 1 - num_forced - len(kept) - template.num_around)


def _check_layer(request: ScoreRequest, manifest: "Manifest") -> int | None:
    """Return the layer of the alignment, None for the mean of all."""
    num_layers = manifest.attention_layers
    asked = [field for field in ("return_alignment", "return_word_alignment") if getattr(request, field)]
    if not num_layers and (asked or request.alignment_layer is not None):
        field = asked[0] if asked else "alignment_layer"
        raise InvalidRequest(field, f"model {manifest.name} has no attention between source and target to tell")
    if request.alignment_layer is None:
        return None
    if not asked:
        raise InvalidRequest("alignment_layer", "goes with return_alignment or return_word_alignment only")
    layers = f"the layers of model {manifest.name} that attend to a source"
    return check_range("alignment_layer", request.alignment_layer, 0, num_layers - 1, layers)


def _check_deadline(call: Call) -> None:
    if call.deadline is not None and call.deadline <= time.monotonic():
        raise DeadlineExceeded("the deadline passed before the request was read")


def _too_long(field: str, characters: int, tokens: int, limit: str) -> InvalidRequest:
    longest = f"more than {characters} characters, which {tokens} of the longest tokens have"
    return InvalidRequest(field, f"{longest}; {limit} is {tokens}")


async def _encode(field: str, text: str, encode: Encode, *, is_slow: bool = False) -> list[int]:
    """Return the ids of a text; tokenise long or slow ones on a thread; refuse lone surrogates, which JSON permits."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(field, f"character {error.start + 1} is half a surrogate pair") from None
    return await on_thread(encode, text) if is_slow or len(text) > MAX_INLINE_CHARACTERS else encode(text)
