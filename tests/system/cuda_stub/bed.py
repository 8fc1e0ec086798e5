"""A place where programs see a stub CUDA device under the real onnxruntime-gpu.

`python -m tests.system.cuda_stub.bed` unpacks the wheel into a folder of its own, which stands before everything else on the path
of modules. ONNX Runtime of the environment that starts a program stays as it is.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.system.cuda_stub.build import StubError, build
from tests.system.cuda_stub.symbols import PROVIDER, libraries_of

ROOT = Path(__file__).resolve().parents[3]
WHEEL = "onnxruntime-gpu==1.31.1"
FOLDER_VARIABLE = "DRAGOMAN_CUDA_STUB"
# Replaces a part of cuda-bindings, which calls the driver beneath the runtime.
BINDINGS = "cuda/bindings/runtime.py"


@dataclass(frozen=True, slots=True)
class Bed:
    """Folders of the wheel and of the stub libraries."""

    folder: Path
    libraries: Path

    def run(self, *arguments: str, timeout_seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Run this Python on the stub device with arguments, `-m` and a module first."""
        modules = [self.folder / "wheel", self.folder / "modules", ROOT]
        environment = {
            **os.environ,
            "PYTHONPATH": _path(*modules, os.environ.get("PYTHONPATH")),
            "LD_LIBRARY_PATH": _path(self.libraries, os.environ.get("LD_LIBRARY_PATH")),
            "CUDA_VISIBLE_DEVICES": "0",
            "GPU_STUB_BYTES": str(80 * 2**30),
        }
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout_seconds
        )


def _path(*folders: Path | str | None) -> str:
    return os.pathsep.join(str(folder) for folder in folders if folder)


def stub_folder() -> Path:
    """Return the folder of the wheel and the libraries, which need not exist."""
    return Path(os.environ.get(FOLDER_VARIABLE) or ROOT / "build" / "gpu_stub").resolve()


def prepare() -> Bed:
    """Compile the stub libraries, unless they are there.

    Raises:
        StubError: If the wheel or gcc is missing; the message names the remedy.
    """
    folder = stub_folder()
    provider = folder / "wheel" / "onnxruntime" / "capi" / PROVIDER
    if not provider.is_file():
        raise StubError(f"{WHEEL} is not in {folder} (make cuda-stub, or {FOLDER_VARIABLE}=FOLDER)")
    try:
        libraries = build(libraries_of(provider), folder)
    except OSError as error:
        raise StubError(f"{error.filename or 'a tool'}: {error.strerror}; gcc, nm and readelf are needed") from error
    bindings = folder / "modules" / BINDINGS
    bindings.parent.mkdir(parents=True, exist_ok=True)
    for package in (bindings.parent.parent, bindings.parent):
        (package / "__init__.py").touch()  # or an installed package of this name would come first
    bindings.write_text("from tests.system.cuda_stub.bindings import *\n", encoding="ascii")
    return Bed(folder, libraries)


def main() -> None:
    """Unpack the wheel, a quarter of a gigabyte, and compile the libraries."""
    target = stub_folder() / "wheel"
    if not (target / "onnxruntime").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), WHEEL], check=True)
    print(f"{prepare().libraries} stands in for CUDA's libraries")


if __name__ == "__main__":
    main()
