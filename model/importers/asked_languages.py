"""The languages that a user says a checkpoint has, or is to take where a request does not say."""

import msgspec

from dragoman.model.errors import InputError
from dragoman.model.generation import Language, Languages
from dragoman.model.languages import LanguageTable

_MAX_NAMED = 5


def with_asked_languages(languages: Languages | None, source: str, target: str) -> Languages | None:
    """Return a checkpoint's languages with those that a user names: its only ones, or the default ones of several.

    Args:
        languages: The checkpoint's.
        source: What it reads; nothing to leave that side as it is.
        target: What it writes; likewise.

    Raises:
        InputError: If it has languages, and not this one; for what can be no code; or where other names are to be looked up and the
            library that knows them is not installed.
    """
    changed = Languages() if languages is None else languages
    for side, asked in (("source", source), ("target", target)):
        if not asked:
            continue
        known: list[Language] = getattr(changed, side)
        if not known:
            changed = msgspec.structs.replace(changed, **{side: [_language(side, asked)]})
            continue
        language = LanguageTable(known).find(asked)
        if language is None:
            codes = ", ".join(one.code for one in known[:_MAX_NAMED]) + (" and others" if len(known) > _MAX_NAMED else "")
            raise InputError(f"--{side}-language: the model has no {asked!r}; it has {codes}")
        changed = msgspec.structs.replace(changed, **{f"default_{side}": language.code if len(known) > 1 else ""})
    return changed if source or target else languages


def _language(side: str, code: str) -> Language:
    """Return a language by its code, with its other names."""
    try:
        from dragoman.model.importers.language_names import other_names
    except ModuleNotFoundError as error:
        raise InputError(f"--{side}-language: needs {error.name}: pip install 'dragoman[import]'") from error
    try:
        return msgspec.convert({"code": code, "names": other_names([code])[0]}, Language)
    except msgspec.ValidationError as error:
        raise InputError(f"--{side}-language: {code!r:.80} is no code of a language: {error}") from error
