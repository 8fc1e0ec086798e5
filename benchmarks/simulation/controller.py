"""Kubernetes' HorizontalPodAutoscaler, as its documentation and its controller define it (autoscaling/v2).

One `sync` is one round of the controller: how many pods each metric asks for, the most of them, then stabilisation and policies.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SYNC_SECONDS = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Policy:
    """How fast pods may come or go: by a number or by a share of them within a period."""

    is_percent: bool
    value: float
    period_seconds: float


@dataclass(frozen=True, slots=True)
class Direction:
    """The rules of one direction.

    Attributes:
        window_seconds: How long earlier recommendations hold back.
        policies: Of them the one that allows most counts.
    """

    window_seconds: float
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a number of pods may change.

    Attributes:
        least: Pods at the least.
        most: Pods at the most.
        up: Rules of growth.
        down: Rules of shrinking.
    """

    least: int
    most: int
    up: Direction
    down: Direction


def read_behaviour(scaling: Mapping[str, Any]) -> Behaviour:
    """Read the chart's values under `autoscaling`."""

    def direction(name: str) -> Direction:
        rules = scaling["behavior"][name]
        if rules["selectPolicy"] != "Max":
            raise ValueError(f"{name}.selectPolicy: {rules['selectPolicy']} is not simulated")
        policies = tuple(Policy(p["type"] == "Percent", p["value"], p["periodSeconds"]) for p in rules["policies"])
        return Direction(rules["stabilizationWindowSeconds"], policies)

    return Behaviour(scaling["minReplicas"], scaling["maxReplicas"], direction("scaleUp"), direction("scaleDown"))


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric in one round.

    Attributes:
        target: Average over the pods that is aimed at.
        values: Of the pods that have one which counts.
        num_missing: Pods without: too new, or not ready.
    """

    target: float
    values: Sequence[float]
    num_missing: int

    def wanted(self, num_pods: int) -> int | None:
        """Return how many pods it asks for; None if there is no value at all.

        Pods without a value count as using nothing where more are asked for, and as being on target where fewer are.
        """
        if not self.values:
            return None
        total, num = sum(self.values), len(self.values)
        ratio = total / num / self.target
        if not self.num_missing:
            return num_pods if abs(ratio - 1) <= TOLERANCE else _ceil(ratio * num)
        count = num + self.num_missing
        careful = (total + (self.target * self.num_missing if ratio < 1 else 0.0)) / count / self.target
        if abs(careful - 1) <= TOLERANCE or (ratio < 1) != (careful < 1):
            return num_pods
        wanted = _ceil(careful * count)
        return min(wanted, num_pods) if careful < 1 else max(wanted, num_pods)


@dataclass(slots=True)
class Controller:
    """The controller of one deployment.

    Attributes:
        behaviour: Its rules.
        num_pods: Pods there should be.
    """

    behaviour: Behaviour
    num_pods: int
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def sync(self, now: float, metrics: Sequence[Metric]) -> int:
        """Do one round; return how many pods there should be from now on."""
        wanted = [number for metric in metrics if (number := metric.wanted(self.num_pods)) is not None]
        if not wanted:
            return self.num_pods
        number = self._stabilise(now, max(wanted))
        number = min(max(self._limit(now, number), self.behaviour.least), self.behaviour.most)
        if number != self.num_pods:
            self._changes.append((now, number - self.num_pods))
            self.num_pods = number
        return number

    def _stabilise(self, now: float, wanted: int) -> int:
        """Hold back: no fewer than the most, and no more than the fewest, that was wanted within each direction's window."""
        up, down = self.behaviour.up.window_seconds, self.behaviour.down.window_seconds
        self._recommended = [(at, number) for at, number in self._recommended if at > now - max(up, down)]
        self._recommended.append((now, wanted))
        least = min(number for at, number in self._recommended if at > now - up or at == now)
        most = max(number for at, number in self._recommended if at > now - down or at == now)
        return max(least, self.num_pods) if self.num_pods < least else min(self.num_pods, most)

    def _limit(self, now: float, number: int) -> int:
        """Keep to the policies of the direction."""
        if number > self.num_pods:
            return min(number, max(self._highest(now, policy) for policy in self.behaviour.up.policies))
        if number < self.num_pods:
            return max(number, min(self._lowest(now, policy) for policy in self.behaviour.down.policies))
        return number

    def _highest(self, now: float, policy: Policy) -> int:
        start = self._pods_at_start(now, policy)
        return _ceil(start * (1 + policy.value / 100)) if policy.is_percent else int(start + policy.value)

    def _lowest(self, now: float, policy: Policy) -> int:
        start = self._pods_at_start(now, policy)
        return int(start * (1 - policy.value / 100)) if policy.is_percent else int(start - policy.value)

    def _pods_at_start(self, now: float, policy: Policy) -> int:
        """Return how many pods there were when the policy's period began."""
        return self.num_pods - sum(change for at, change in self._changes if at > now - policy.period_seconds)


def _ceil(value: float) -> int:
    return math.ceil(round(value, 9))
