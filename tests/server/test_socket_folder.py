"""The folder of an engine's socket: only the server's user reaches it, whatever rights new files usually get."""

import asyncio
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from dragoman.server import supervisor
from dragoman.server.engine.link import ZmqLink
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.supervisor import EngineCannotStart, RestartPolicy, SupervisedEngine

OTHER_USER = 65534
# What another user of the machine would try: to reach the socket, to see what there is, to put his own in its place.
INTRUDER = """
for attempt in 'test -e "$1"' 'test -w "$1"' 'ls "$2"' 'rm -f "$1"' 'touch "$2/engine2"' 'mv "$2" "$2.old"' 'chmod 777 "$2"'
do
  if eval "$attempt" >/dev/null 2>&1; then echo "$attempt"; fi
done
echo tried
"""


async def start_without_a_bundle(seen: list[str]) -> None:
    """Start an engine as the server does, and have the intruder try when it listens."""

    class AttackedLink(ZmqLink):
        def __init__(self, endpoint: str) -> None:
            super().__init__(endpoint)
            self.path = Path(endpoint.removeprefix("ipc://"))
            folder = self.path.parent.stat()
            assert (stat.S_IMODE(folder.st_mode), folder.st_uid) == (0o700, os.getuid())
            seen.append(str(self.path))

        def close(self) -> None:
            super().close()
            if os.getuid() == 0:
                user = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []}
                command = ["/bin/sh", "-c", INTRUDER, "sh", str(self.path), str(self.path.parent)]
                seen.append(subprocess.run(command, **user, cwd="/", capture_output=True, text=True, timeout=60).stdout.strip())

    settings = EngineSettings("", "/nowhere", 1, 1, 1, 1, 1, False, "critical", "json")
    nothing = {"on_statistics": lambda _: None, "on_change": lambda: None, "on_restart": lambda: None}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(supervisor, "ZmqLink", AttackedLink)
        with pytest.raises(EngineCannotStart, match="/nowhere"):
            await SupervisedEngine("x", settings, RestartPolicy(), is_inline=True, **nothing).start()


def test_socket_cannot_be_reached_replaced_or_seen_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    before = os.umask(0)  # new files may be used by everybody
    try:
        with tempfile.TemporaryDirectory(prefix="d", dir="/tmp") as folder:
            os.chmod(folder, 0o1777)  # as /tmp is
            monkeypatch.setattr(tempfile, "tempdir", folder)
            asyncio.run(start_without_a_bundle(seen))
            assert seen[0].startswith(f"{folder}/dragoman-")
            assert os.listdir(folder) == [], "and nothing is left of it"
    finally:
        os.umask(before)
    assert os.getuid() or set(seen[1:]) == {"tried"}
