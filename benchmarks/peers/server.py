"""A real server built around CTranslate2, on a free port of this machine, with settings that a search varies."""

import os
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness.load import PEER_HTTP, TRITON, CallError, Load, send

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0
# Workers of PyTriton may connect to its parent before it listens, which ends the server.
START_ATTEMPTS = 3
STOP_SECONDS = 15.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Kind:
    """A peer and the way to reach it."""

    name: str  # name of its environment and, with `_server`, of its module
    protocol: str  # protocol of `load`
    path: str  # path of its HTTP address
    packages: tuple[str, ...]  # distributions whose versions matter

    def python(self, environments: Path) -> Path:
        """Return the interpreter of its environment, which may be absent."""
        return environments.absolute() / self.name / "bin" / "python"

    def versions(self, environments: Path) -> dict[str, str]:
        """Return the versions of the packages in its environment."""
        code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
        command = [str(self.python(environments)), "-c", code, *self.packages]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
        return dict(zip(self.packages, found, strict=True))


KINDS = (
    Kind("triton", TRITON, "", ("nvidia-pytriton", "ctranslate2")),
    Kind("mosec", PEER_HTTP, "/inference", ("mosec", "ctranslate2")),
    Kind("litserve", PEER_HTTP, "/predict", ("litserve", "ctranslate2")),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a peer that are tuned."""

    num_instances: int  # batches that the server has computed at the same time
    num_parts: int  # parts into which CTranslate2 divides each, after sorting by length
    num_threads: int  # threads of each part
    max_batch_size: int  # requests of a batch
    delay_ms: int  # time that a partial batch waits for more requests

    @property
    def flags(self) -> list[str]:
        """Its flags, as `translator.parse_arguments` reads them."""
        values = {
            "instances": self.num_instances,
            "parts": self.num_parts,
            "threads": self.num_threads,
            "max-batch-size": self.max_batch_size,
            "delay-ms": self.delay_ms,
        }
        return [f"--{name}={value}" for name, value in values.items()]

    def __str__(self) -> str:
        workers = self.num_instances * self.num_parts
        how = f"{self.num_instances} batches at a time" if self.num_parts == 1 else f"batches divided by {self.num_parts}"
        layout = f"{workers} × {self.num_threads} threads" + (f" ({how})" if workers > 1 else "")
        return f"{layout}, max batch {self.max_batch_size}, delay {self.delay_ms} ms"


class PeerServer:
    """The server's processes, started on entering and stopped on leaving.

    Attributes:
        address: Address of its port.
    """

    def __init__(self, kind: Kind, environments: Path, model: Path, precision: str, settings: Settings, sample: str) -> None:
        """Describe the server.

        Args:
            kind: Kind of peer.
            environments: Folder made by `setup.sh`.
            model: Folder with CTranslate2's files and the tokeniser.
            precision: `fp32` or `int8`.
            settings: Its settings.
            sample: Text whose translation shows that it has started.
        """
        self._kind, self._sample = kind, sample
        port = _free_port()
        self._command = [str(kind.python(environments)), "-m", f"benchmarks.peers.{kind.name}_server"]
        self._command += [f"--model={model.resolve()}", f"--precision={precision}", f"--port={port}", *settings.flags]
        self.address = f"http://127.0.0.1:{port}{kind.path}" if kind.protocol == PEER_HTTP else f"127.0.0.1:{port}"

    def __enter__(self) -> Self:
        for _ in range(START_ATTEMPTS - 1):
            with suppress(RuntimeError):
                return self._start()
        return self._start()

    def _start(self) -> Self:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_stop`
        # A session of its own: what it starts itself can be ended with it. Nothing of our environment is on its path.
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        has_ended = self._process.poll() is not None
        said = self._said()
        self._stop()
        if has_ended and kind is None:
            raise RuntimeError(f"{self._kind.name} ended by itself:\n{said}")

    def _wait(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: If it ends, or does not answer in time, with the end of its log.
        """
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            with suppress(CallError, TimeoutError):
                send(self._kind.protocol, self.address, Load([self._sample])).check()
                return
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"{self._kind.name} did not start:\n{self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def _stop(self) -> None:
        """End all its processes, and wait for their end."""
        _send(self._process.pid, signal.SIGTERM)
        until = time.monotonic() + STOP_SECONDS
        while time.monotonic() < until and _send(self._process.pid, 0):
            self._process.poll()  # one that has ended and was not waited for still counts
            time.sleep(POLL_SECONDS)
        _send(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


def _send(group: int, number: int) -> bool:
    """Signal a group of processes; return whether any process remains."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
