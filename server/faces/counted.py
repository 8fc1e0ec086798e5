"""A message of several requests, whichever protocol it is of."""


class BulkEnvelope:
    """A message of several requests, as it is read; its length is their number."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return how many there are."""
        raise NotImplementedError
