"""Lists of languages as importers make them: from tokens, from what the user wishes, from what a tokeniser's file states."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dragoman.model.generation import MAX_LANGUAGES, Language, Languages, Template, cased_spelling, spelling
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.language_names import is_group, other_names
from dragoman.model.importers.speech import Folder, Speech
from dragoman.model.languages import LanguageTable

_CODE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{1,64}")
_MAX_NAMED = 5

Affixes = Mapping[str, Any]


def languages_of(
    folder: Folder, tokens: Mapping[str, int], affixes: Callable[[int], Affixes], aliases: Mapping[str, str] | None = None
) -> tuple[list[Language], list[str]]:
    """Return a language for each code with the id of its token, and what is to be said of those that are left out.

    Raises:
        ForeignError: If there is none, there are too many, or the model has no row for a token.
    """
    kept: dict[str, tuple[str, int]] = {}
    left_out: list[str] = []
    for code, token_id in sorted(tokens.items(), key=lambda item: item[1]):
        if _CODE.fullmatch(code) is None or not spelling(code) or cased_spelling(code) in kept:
            left_out.append(code)
        else:
            kept[cased_spelling(code)] = code, folder.checked(code, token_id)
    if not 0 < len(kept) <= MAX_LANGUAGES:
        raise ForeignError(f"{folder.path}: its tokeniser has {len(kept)} languages; 1 to {MAX_LANGUAGES} are possible")
    names = other_names([code for code, _ in kept.values()], aliases)
    languages = [
        Language(code=code, names=found, **affixes(token_id)) for (code, token_id), found in zip(kept.values(), names, strict=True)
    ]
    notes = [f"left out, being spelt like another language of the model or like none: {listed(left_out)}"] if left_out else []
    return languages, notes


def wished(folder: Folder, languages: list[Language], side: str) -> str:
    """Return the code of the language that the user wishes for a side, or nothing.

    Raises:
        ForeignError: If the model has it not.
    """
    asked = getattr(folder.wishes, f"{side}_language")
    if not asked:
        return ""
    language = LanguageTable(languages).find(asked)
    if language is None:
        codes = listed([language.code for language in languages])
        raise ForeignError(f"{folder.path}: --{side}-language: the model has no {asked!r}; it has {codes}")
    return language.code


def stated(folder: Folder, languages: list[Language], field: str) -> str:
    """Return the code of the language that tokenizer_config.json states for a side, or nothing."""
    code = folder.tokenizer.get(field)
    language = LanguageTable(languages).find(code) if isinstance(code, str) else None
    return "" if language is None else language.code


def named(folder: Folder, field: str) -> str:
    """Return the one language that tokenizer_config.json names, or nothing where it names a group of them (`roa`, `mul`)."""
    code = folder.tokenizer.get(field)
    return code if isinstance(code, str) and _CODE.fullmatch(code) and not is_group(code) else ""


def is_code(folder: Folder, code: str) -> bool:
    """Whether there is a code to make a language of.

    Raises:
        ForeignError: For a wish that can be no code.
    """
    if code and (_CODE.fullmatch(code) is None or not spelling(code)):
        raise ForeignError(f"{folder.path}: {code!r:.80} is no code of a language")
    return bool(code)


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence, the first few of many."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def pair_speech(folder: Folder, template: Template) -> Speech:
    """Return the one language that is read and the one that is written, where the user or the tokeniser names them."""
    codes = {side: getattr(folder.wishes, f"{side}_language") or named(folder, f"{side}_lang") for side in ("source", "target")}
    sides = {side: [Language(code=code, names=other_names([code])[0])] for side, code in codes.items() if is_code(folder, code)}
    if not sides:
        return Speech(template=template, languages=None)
    pair = " -> ".join(codes[side] or "?" for side in ("source", "target"))
    languages = Languages(source=sides.get("source", []), target=sides.get("target", []))
    return Speech(template=template, languages=languages, notes=[f"one pair of languages: {pair}"])
