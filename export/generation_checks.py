"""Whether what a bundle says of generation can be done by its model: ids it has, texts that still fit, defaults within the limits.

A manifest is refused where it cannot, so that a request that says nothing of all this can always be served.
"""

from collections.abc import Iterable

from dragoman.model.generation import Affixes, Defaults, Languages, Template


def check_ids(template: Template, languages: Languages | None, source_vocab_size: int, target_vocab_size: int) -> None:
    """Refuse tokens that the model does not have.

    Raises:
        ValueError: Naming the field, the language and the id.
    """
    named: list[tuple[str, Affixes]] = [("template", template)]
    if languages is not None:
        named += [(f"source language {language.code!r}", language) for language in languages.source]
        named += [(f"target language {language.code!r}", language) for language in languages.target]
    for name, affixes in named:
        _check_below(f"source_prefix of {name}", affixes.source_prefix, source_vocab_size)
        _check_below(f"source_suffix of {name}", affixes.source_suffix, source_vocab_size)
        _check_below(f"target_prefix of {name}", affixes.target_prefix, target_vocab_size)
        start = affixes.decoder_start_id
        _check_below(f"decoder_start_id of {name}", [] if start is None else [start], target_vocab_size)


def check_room(template: Template, languages: Languages | None, max_source_tokens: int, max_target_tokens: int) -> None:
    """Refuse what is said around a text where it leaves no room for one token and end-of-sequence, or an answer of one token.

    Raises:
        ValueError: With both lengths.
    """
    source = num_said_of_source(template, languages)
    if source and source + 2 > max_source_tokens:
        raise ValueError(f"template and languages put {source} tokens around a source, which may have {max_source_tokens}")
    target = num_forced(template, languages)
    if target + 1 > max_target_tokens:
        raise ValueError(f"template and languages force {target} tokens of a target, which may have {max_target_tokens}")


def num_said_of_source(template: Template, languages: Languages | None) -> int:
    """Return how many tokens may be put around a source, end-of-sequence not counted."""
    read, written = ([], []) if languages is None else (languages.source, languages.target)
    of_read = max((len(language.source_prefix) + len(language.source_suffix) for language in read), default=0)
    of_written = max((len(language.source_prefix) for language in written), default=0)
    return len(template.source_prefix) + len(template.source_suffix) + of_read + of_written


def num_forced(template: Template, languages: Languages | None) -> int:
    """Return how many tokens an answer may be forced to begin with."""
    written = [] if languages is None else languages.target
    return len(template.target_prefix) + max((len(language.target_prefix) for language in written), default=0)


def check_defaults(
    defaults: Defaults, *, num_forced_tokens: int, max_target_tokens: int, target_vocab_size: int, num_choices: int, limit: int
) -> None:
    """Refuse defaults that a request could not ask for.

    Args:
        defaults: The model's.
        num_forced_tokens: Tokens that an answer may be forced to begin with.
        max_target_tokens: Longest target, end-of-sequence included.
        target_vocab_size: V.
        num_choices: Tokens that a step chooses from.
        limit: Tokens generated at the most where neither the request nor the defaults say.

    Raises:
        ValueError: Naming the field.
    """
    room = max_target_tokens - num_forced_tokens
    for name, most in (("max_new_tokens", room), ("no_repeat_ngram_size", max_target_tokens), ("top_k", target_vocab_size)):
        value = getattr(defaults, name)
        if value is not None and value > most:
            raise ValueError(f"{name} of defaults is {value}; at most {most} are possible")
    min_new_tokens = defaults.min_new_tokens or 0
    if min_new_tokens >= (most := limit if defaults.max_new_tokens is None else defaults.max_new_tokens):
        raise ValueError(f"min_new_tokens of defaults is {min_new_tokens}, which is not less than max_new_tokens, {most}")
    suppressed = set(defaults.suppressed_tokens)
    _check_below("suppressed_tokens of defaults", suppressed, target_vocab_size)
    if len(suppressed) + (min_new_tokens > 0) >= num_choices:
        raise ValueError(f"suppressed_tokens of defaults leave nothing of {num_choices} tokens")


def _check_below(field: str, ids: Iterable[int], vocab_size: int) -> None:
    if (largest := max(ids, default=-1)) >= vocab_size:
        raise ValueError(f"{field} has {largest}, which is outside the vocabulary of {vocab_size}")
