"""Which model a request means that names languages and no model: the one that translates the pair."""

from collections.abc import Sequence

from dragoman.server.errors import InvalidRequest, UnknownPair
from dragoman.server.service.languages import MAX_LISTED_CHARACTERS, MAX_SHOWN_CHARACTERS, check_language, listed
from dragoman.server.service.ports import Model


def choose_model(models: Sequence[Model], source_language: str, target_language: str) -> Model:
    """Return the model that translates a pair; of several the one that does nothing else, where there is one such.

    Args:
        models: Those that may be meant.
        source_language: By any of its spellings; empty for one that need not be said.
        target_language: By any of its spellings.

    Raises:
        InvalidRequest: If several do, none or more than one of them this pair alone.
        UnknownPair: If none does.
    """
    check_language("source_language", source_language)
    check_language("target_language", target_language)
    able = [model for model in models if model.frames.is_able(source_language, target_language)]
    if len(able) > 1 and source_language:
        able = [model for model in able if is_of_one_pair(model)] or able
    if len(able) == 1:
        return able[0]
    pair = f"from {_shown(source_language)} to {_shown(target_language)}" if source_language else f"to {_shown(target_language)}"
    if not able:
        raise UnknownPair(pair, pairs_of(models))
    names = listed([model.name for model in able])
    raise InvalidRequest("model", f"is missing; {len(able)} translate {pair}: {names}")


def is_of_one_pair(model: Model) -> bool:
    """Whether a model reads one language and writes one."""
    return len(model.frames.source_languages) == len(model.frames.target_languages) == 1


def pairs_of(models: Sequence[Model]) -> str:
    """Return what models translate, for people to read: `en to de (en-de)`; those that tell no language are left out."""
    pairs: list[str] = []
    num_characters = 0
    telling = [model for model in models if model.frames.target_languages]
    for model in telling:
        sides = (model.frames.source_languages, model.frames.target_languages)
        source, target = (listed([x.code for x in side], MAX_LISTED_CHARACTERS // 4) or "anything" for side in sides)
        pairs.append(f"{source} to {target} ({model.name})")
        num_characters += len(pairs[-1])
        if num_characters > MAX_LISTED_CHARACTERS and len(pairs) < len(telling):
            pairs.append(f"and those of {len(telling) - len(pairs)} more")
            break
    return "; ".join(pairs)


def _shown(language: str) -> str:
    return ascii(language[:MAX_SHOWN_CHARACTERS])
