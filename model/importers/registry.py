"""The families there are, by what `config.json` calls them."""

from typing import Final

from dragoman.model.importers import bart, m2m100, marian, mbart, pegasus, t5
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.family import Family
from dragoman.model.importers.settings import Settings

_ALL: Final = (marian.FAMILY, m2m100.FAMILY, bart.FAMILY, mbart.FAMILY, pegasus.FAMILY, t5.T5, t5.MT5, t5.UMT5)
FAMILIES: Final = {family.model_type: family for family in _ALL}
# Relatives that are none of them, and what sets them apart.
_RELATIVES: Final = {
    "nllb-moe": "a mixture of experts",
    "switch_transformers": "a mixture of experts",
    "longt5": "attention is local in its encoder",
    "led": "attention is local in its encoder",
    "bigbird_pegasus": "attention is sparse in its encoder",
    "pegasus_x": "attention is local in its encoder",
    "prophetnet": "it predicts several tokens at once",
    "fsmt": "its layers are others than BART's",
    "whisper": "it reads sound",
}


def family_of(config: Settings) -> Family:
    """Return the family of a configuration, whose defaults it is given.

    Raises:
        ForeignError: Naming its type and those that are known.
    """
    kind = config.get("model_type", str)
    if kind not in FAMILIES:
        why = f" ({_RELATIVES[kind]})" if kind in _RELATIVES else ""
        raise ForeignError(f"{config.path}: model_type {kind!r} is not known here{why}; known: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[kind]
    config.with_defaults(family.defaults)
    return family
