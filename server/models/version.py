"""One version of a model, from when it is found to when it is gone: what is known of it, and in which part of its life it is."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic

from dragoman.export.bundle import Bundle
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.loaded import E, LoadedModel
from dragoman.server.service.languages import Frames


class State(StrEnum):
    """Part of a version's life; requests get it in `TRIAL` and `SERVING`, and wake it when it is `ASLEEP`."""

    OPENING = "opening"
    STARTING = "starting"
    PROVING = "proving"
    TRIAL = "trial"
    SERVING = "serving"
    STANDBY = "standby"
    ASLEEP = "asleep"
    RETIRING = "retiring"
    REFUSED = "refused"


class Cause(StrEnum):
    """Why a version is refused, in one word, for metrics; the line that says it exactly is for people."""

    BUNDLE = "bundle"
    SIGNATURE = "signature"
    SETTINGS = "settings"
    MEMORY = "memory"
    START = "start"
    PROOF = "proof"
    FRONT_END = "front_end"
    DEATH = "death"
    ERRORS = "errors"
    LATENCY = "latency"


class Refused(Exception):
    """A version that does not get so far as to serve; the message is one line."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


@dataclass(frozen=True, slots=True)
class Opened:
    """What is read of a version by whoever answers requests for it."""

    bundle: Bundle
    tokenizers: Tokenizers
    frames: Frames


@dataclass(slots=True, eq=False)
class Version(Generic[E]):
    """See above.

    Attributes:
        model: Name of its model.
        found: Where it lies.
        state: Part of its life.
        since: When that began, seconds since 1970.
        cause: Why it is refused.
        reason: The same in one line.
        content: Its version by its content; empty while it has not been opened.
        opened: From when it is until it has ended.
        loaded: While it has an engine.
        replicas: Numbers by which metrics know its engines.
        sleeping: What stands for it while it is asleep.
        was_proved: Whether it has served for good, or been up before it fell asleep.
        reserved_bytes: What its engines may come to take.
        has_died: Whether an engine of it has ended by itself since it was started, and before it was known to be good.
    """

    model: str
    found: FoundVersion
    state: State = State.OPENING
    since: float = field(default_factory=time.time)
    cause: Cause | None = None
    reason: str = ""
    content: str = ""
    opened: Opened | None = None
    loaded: LoadedModel[E] | None = None
    replicas: range = range(0)
    sleeping: LoadedModel[E] | None = None
    was_proved: bool = False
    reserved_bytes: int = 0
    has_died: bool = False

    @property
    def label(self) -> str:
        """What its folder calls it, or where folders have no names for versions, what its content gives once that is known."""
        return self.found.name or self.content

    @property
    def is_up(self) -> bool:
        """Whether it can answer requests at once, whether or not any gets it."""
        return self.state in (State.TRIAL, State.SERVING, State.STANDBY)

    @property
    def answering(self) -> LoadedModel[E] | None:
        """What requests get of it."""
        return self.sleeping if self.state is State.ASLEEP else self.loaded

    @property
    def has_been_proved(self) -> bool:
        """Whether what its engine does is done for requests."""
        return self.state not in (State.OPENING, State.STARTING, State.PROVING)

    def open(self, opened: Opened) -> None:
        """Take note of what was read of it."""
        self.opened, self.content = opened, opened.bundle.manifest.version

    def let_go(self) -> None:
        """Let go of what was read of it: it has ended, and may stay known for long."""
        self.opened = self.sleeping = None

    def note_death(self) -> None:
        """Take note that an engine of it has ended by itself; of one that serves for good, or has done so, that says nothing."""
        if self.state in (State.PROVING, State.STANDBY, State.TRIAL) and not self.was_proved:
            self.has_died = True

    def enter(self, state: State) -> None:
        """Begin another part of its life."""
        if state is not self.state:
            self.state, self.since = state, time.time()
            self.was_proved = self.was_proved or state is State.SERVING

    def refuse(self, refused: Refused) -> None:
        """End its life before it has served, or while it was tried."""
        self.cause, self.reason = refused.cause, refused.reason
        self.enter(State.REFUSED)
