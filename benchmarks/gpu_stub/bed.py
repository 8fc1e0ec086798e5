"""Where the stub libraries and the wheel lie, and how a program is started so that it sees a GPU.

The wheel is unpacked into a folder of its own, which stands before everything else on the path of modules: whatever else a
program needs comes from the environment that started it. In that environment ONNX Runtime stays what it is.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_stub.build import StubError, build
from benchmarks.gpu_stub.symbols import PROVIDER, libraries_of

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "onnxruntime-gpu==1.31.1"
FOLDER_VARIABLE = "DRAGOMAN_CUDA_STUB"
# Stands in for a part of cuda-bindings, which calls the driver beneath the runtime.
BINDINGS = "cuda/bindings/runtime.py"
BINDINGS_TEXT = '"""Made by benchmarks.gpu_stub."""\n\nfrom benchmarks.gpu_stub.bindings import *\n'


@dataclass(frozen=True, slots=True)
class Bed:
    """A place where programs see a stub device.

    Attributes:
        folder: All of it.
        libraries: Folder of the stub libraries.
    """

    folder: Path
    libraries: Path

    def environment(self, settings: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the variables that a program needs.

        Args:
            settings: Others, for example GPU_STUB_BYTES, the device's memory.
        """
        modules = [str(wheel_folder(self.folder)), str(self.folder / "modules"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        libraries = [str(self.libraries), os.environ.get("LD_LIBRARY_PATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "CUDA_VISIBLE_DEVICES": "0",
            **(settings or {}),
        }

    def run(
        self, arguments: Sequence[str], settings: Mapping[str, str] | None = None, timeout_seconds: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run this Python with arguments, a script's path first or `-m` and a module."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(settings),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )


def default_folder() -> Path:
    """Return the folder that is used where none is named."""
    return Path(os.environ.get(FOLDER_VARIABLE) or ROOT / "build" / "gpu_stub")


def wheel_folder(folder: Path) -> Path:
    """Return where the wheel is unpacked."""
    return folder / "wheel"


def provider_in(folder: Path) -> Path:
    """Return the wheel's CUDA provider, which need not be there."""
    return wheel_folder(folder) / "onnxruntime" / "capi" / PROVIDER


def fetch(folder: Path) -> None:
    """Unpack the wheel, a quarter of a gigabyte, as pip gets it.

    Raises:
        StubError: If pip fails.
    """
    if provider_in(folder).is_file():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    result = subprocess.run([*command, "--target", str(wheel_folder(folder)), WHEEL], check=False)
    if result.returncode:
        raise StubError(f"pip does not install {WHEEL}")


def prepare(folder: Path | None = None) -> Bed:
    """Compile what is not compiled yet.

    Raises:
        StubError: If the wheel is not there, or gcc; the message says what to do.
    """
    folder = (folder or default_folder()).resolve()
    provider = provider_in(folder)
    if not provider.is_file():
        raise StubError(f"{WHEEL} is not in {folder} (make cuda-stub, or {FOLDER_VARIABLE}=FOLDER)")
    try:
        libraries = build(libraries_of(provider), folder)
    except OSError as error:
        raise StubError(f"{error.filename or 'a tool'}: {error.strerror}; gcc, nm and readelf are needed") from error
    bindings = folder / "modules" / BINDINGS
    bindings.parent.mkdir(parents=True, exist_ok=True)
    bindings.write_text(BINDINGS_TEXT, encoding="ascii")
    return Bed(folder, libraries)
