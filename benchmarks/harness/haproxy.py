"""HAProxy before several servers: gRPC over HTTP/2, balanced call by call, with health checks."""

import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.harness.replica import Replica, free_ports

START_SECONDS = 10.0


def find_haproxy() -> str | None:
    """Return where the program is; Debian keeps it where only root looks."""
    return shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")


def configuration(port: int, status_port: int, replicas: Sequence[Replica]) -> str:
    """Return the configuration: calls that are lost with their server are left to the client's retries.

    A check is of /readyz, which says no from the moment a server begins to drain. A connection that fails is tried with another.
    """
    servers = [
        f"    server replica{i} {replica.address} proto h2 check port {replica.metrics_port} check-proto h1"
        for i, replica in enumerate(replicas, 1)
    ]
    lines = [
        "defaults",
        "    mode http",
        "    timeout connect 1s",
        "    timeout client 10m",
        "    timeout server 10m",
        "    retries 3",
        "    option redispatch 1",
        "    retry-on conn-failure",
        "frontend grpc",
        f"    bind 127.0.0.1:{port} proto h2",
        "    default_backend dragoman",
        "frontend status",
        f"    bind 127.0.0.1:{status_port}",
        "    monitor-uri /alive",
        "backend dragoman",
        "    balance roundrobin",
        "    option httpchk GET /readyz",
        "    default-server inter 200ms fall 1 rise 1",
        *servers,
    ]
    return "\n".join(lines) + "\n"


class HAProxy:
    """The proxy, running from entering to leaving.

    Attributes:
        address: Where clients call.
    """

    def __init__(self, program: str, replicas: Sequence[Replica]) -> None:
        """Describe it; `program` as `find_haproxy` returns it."""
        self._program = program
        port, self._status_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._text = configuration(port, self._status_port, replicas)

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "haproxy.cfg"
        path.write_text(self._text, encoding="utf-8")
        self._log = (Path(self._folder.name) / "log").open("wb+")
        self._process = subprocess.Popen([self._program, "-db", "-f", str(path)], stdout=self._log, stderr=self._log)
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._end()

    def version(self) -> str:
        """Return the program's version."""
        said = subprocess.run([self._program, "-v"], capture_output=True, text=True, check=True).stdout
        return said.split()[2]

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self._status_port}/alive", timeout=1).close()
                return
            except (OSError, urllib.error.URLError):
                time.sleep(0.05)
        self._log.seek(0)
        raise RuntimeError(f"haproxy did not start:\n{self._log.read().decode(errors='replace')[-2000:]}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()
