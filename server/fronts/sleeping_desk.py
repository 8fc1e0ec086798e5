"""What stands in a desk's place while a model is asleep: an endpoint by which it is told from others, and nobody there."""


class SleepingDesk:
    """See above.

    Attributes:
        endpoint: Where nothing listens.
    """

    def __init__(self, endpoint: str) -> None:
        """Do not listen."""
        self.endpoint = endpoint

    def detach(self, name: str) -> None:
        """Do nothing: no front end is attached."""

    def close(self) -> None:
        """Do nothing: nothing is open."""
