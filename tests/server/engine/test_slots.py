"""Rows: contiguous after `compact`, never shared, never leaked."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dragoman.server.engine.sequence import Sequence
from dragoman.server.engine.slots import Inheritance, Slots
from tests.server.engine.sequences import sequence as new_sequence


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
            new = new_sequence(number)
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


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**32)), max_size=40)
)
def test_hypotheses_inherit_what_their_parents_left(widths: list[int], steps: list[tuple[int, int]]) -> None:
    """A row's content is a history; each search copies what it is told to, in any order, and must find its parents' in its rows."""
    slots = Slots(sum(widths))
    sequences = [new_sequence(i) for i in range(len(widths))]
    content: dict[int, str] = {slots.take(sequence): f"{i}" for i, sequence in enumerate(sequences)}
    for number, (pick, seed) in enumerate(steps):
        sequence, random = sequences[pick % len(widths)], Random(seed)
        if not sequence.rows:
            content[slots.take(sequence)] = f"{pick % len(widths)}"
        before, old_rows = [content[row] for row in sequence.rows], list(sequence.rows)
        parents = random.choices(range(len(before)), k=random.randint(0, widths[pick % len(widths)]))
        copies = slots.inherit(sequence, parents)
        sources, targets = {copy.source for copy in copies}, [copy.target for copy in copies]
        assert len(set(targets)) == len(targets) and not sources & set(targets), "copies may be made in any order"
        for copy in copies:
            assert content[copy.source] == before[copy.parent] and copy.source in old_rows
            assert (copy.target in old_rows) == (copy.predecessor is not None)
            assert copy.predecessor is None or (old_rows[copy.predecessor] == copy.target and copy.predecessor not in parents)
        random.shuffle(copies)
        for copy in copies:
            content[copy.target] = content[copy.source]
        assert len(copies) == len(parents) - len(set(parents)), "one child of each parent needs no copy"
        assert [content[row] for row in sequence.rows] == [before[parent] for parent in parents]
        for child, row in enumerate(sequence.rows):
            content[row] += f" {number}.{child}"
        rows = [row for s in sequences for row in s.rows]
        assert len(set(rows)) == len(rows) and all(slots.owner(row) is s for s in sequences for row in s.rows)
        assert set(slots._holes) == set(range(slots.num_rows)) - set(rows), "what nobody owns is free"
        if random.random() < 0.3:
            for move in slots.compact():
                content[move.target] = content[move.source]
            assert slots.num_rows == len(rows)


def test_twins_prefer_the_row_of_one_that_died() -> None:
    slots, sequence = Slots(4), new_sequence(0)
    for _ in range(3):
        slots.take(sequence)
    assert slots.inherit(sequence, [1, 1, 2, 1]) == [Inheritance(1, 0, 1, 0), Inheritance(1, 3, 1, None)]
    assert sequence.rows == [1, 0, 2, 3]
    assert slots.inherit(sequence, [3, 0]) == [] and sequence.rows == [3, 1]
    assert [move for move in slots.compact()] == [(3, 0)] and sequence.rows == [0, 1]
