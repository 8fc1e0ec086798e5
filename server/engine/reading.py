"""How prompts come into their rows: read in pieces between steps, so that nobody who runs waits long for another's prompt.

While its prompt is being read a row is among those that are stepped, at position 0, and what the step says of it is not looked at:
the next piece overwrites what it has written. What is read is the same to the last bit however it was cut, so no answer depends on
who else was there.
"""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered

import structlog

from dragoman.server.engine.messages import Prefill
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.sequence import Sequence
from dragoman.server.runtime.runner import Reader

log = structlog.get_logger("dragoman.engine")


class Readings:
    """Reads prompts in order of admission, so many tokens an iteration. See `Filling`.

    Attributes:
        done: What was read since the last report, an entry for every iteration in which something was.
    """

    def __init__(
        self,
        reader: Callable[[], Reader],
        limits: Limits,
        clock: Callable[[], float],
        observe: Callable[[int, float], None],
        fail: Callable[[list[Sequence], str], None],
        refuse: Callable[[Sequence], None],
    ) -> None:
        """Take what is needed to read.

        Args:
            reader: Returns what reads.
            limits: Of tokens that are read between two steps.
            clock: Tells the time.
            observe: Is told the tokens and seconds of each iteration.
            fail: Ends sequences whose prompts could not be read, while the exception is being handled.
            refuse: Ends a sequence for whose prompt there is no memory.
        """
        self._reader, self._limits, self._clock = reader, limits, clock
        self._observe, self._fail, self._refuse = observe, fail, refuse
        self._num_read: dict[Sequence, int] = {}
        self.done: list[Prefill] = []

    @property
    def unfilled(self) -> Collection[Sequence]:
        """See `Filling`."""
        return self._num_read.keys()

    @property
    def num_unread_tokens(self) -> int:
        """See `Filling`."""
        return sum(sequence.num_source_tokens - num_read for sequence, num_read in self._num_read.items())

    def forget(self, sequence: Sequence) -> None:
        """See `Filling`."""
        self._num_read.pop(sequence, None)

    def fill(self, admitted: Ordered[Sequence], next_in_line: Callable[[int], list[Sequence]]) -> list[Sequence]:
        """See `Filling`."""
        started = self._clock()
        for sequence in admitted:
            self._num_read[sequence] = 0
            self._read(sequence, 0)
        filled = [sequence for sequence in admitted if sequence in self._num_read and not sequence.num_source_tokens]
        num_rows = num_tokens = 0
        for sequence in [sequence for sequence in self._num_read if sequence.num_source_tokens]:
            num_left = sequence.num_source_tokens - self._num_read[sequence]
            size = min(num_left, self._limits.prefill_tokens_per_step - num_tokens)
            if not size:
                break
            if self._read(sequence, size):
                num_rows, num_tokens = num_rows + 1, num_tokens + size
                if size == num_left:
                    filled.append(sequence)
        for sequence in filled:
            del self._num_read[sequence]
        if num_tokens:
            self._observe(num_tokens, self._clock() - started)
        self.done.append(Prefill(num_rows, num_tokens, self._clock() - started, len(admitted)))
        return filled

    def _read(self, sequence: Sequence, size: int) -> bool:
        """Read so many tokens more of a prompt into the sequence's row; return whether that has succeeded."""
        started, first = self._clock(), self._num_read[sequence]
        try:
            self._reader().read(sequence.rows[0], sequence.request.source_ids, first, first + size)
        except MemoryError:
            log.warning("no memory for a source", num_tokens=sequence.num_source_tokens)
            self._refuse(sequence)
            return False
        except Exception:
            self._fail([sequence], "prefill failed")
            return False
        self._num_read[sequence] = first + size
        sequence.prefill_seconds += self._clock() - started
        return True
