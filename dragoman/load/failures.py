"""Why requests failed: the messages behind the statuses, counted, in a bounded number of them."""

import msgspec

from dragoman.load.show import one_line

# Messages kept of each status. Servers put figures into theirs, so that there may be as many as there are requests.
MAX_MESSAGES = 20
MAX_CHARACTERS = 500
OTHERS = "(other messages)"


class Failure(msgspec.Struct, frozen=True):
    """One way to fail."""

    code: str  # name of the status
    message: str  # what the server, gRPC or the sender said
    num: int  # requests that failed so


class Failures(msgspec.Struct):
    """Failed requests by status and message; what was provoked is not among them."""

    counts: dict[str, dict[str, int]] = {}  # numbers of requests by status, then by message

    def add(self, code: str, message: str, num: int = 1) -> None:
        """Count requests; of a status that has enough messages further ones are counted together."""
        message = one_line(message, MAX_CHARACTERS)
        messages = self.counts.setdefault(code, {})
        if message not in messages and len(messages) >= MAX_MESSAGES:
            message = OTHERS
        messages[message] = messages.get(message, 0) + num

    def merge(self, other: "Failures") -> None:
        """Count another's too."""
        for code, messages in other.counts.items():
            for message, num in messages.items():
                self.add(code, message, num)

    def most_frequent(self) -> list[Failure]:
        """Return them, the most frequent first."""
        found = [Failure(code, message, num) for code, messages in self.counts.items() for message, num in messages.items()]
        return sorted(found, key=lambda failure: (-failure.num, failure.code, failure.message))
