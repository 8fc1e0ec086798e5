"""One version of a model: its state, and the reason of a refusal."""

import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from dragoman.export.bundle import Bundle
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.service.languages import PromptTemplates

# Folder of a stand-in, which has no files.
NOWHERE = FoundVersion("", Path(), (0, 0, 0))


class State(StrEnum):
    """State of a version; requests use a version in `TRIAL` and `SERVING`, and trigger its load in `ASLEEP`."""

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
    """Cause of a refusal, a label in metrics."""

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
    """A version cannot serve; the message is one line."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause, self.reason = cause, reason


@dataclass(frozen=True, slots=True)
class Opened:
    """Contents of a version that frontends need."""

    bundle: Bundle
    tokenizers: Tokenizers
    templates: PromptTemplates


@dataclass(slots=True, eq=False)
class Version:
    """A version of a model, or a stand-in: an engine that never starts, and rejects requests or makes them wait."""

    model: str
    found: FoundVersion  # its folder; `NOWHERE` for a stand-in
    state: State = State.OPENING
    since: float = field(default_factory=time.time)  # start of the present state, in seconds since 1970
    cause: Cause | None = None
    reason: str = ""  # of the refusal, in one line
    content: str = ""  # content hash; empty until the version has been opened
    opened: Opened | None = None  # its contents, until it has ended
    loaded: LoadedModel | None = None
    replicas: range = range(0)  # numbers of its engines in metrics
    sleeping: LoadedModel | None = None  # stand-in while it is asleep
    was_proved: bool = False  # whether it has passed into `SERVING`, or was unloaded when idle
    reserved_bytes: int = 0  # memory that its engines may come to take
    has_died: bool = False  # whether an engine has exited unexpectedly before the version was proved
    is_draining: bool = False  # whether it ends as soon as no request holds it

    @property
    def is_stand_in(self) -> bool:
        """Whether the version has no files."""
        return self.found is NOWHERE

    @property
    def label(self) -> str:
        """Name of the version's folder, or the content hash where the folder has no name."""
        return self.found.name or self.content

    @property
    def is_up(self) -> bool:
        """Whether the version can answer requests at once."""
        return self.state in (State.TRIAL, State.SERVING, State.STANDBY)

    @property
    def answering(self) -> LoadedModel | None:
        """Target of the version's requests."""
        return self.sleeping if self.state is State.ASLEEP else self.loaded

    @property
    def is_self_tested(self) -> bool:
        """Whether the self-test has ended, so that metrics count the engine's work."""
        return self.state not in (State.OPENING, State.STARTING, State.PROVING)

    def open(self, opened: Opened) -> None:
        """Store the opened contents."""
        self.opened, self.content = opened, opened.bundle.manifest.version

    def let_go(self) -> None:
        """Free the contents of an ended version, which may stay known for long."""
        self.opened = self.sleeping = None

    def note_death(self) -> None:
        """Record an unexpected engine exit, unless the version was proved."""
        if self.state in (State.PROVING, State.STANDBY, State.TRIAL) and not self.was_proved:
            self.has_died = True

    def enter(self, state: State) -> None:
        """Change the state."""
        if state is not self.state:
            self.state, self.since = state, time.time()
            self.was_proved = self.was_proved or state is State.SERVING

    def refuse(self, refused: Refused) -> None:
        """Mark the version as refused."""
        self.cause, self.reason = refused.cause, refused.reason
        self.enter(State.REFUSED)
