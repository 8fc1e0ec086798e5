"""How a server uses a machine's cores: what of it a benchmark tries, and what it is called."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """Dragoman's processes and what each may hold.

    Attributes:
        replicas: Engines of the model.
        threads: Of each.
        slots: Of each.
        front_ends: Processes that speak gRPC.
    """

    replicas: int
    threads: int
    slots: int
    front_ends: int = 1

    @property
    def total_slots(self) -> int:
        """Slots of all replicas."""
        return self.replicas * self.slots

    def flags(self, source: Path = ROOT) -> list[str]:
        """Return what to give `dragoman serve` of a checkout."""
        flags = [f"--num-threads={self.threads}", f"--max-slots={self.slots}"]
        for name, count in (("replicas", self.replicas), ("front_ends", self.front_ends)):
            if has_setting(name, source):
                flags.append(f"--{name.replace('_', '-')}={count}")
        return flags

    def __str__(self) -> str:
        fronts = f", {self.front_ends} front ends" if self.front_ends > 1 else ""
        return f"{self.replicas} × {self.threads}, {self.slots} slots{fronts}"


def settings(
    num_threads: int, slots: Sequence[int], replicas: Sequence[int] | None = None, front_ends: Sequence[int] = (1,)
) -> list[Setting]:
    """Return every setting to try on a server: replicas share the threads out; by default one replica, and one for each thread.

    Raises:
        ValueError: If there are more replicas than threads.
    """
    chosen = replicas or (sorted({1, num_threads}) if has_setting("replicas") else [1])
    if max(chosen) > num_threads:
        raise ValueError(f"{max(chosen)} replicas need as many threads; there are {num_threads}")
    return [Setting(n, num_threads // n, most, fronts) for n in chosen for most in slots for fronts in front_ends]


def has_setting(name: str, source: Path = ROOT) -> bool:
    """Whether the server of a checkout has a setting of that name."""
    return re.search(rf"^    {name}: ", (source / "server/config.py").read_text(encoding="utf-8"), re.MULTILINE) is not None
