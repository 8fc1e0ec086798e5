"""Files given to the library `tokenizers`, whose native code gives up in more ways than one; here, in one."""

import json
from typing import Any

from tokenizers import Tokenizer as Encoder

from dragoman.model.text.reading import reason
from dragoman.model.text.tokenizer import TokenizerError


def parsed(content: bytes) -> dict[str, Any]:
    """Return a file as JSON.

    Raises:
        TokenizerError: If it has no model with a vocabulary.
    """
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"not JSON: {reason(error)}") from error
    model = description.get("model") if isinstance(description, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError("not a file of `tokenizers`: it has no model with a vocabulary")
    assert isinstance(description, dict)
    return description


def encoder_of(description: dict[str, Any]) -> Encoder:
    """Return what the library makes of a file.

    Raises:
        TokenizerError: If it can make nothing of it.
    """
    _refuse_torn_merges(description["model"])
    try:
        return Encoder.from_str(json.dumps(description))
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises bare Exception for every kind of bad file, and where its native code gives up something beside it.
    except BaseException as error:
        raise TokenizerError(f"not a file of `tokenizers`: {reason(error)}") from error


def _refuse_torn_merges(model: dict[str, Any]) -> None:
    """Refuse merges whose right sides lack the prefix that pieces within a word have.

    The library cuts off as many bytes as the prefix has, whatever they are; inside a character, that ends the process.
    """
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    rights = (merge[-1] if isinstance(merge, list) and merge else merge for merge in merges)
    if not all(isinstance(right, str) and right.rpartition(" ")[2].startswith(prefix) for right in rights):
        raise TokenizerError(f"a merge lacks continuing_subword_prefix {ascii(prefix)[:40]}")
