"""A place where programs see a stub CUDA device under the real onnxruntime-gpu.

`python -m tests.system.cuda_stub.bed` unpacks the wheel into a folder of its own, which stands before everything else on the path
of modules. ONNX Runtime of the environment that starts a program stays as it is. The stub libraries are compiled with gcc: what
`native/` has, and for every other name a function that is counted and succeeds.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.system.cuda_stub.symbols import PROVIDER, Library, libraries_of

ROOT = Path(__file__).resolve().parents[3]
WHEEL = "onnxruntime-gpu==1.31.1"
FOLDER_VARIABLE = "DRAGOMAN_CUDA_STUB"
# Replaces a part of cuda-bindings, which calls the driver beneath the runtime.
BINDINGS = "cuda/bindings/runtime.py"
NATIVE = Path(__file__).parent / "native"
CORE = "libgpu_stub.so"
CORE_SOURCES = ("calls.c", "memory.c", "streams.c", "kernels.c", "report.c")
# Sources by the beginning of a library's name.
SOURCES = {
    "libcudart.": ("runtime.c", "runtime_memory.c", "runtime_streams.c", "launches.c", "device.c"),
    "libcublas.": ("blas.c",),
    "libcublasLt.": ("blas_lt.c",),
    "libcudnn.": ("dnn.c",),
    "libcurand.": ("random.c",),
    "libcuda.": ("driver.c", "device.c"),
}
FLAGS = ("-O1", "-fPIC", "-shared", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-function")
PREFACE = """\
/* Generated from the provider's symbols: see bed.py. */
#include "core.h"

/* For functions that no source defines; a library may have its own. */
__attribute__((weak, visibility("hidden"))) long otherwise(struct call *call, void *first) {
    (void)first;
    return called(call);
}

#define STUB(name) \\
    __attribute__((weak)) long name(void *first) { static struct call here = {#name, 0, 0}; return otherwise(&here, first); }

"""


class StubError(RuntimeError):
    """The stub libraries cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Bed:
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
    return Path(os.environ.get(FOLDER_VARIABLE) or ROOT / "build" / "gpu_stub").resolve()


def prepare() -> Bed:
    """Compile the stub libraries, unless they are there; a `StubError` names the remedy if the wheel or gcc is missing."""
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


def build(libraries: Iterable[Library], folder: Path) -> Path:
    """Compile libraries into a folder below another, unless they are there; several programs may do so at once.

    Return that folder, into which the dynamic linker is to look; other sources make another.
    """
    sources = {each: next((files for prefix, files in SOURCES.items() if each.name.startswith(prefix)), ()) for each in libraries}
    digest = hashlib.sha256(PREFACE.encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.read_bytes())
    for library, files in sources.items():
        digest.update(repr((library.name, library.symbols, files, FLAGS)).encode())
    output = folder / f"lib-{digest.hexdigest()[:12]}"
    if output.is_dir():
        return output
    if shutil.which("gcc") is None:
        raise StubError("there is no gcc")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".lib-", dir=folder) as scratch:
        made = Path(scratch) / "lib"
        made.mkdir()
        core = [str(NATIVE / name) for name in CORE_SOURCES]
        _compile(*core, "-pthread", f"-Wl,-soname,{CORE}", "-o", str(made / CORE))
        for library, files in sources.items():
            _compile_library(library, files, Path(scratch), made)
        with contextlib.suppress(OSError):  # somebody else was faster
            made.rename(output)
    return output


def _compile_library(library: Library, sources: Iterable[str], scratch: Path, output: Path) -> None:
    """Define every name weakly, so that a source's definition takes its place, in the version that it is asked for with."""
    names = sorted({name for _, names in library.symbols for name in names})
    source, script = scratch / f"{library.name}.c", scratch / f"{library.name}.map"
    source.write_text(PREFACE + "".join(f"STUB({name})\n" for name in names), encoding="ascii")
    versions = [version for version, _ in library.symbols if version][:1]
    script.write_text("".join(f"{version} {{ global: *; }};\n" for version in versions), encoding="ascii")
    scripts = [f"-Wl,--version-script={script}"] if versions else []
    files, core = [str(NATIVE / name) for name in sources], [f"-L{output}", "-lgpu_stub", "-Wl,-rpath,$ORIGIN"]
    _compile(f"-I{NATIVE}", str(source), *files, *core, *scripts, f"-Wl,-soname,{library.name}", "-o", str(output / library.name))


def _compile(*arguments: str) -> None:
    result = subprocess.run(["gcc", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise StubError(f"gcc fails:\n{result.stderr}")


def main() -> None:
    """Unpack the wheel, a quarter of a gigabyte, and compile the libraries."""
    target = stub_folder() / "wheel"
    if not (target / "onnxruntime").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(target), WHEEL], check=True)
    print(f"{prepare().libraries} stands in for CUDA's libraries")


if __name__ == "__main__":
    main()
