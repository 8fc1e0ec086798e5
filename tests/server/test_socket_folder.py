"""The folder of an engine's socket: only the server's user reaches it, whatever rights new files usually get."""

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dragoman.server.engine.link import ZmqLink
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.workers import supervisor
from dragoman.server.workers.supervisor import EngineCannotStart, RestartPolicy, SupervisedEngine

# What another user of the machine would try: to reach the socket, to see what there is, to put his own in its place.
INTRUDER = """
for attempt in 'test -e "$1"' 'test -w "$1"' 'ls "$2"' 'rm -f "$1"' 'touch "$2/engine2"' 'mv "$2" "$2.old"' 'chmod 777 "$2"'
do
  if eval "$attempt" >/dev/null 2>&1; then echo "$attempt"; fi
done
echo tried
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the folder of temporary files, in which everybody may write as in /tmp, also what is new."""
    before = os.umask(0)
    with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder
    os.umask(before)


async def test_socket_cannot_be_reached_replaced_or_seen_by_others(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class AttackedLink(ZmqLink):
        def __init__(self, endpoint: str) -> None:
            super().__init__(endpoint)
            self.path = Path(endpoint.removeprefix("ipc://"))
            place = self.path.parent.stat()
            assert (stat.S_IMODE(place.st_mode), place.st_uid) == (0o700, os.getuid())
            assert str(self.path).startswith(f"{folder}/dragoman-")

        def close(self) -> None:
            super().close()
            if os.getuid() == 0:
                command = ["/bin/sh", "-c", INTRUDER, "sh", str(self.path), str(self.path.parent)]
                user = {"user": 65534, "group": 65534, "extra_groups": []}
                seen.append(subprocess.run(command, **user, cwd="/", capture_output=True, text=True, timeout=60).stdout.strip())

    monkeypatch.setattr(supervisor, "ZmqLink", AttackedLink)
    settings = EngineSettings("", "/nowhere", 1, 1, 1, 1, 1, False, "critical", "json")
    nothing = {"on_statistics": lambda _: None, "on_change": lambda: None, "on_restart": lambda: None}
    with pytest.raises(EngineCannotStart, match="/nowhere"):
        await SupervisedEngine("x", settings, RestartPolicy(), is_inline=True, **nothing).start()
    assert os.listdir(folder) == [] and (os.getuid() or set(seen) == {"tried"})
