"""Which versions of a model have answered the requests that name none, in order: what a rollback goes back to."""

from collections.abc import Container

# Further back nobody goes, and the server may live for years.
MAX_VERSIONS = 64


class History:
    """Names, the last one that of the version that answers now.

    Whoever goes back does not come forward by going back again: what came after a version is forgotten when that is back.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def note(self, name: str) -> None:
        """Take note of the version that answers from now on."""
        if name in self._names:
            del self._names[self._names.index(name) + 1 :]
        else:
            self._names = [*self._names[-MAX_VERSIONS + 1 :], name]

    def before(self, usable: Container[str]) -> str | None:
        """Return the last version that answered before the one that does, of those that still can; None if there is none."""
        return next((name for name in reversed(self._names[:-1]) if name in usable), None)
