"""What an installation takes: packages, megabytes and seconds of each extra, and the time from `git clone` to the first answer.

    python -m benchmarks.installation [--extras ...] [--revisions REVISION ...] [--quick]

Each extra is installed from this checkout's wheel into a new virtual environment with the versions of constraints.txt; each
revision of the repository is cloned, `make serve` is run in it, and a sentence is asked for until it is answered; then
`make setup`. pip keeps no cache, so everything is fetched from the index that pip is configured with, whose speed is part of the
seconds.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.report import environment, write

ROOT = Path(__file__).parents[1]
EXTRAS = ("", "load", "evaluate", "server", "cpu", "cpu,tracing", "train", "cpu,export")
SENTENCE = "A dog runs through the snow."
MAX_SECONDS = 1800
BYTES_PER_MB = 1_000_000
# Of the environment itself, whatever is installed into it.
NOT_COUNTED = {"pip", "setuptools", "dragoman"}


def size_mb(folder: Path) -> float:
    """Return the size of a folder's files in megabytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) / BYTES_PER_MB


def site_packages(venv: Path) -> Path:
    """Return where a virtual environment's packages lie."""
    (folder,) = venv.glob("lib/python*/site-packages")
    return folder


def packages(venv: Path) -> set[str]:
    """Return the names of what is installed beside pip and ourselves."""
    listed = subprocess.run([venv / "bin/pip", "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    return {line.partition("==")[0].lower() for line in listed.splitlines()} - NOT_COUNTED


def make_environment(folder: Path) -> Path:
    """Make a virtual environment and return its folder."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def without_cache() -> dict[str, str]:
    """Return the environment variables of a machine that has installed nothing yet."""
    return os.environ | {"PIP_NO_CACHE_DIR": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def install(wheel: Path, extra: str, folder: Path) -> dict[str, Any]:
    """Install the wheel with some extras into a new environment and return the row."""
    venv = make_environment(folder)
    empty = size_mb(site_packages(venv))
    wanted = f"dragoman[{extra}] @ {wheel.as_uri()}" if extra else f"dragoman @ {wheel.as_uri()}"
    command = [str(venv / "bin/pip"), "install", "--quiet", "--constraint", str(ROOT / "constraints.txt"), wanted]
    start = time.monotonic()
    subprocess.run(command, check=True, env=without_cache(), stderr=subprocess.DEVNULL)
    seconds = time.monotonic() - start
    subprocess.run([venv / "bin/dragoman", "--version"], check=True, capture_output=True)
    return {
        "what": f"pip install 'dragoman[{extra}]'" if extra else "pip install dragoman",
        "packages": len(packages(venv)),
        "MB": round(size_mb(site_packages(venv)) - empty),
        "seconds": round(seconds),
    }


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def first_answer(revision: str, folder: Path) -> list[dict[str, Any]]:
    """Clone a revision, serve, ask until there is an answer, then install what tests need; return a row for each."""
    start = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    subprocess.run(["git", "checkout", "--quiet", revision], cwd=folder, check=True)
    port = free_port()
    command = ["make", "serve", f"PORT={port}", f"METRICS_PORT={free_port()}", f"HTTP_PORT={free_port()}"]
    process = subprocess.Popen(
        command, cwd=folder, env=without_cache(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    ask = [
        folder / ".venv/bin/dragoman",
        "translate",
        "--server",
        f"127.0.0.1:{port}",
        "--model",
        "en-de",
        "--timeout",
        "5",
        SENTENCE,
    ]
    try:
        while not _answers(ask):
            if process.poll() is not None or time.monotonic() - start > MAX_SECONDS:
                raise RuntimeError(f"make serve of {revision} came to nothing")
            time.sleep(0.5)
        seconds = time.monotonic() - start
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()
    rows = [_row(f"{revision}: git clone, make serve, the first sentence", folder, seconds)]
    start = time.monotonic()
    subprocess.run(["make", "setup"], cwd=folder, check=True, env=without_cache(), capture_output=True)
    return [*rows, _row(f"{revision}: make setup after it, for tests and checks", folder, time.monotonic() - start)]


def _answers(command: list[Any]) -> bool:
    """Tell whether a sentence is translated."""
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:  # the command line is not installed yet
        return False


def _row(what: str, folder: Path, seconds: float) -> dict[str, Any]:
    venv = folder / ".venv"
    return {"what": what, "packages": len(packages(venv)), "MB": round(size_mb(site_packages(venv))), "seconds": round(seconds)}


def main() -> None:
    """Install, count and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="*", default=list(EXTRAS), help="Extras, with commas between those of one installation.")
    parser.add_argument("--revisions", nargs="*", default=["HEAD"], help="Revisions to serve from a clone.")
    parser.add_argument("--quick", action="store_true", help="The base installation alone.")
    arguments = parser.parse_args()
    extras, revisions = ([""], []) if arguments.quick else (arguments.extras, arguments.revisions)
    rows: list[dict[str, Any]] = []
    about = environment("dragoman")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # From a clone: what an earlier build left in `build/` would be packed too.
        subprocess.run(["git", "clone", "--quiet", ROOT, folder / "source"], check=True)
        build = ("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "wheels"), str(folder / "source"))
        subprocess.run([sys.executable, "-m", "pip", *build], check=True)
        (wheel,) = (folder / "wheels").glob("*.whl")
        rows.append({"what": "the wheel itself", "packages": 1, "MB": round(wheel.stat().st_size / BYTES_PER_MB, 2), "seconds": ""})
        for extra in extras:
            rows.append(install(wheel, extra, folder / f"extra-{extra or 'none'}"))
        for revision in revisions:
            rows.extend(first_answer(revision, folder / f"clone-{revision}"))
    write(
        "installation",
        "What an installation takes",
        about,
        rows,
        [
            "Packages without pip, setuptools and Dragoman itself. Megabytes of 1,000,000 bytes: of an extra what it adds to a new "
            "virtual environment, of a clone its whole environment. PyTorch is a CPU-only build; the public one for Linux "
            "adds several gigabytes of CUDA libraries."
        ],
    )


if __name__ == "__main__":
    main()
