"""Started by `main` in the bed: runs a script and writes what was seen. A script that fails leaves a report, too."""

import argparse
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu_stub.main import write_report
from benchmarks.gpu_stub.sessions import Opened, Sessions
from benchmarks.gpu_stub.watch import Watch


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path)
    parser.add_argument("script", nargs="+")
    given = parser.parse_args()
    watch, sessions = Watch(), Sessions()
    try:
        _run(given.script)
    finally:
        write_report(report(watch, sessions), given.report)


def report(watch: Watch, sessions: Sessions) -> dict[str, Any]:
    """Return all that was seen, as JSON can have it; ends the sessions' profiles."""
    return {"sessions": [described(opened) for opened in sessions.finish()], **watch.read().as_dict()}


def described(opened: Opened) -> dict[str, Any]:
    """Return a session as JSON can have it."""
    return asdict(opened) | {"num_copies": opened.num_copies}


def _run(script: list[str]) -> None:
    if script[0] == "-m":
        sys.argv = script[1:]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = script
        sys.path.insert(0, str(Path(script[0]).resolve().parent))
        runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    main()
