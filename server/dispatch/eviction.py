"""How crowded a queue is for one caller: who is before it, who has to leave for it, and what part of the service is its own.

Only where somebody may have to leave are all callers who wait looked at; else never more than `MAX_LINES`.
"""

from itertools import islice

from dragoman.server.dispatch.caller_queue import PARTS_PER_TOKEN, PARTS_PER_WEIGHT, TOKENS_PER_PRIORITY, Line, T
from dragoman.server.dispatch.fair_queue import FairQueue
from dragoman.server.engine.messages import Share

MAX_LINES = 64


def num_own_ahead(line: Line[T], at: float, priority: int) -> tuple[int, int]:
    """Return the slots and the tokens of what is before a new item in its caller's own line.

    Args:
        line: The caller's.
        at: Place of the item.
        priority: Of the item.
    """
    if not len(line) or priority <= line.least_priority:  # all of them came earlier and have no less priority
        return line.num_waiting_slots, line.num_tokens
    ahead = [place for place in line.places() if place.at <= at]
    return sum(place.num_slots for place in ahead), sum(place.size for place in ahead)


def num_slots_ahead(queue: FairQueue[T], share: Share, at: float, priority: int) -> int:
    """Return the slots of what will be taken before a new item, at the least.

    That is what is before it in its caller's line, and what others are due until those have been served. How much of theirs that is
    follows from the sizes of what waits; what has a limit of slots may get less than it is due, and is not counted.
    """
    line = queue.line(share.caller)
    num_slots, num_tokens = (0, 0) if line is None else num_own_ahead(line, at, priority)
    if len(queue.crowd) <= (line is not None and len(line) > 0):
        return num_slots  # nobody else waits
    own_parts = num_tokens * round(PARTS_PER_TOKEN / share.weight)
    end = queue.served(share.caller) + own_parts - priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN
    for other in islice(queue.crowd, MAX_LINES):
        if other is not line and not other.share.max_slots:
            due = max(end - queue.turn(other)[0], 0)
            num_due_slots = other.num_waiting_slots * due // max(other.num_tokens * other.parts_per_token, 1)
            num_slots += min(num_due_slots, other.num_waiting_slots)
    return num_slots


def evicted(queue: FairQueue[T], share: Share, size: int, num: int, num_tokens: int) -> list[T]:
    """Return what a new item may push out of a full queue: the last items of the caller who has most, by weight.

    The longest queue is cut, as in Suter et al., "Buffer Management Schemes for Supporting TCP in Gigabit Routers with Per-Flow
    Queueing", 1999. Nobody loses the only item that waits.

    Args:
        queue: Which is full.
        share: The new item's.
        size: Its tokens.
        num: Items that have to leave for it.
        num_tokens: Tokens that have to leave for it.

    Returns:
        As few as are needed; none where that caller does not have more than the new item's, up to the last item that has to go.
    """

    def amount(line: Line[T]) -> int:
        return line.num_tokens if num_tokens > 0 else len(line)

    own = queue.line(share.caller)
    part_with_it = ((amount(own) if own is not None else 0) + (size if num_tokens > 0 else 1)) / share.weight
    most = max((line for line in queue.crowd if len(line) > 1), key=lambda line: amount(line) / line.share.weight, default=None)
    if most is None or most is own:
        return []
    places = most.last(num, num_tokens)
    tokens = sum(place.size for place in places)
    left = most.num_tokens - tokens + places[-1].size if num_tokens > 0 else len(most) - len(places) + 1
    is_enough = len(places) >= num and tokens >= num_tokens
    is_fair = left / most.share.weight > part_with_it and len(places) < len(most)
    return [place.item for place in places] if is_enough and is_fair else []


def without_claim(queue: FairQueue[T]) -> list[Share] | None:
    """Return the shares of those who wait and could push nobody out if the queue had no place; None if too many wait to tell."""
    if not queue.crowd:
        return []
    if len(queue.crowd) > MAX_LINES:
        return None
    most = max((len(line) / line.share.weight for line in queue.crowd if len(line) > 1), default=0.0)
    return [line.share for line in queue.crowd if (len(line) + 1) / line.share.weight >= most]


def is_at_limit(queue: FairQueue[T], share: Share, num_free: int) -> bool:
    """Return whether as many items of a caller wait as its limit allows, beyond those that its part of the free slots will take."""
    line = queue.line(share.caller)
    if line is None or not share.max_waiting:
        return False
    num_open = max(min(num_free, share.max_slots - line.num_slots), 0) if share.max_slots else num_free
    return len(line) >= share.max_waiting + num_open


def at_their_limit(queue: FairQueue[T], num_free: int) -> list[Share]:
    """Return the shares of those who are at their limit, of the first `MAX_LINES` who wait."""
    if not queue.crowd:
        return []
    shares = (line.share for line in islice(queue.crowd, MAX_LINES))
    return [share for share in shares if share.max_waiting and is_at_limit(queue, share, num_free)]


def part_of(queue: FairQueue[T], share: Share) -> float:
    """Return the part of the service that is a caller's while all wait who do now."""
    line = queue.line(share.caller)
    if line is not None and len(line):
        return line.parts_of_weight / queue.parts_of_weight
    parts = round(PARTS_PER_WEIGHT * share.weight)
    return parts / (queue.parts_of_weight + parts)
