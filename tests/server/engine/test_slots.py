"""Rows: contiguous after `compact`, never shared, never leaked."""

from hypothesis import given
from hypothesis import strategies as st

from server.engine.messages import Request
from server.engine.sequence import Sequence
from server.engine.slots import Slots


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 100)), max_size=60), st.data())
def test_rows_stay_contiguous_and_content_follows_its_owner(operations: list[tuple[int, int]], data: st.DataObject) -> None:
    slots = Slots(16)
    content: dict[int, int] = {}
    alive: list[Sequence] = []
    for number, (width, pick) in enumerate(operations):
        is_full = sum(len(s.rows) for s in alive) + width > 16
        if alive and (is_full or data.draw(st.booleans())):
            gone = alive.pop(pick % len(alive))
            slots.release(gone)
            assert gone.rows == []
        elif not is_full:
            new = Sequence(b"", Request(number, [1], 1, 0.0))
            for _ in range(width):
                content[slots.take(new)] = number
            alive.append(new)
        if data.draw(st.booleans()):
            for move in slots.compact():
                content[move.target] = content[move.source]
            rows = sorted(row for s in alive for row in s.rows)
            assert rows == list(range(slots.num_rows)), "active rows are a prefix, each owned once"
        for s in alive:
            assert all(content[row] == s.request.id and slots.owner(row) is s for row in s.rows)
