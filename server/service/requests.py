"""What callers ask for, in no protocol's terms: the fields of `dragoman.v1`, which docs/api.md defines; None where one is absent.

A face makes these of its own messages. It answers for their types, so a number is a number; ranges, and what goes with what, are
checked behind it (`validation.py`, `search_options.py`). Structs are made four times as fast as frozen dataclasses, once a request.
"""

from collections.abc import Sequence

from msgspec import Struct


class GenerateRequest(Struct, frozen=True):
    """A source to generate an answer for."""

    model: str = ""
    text: str = ""
    max_new_tokens: int | None = None
    truncate: bool = False
    request_id: str = ""
    priority: int = 0
    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    suppressed_tokens: Sequence[int] = ()
    forced_prefix: str = ""
    return_alternatives: bool = False
    return_log_probs: bool = False
    top_log_probs: int = 0
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""
    special_tokens_in_text: bool | None = None


class ScoreRequest(Struct, frozen=True):
    """A source and a target that is given."""

    model: str = ""
    text: str = ""
    target: str = ""
    request_id: str = ""
    priority: int = 0
    length_penalty: float | None = None
    return_alignment: bool = False
    return_word_alignment: bool = False
    alignment_layer: int | None = None
    source_language: str = ""
    target_language: str = ""
    model_version: str = ""
    special_tokens_in_text: bool | None = None
