"""Admission to a full fair queue: queue position estimates, eviction, callers' limits.

Only `evicted` iterates over all waiting callers; the others look at `MAX_CALLERS` at most.
"""

from itertools import islice

from dragoman.server.dispatch.fair_queue import PARTS_PER_TOKEN, PARTS_PER_WEIGHT, TOKENS_PER_PRIORITY, CallerQueue, FairQueue, T
from dragoman.server.engine.messages import Share

MAX_CALLERS = 64


def num_own_ahead(own: CallerQueue[T], at: float, priority: int) -> tuple[int, int]:
    """Return the slots and tokens of the caller's own items ahead of a new one."""
    if not len(own) or priority <= own.least_priority:  # all came earlier with no lower priority
        return own.num_waiting_slots, own.num_tokens
    ahead = [place for place in own.places() if place.at <= at]
    return sum(place.num_slots for place in ahead), sum(place.size for place in ahead)


def num_slots_ahead(queue: FairQueue[T], share: Share, at: float, priority: int) -> int:
    """Return a lower bound of the slots of the items that will be taken before a new one.

    Counts the caller's earlier items, and what other callers are due meanwhile, estimated from the sizes of waiting items; callers
    with a limit of slots may get less than they are due, and are not counted.
    """
    own = queue.of(share.caller)
    num_slots, num_tokens = (0, 0) if own is None else num_own_ahead(own, at, priority)
    if len(queue.waiting) <= (own is not None and len(own) > 0):
        return num_slots  # no other caller waits
    own_parts = num_tokens * round(PARTS_PER_TOKEN / share.weight)
    end = queue.served(share.caller) + own_parts - priority * TOKENS_PER_PRIORITY * PARTS_PER_TOKEN
    for other in islice(queue.waiting, MAX_CALLERS):
        if other is not own and not other.share.max_slots:
            due = max(end - queue.turn(other)[0], 0)
            num_due_slots = other.num_waiting_slots * due // max(other.num_tokens * other.parts_per_token, 1)
            num_slots += min(num_due_slots, other.num_waiting_slots)
    return num_slots


def evicted(queue: FairQueue[T], share: Share, size: int, num: int, num_tokens: int) -> list[T]:
    """Return the items to evict from a full queue for a new one of `size` tokens: the last of the caller with most, by weight.

    At least `num` items with `num_tokens` tokens have to go: as few as possible, and none unless their caller has more than the new
    item's caller until the last of them goes.
    """

    def amount(one: CallerQueue[T]) -> int:
        return one.num_tokens if num_tokens > 0 else len(one)

    own = queue.of(share.caller)
    part_with_it = ((amount(own) if own is not None else 0) + (size if num_tokens > 0 else 1)) / share.weight
    most = max((one for one in queue.waiting if len(one) > 1), key=lambda one: amount(one) / one.share.weight, default=None)
    if most is None or most is own:
        return []
    places = most.last(num, num_tokens)
    tokens = sum(place.size for place in places)
    left = most.num_tokens - tokens + places[-1].size if num_tokens > 0 else len(most) - len(places) + 1
    is_enough = len(places) >= num and tokens >= num_tokens
    is_fair = left / most.share.weight > part_with_it and len(places) < len(most)
    return [place.item for place in places] if is_enough and is_fair else []


def without_claim(queue: FairQueue[T]) -> list[Share] | None:
    """Return the shares of waiting callers that could evict nothing from a full queue; None if too many wait."""
    if len(queue.waiting) > MAX_CALLERS:
        return None
    most = max((len(one) / one.share.weight for one in queue.waiting if len(one) > 1), default=0.0)
    return [one.share for one in queue.waiting if (len(one) + 1) / one.share.weight >= most]


def is_at_limit(queue: FairQueue[T], share: Share, num_free: int) -> bool:
    """Return whether a caller has reached its `max_waiting`, not counting items that free slots will take."""
    own = queue.of(share.caller)
    if own is None or not share.max_waiting:
        return False
    num_open = max(min(num_free, share.max_slots - own.num_slots), 0) if share.max_slots else num_free
    return len(own) >= share.max_waiting + num_open


def at_their_limit(queue: FairQueue[T], num_free: int) -> list[Share]:
    """Return the shares of callers that have reached their `max_waiting`, among the first `MAX_CALLERS` waiting."""
    shares = (one.share for one in islice(queue.waiting, MAX_CALLERS))
    return [share for share in shares if share.max_waiting and is_at_limit(queue, share, num_free)]


def part_of(queue: FairQueue[T], share: Share) -> float:
    """Return a caller's part of the service, given the callers that wait now."""
    own = queue.of(share.caller)
    if own is not None and len(own):
        return own.parts_of_weight / queue.parts_of_weight
    parts = round(PARTS_PER_WEIGHT * share.weight)
    return parts / (queue.parts_of_weight + parts)
