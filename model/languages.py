"""Finding the language that a caller means among a model's. No torch and no data beside the model's own."""

import re
from collections.abc import Sequence

from dragoman.model.generation import Language, cased_spelling, spelling, spellings

_REGION = re.compile(r"[a-z]{2}|[0-9]{3}")
_MAX_ASKED_CHARACTERS = 128


class LanguageTable:
    """One side's languages of one model, to be asked by any of their spellings; made once a model."""

    def __init__(self, languages: Sequence[Language], default: str = "") -> None:
        """Take `Languages.source` and `default_source`, or those of the target.

        Raises:
            ValueError: If a spelling means two languages, or the default none.
        """
        self._codes, self._spellings = spellings(languages)
        by_code = {language.code: language for language in languages}
        if default and default not in by_code:
            raise ValueError(f"{default!r} is none of the languages")
        only = languages[0] if len(languages) == 1 else None
        #: The language of a request that does not say; None where it has to.
        self.default: Language | None = by_code[default] if default else only

    def find(self, asked: str) -> Language | None:
        """Return the language that is asked for, None where the model has none.

        Case and separators do not matter, but case does where codes differ in nothing else. A region, two letters or three digits,
        is left out where the model does not tell it apart (`de-AT` is `de`), a script never is.
        """
        if len(asked) > _MAX_ASKED_CHARACTERS:
            return None
        if (language := self._codes.get(cased_spelling(asked))) is not None:
            return language
        wanted = spelling(asked)
        if wanted in self._spellings:
            return self._spellings[wanted]
        first, *rest = wanted.split("_")
        without_region = [part for part in rest if _REGION.fullmatch(part) is None]
        return self._spellings.get("_".join([first, *without_region])) if len(without_region) < len(rest) else None
