"""Which version of a model answers a request: the one that it names, or one by the shares of those that are served."""

import hashlib
import math
from collections.abc import Mapping

from dragoman.export.fields import one_line
from dragoman.server.errors import UnknownVersion

_MAX_SHOWN_CHARACTERS = 80


def choose(shares: Mapping[str, float], key: str) -> str:
    """Return the version that answers the requests of a key: always the same one while the shares are the same.

    Over many keys each version gets its share. If one share changes while the others stay in proportion, keys move to or from that
    version only, as few as can. The choice needs nothing but its arguments, so that all processes agree on it: weighted rendezvous
    hashing (Schindelhauer and Schomaker, 2005).

    Args:
        shares: By version; at least one is above 0.
        key: What is to stay with a version, such as a request's id or a caller's name; with the model's in it, or the same callers
            get the canaries of all models.
    """
    candidates = [name for name, share in shares.items() if share > 0]
    assert candidates, "there is nobody to choose"
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda name: (-math.log(_draw(key, name)) / shares[name], name))


def _draw(key: str, name: str) -> float:
    """Return a number above 0 and at most 1, uniform over keys and names."""
    text = f"{len(name)}:{name}{key}".encode("utf-8", "surrogatepass")
    # As many bits as a float has.
    return ((int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 11) + 1) / (1 << 53)


def resolve(model: str, asked: str, contents: Mapping[str, str], labels: Mapping[str, str]) -> str:
    """Return the name of the version that a request names.

    Args:
        model: Its name, for the message.
        asked: Name of a version, a label, or a content version; not empty.
        contents: Content version by name, of the versions that are served.
        labels: Name by label.

    Raises:
        UnknownVersion: If it is none of them, or different ones.
    """
    meant = {name for name, content in contents.items() if asked in (name, content)}
    if (labelled := labels.get(asked)) in contents:
        meant.add(str(labelled))
    if len(meant) == 1:
        return meant.pop()
    names = [name for name in contents if name in meant]
    served = [_described(name, content, labels) for name, content in contents.items()]
    raise UnknownVersion(
        model, one_line(asked, _MAX_SHOWN_CHARACTERS), served, [_described(name, contents[name], labels) for name in names]
    )


def _described(name: str, content: str, labels: Mapping[str, str]) -> str:
    """Return a version with all that it can be named by."""
    others = [content, *(label for label, version in labels.items() if version == name)]
    return f"{name} ({', '.join(others)})" if name else ", ".join(others)
