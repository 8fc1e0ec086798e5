"""The stub libraries, compiled with gcc: what `native/` has, and for every other name a function that is counted and succeeds."""

import contextlib
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests.system.cuda_stub.symbols import Library

NATIVE = Path(__file__).parent / "native"
CORE = "libgpu_stub.so"
CORE_SOURCES = ("calls.c", "memory.c", "streams.c", "kernels.c", "report.c")
# By the beginning of a library's name: what is written by hand for it.
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
/* Generated from the provider's symbols: see build.py. */
#include "core.h"

/* What a function does that nobody has written; a library may have its own. */
__attribute__((weak, visibility("hidden"))) long otherwise(struct call *call, void *first) {
    (void)first;
    return called(call);
}

#define STUB(name) \\
    __attribute__((weak)) long name(void *first) { static struct call here = {#name, 0, 0}; return otherwise(&here, first); }

"""


class StubError(RuntimeError):
    """The stub libraries cannot be made; the message says why."""


def build(libraries: Iterable[Library], folder: Path) -> Path:
    """Compile libraries into a folder, unless they are there; several programs may do so at once.

    Args:
        libraries: What they have to export.
        folder: Where to; it is made.

    Returns:
        The folder that the dynamic linker is to look into; other sources make another.

    Raises:
        StubError: If there is no gcc, or it fails.
    """
    libraries = list(libraries)
    output = folder / f"lib-{_digest(libraries)[:12]}"
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
        for library in libraries:
            _compile_library(library, Path(scratch), made)
        with contextlib.suppress(OSError):  # somebody else was faster
            made.rename(output)
    return output


def sources_of(library: str) -> tuple[str, ...]:
    """Return the files of `native/` that belong to a library."""
    return next((sources for prefix, sources in SOURCES.items() if library.startswith(prefix)), ())


def generated_source(library: Library) -> str:
    """Return C that defines every name, weakly: a definition by hand takes its place."""
    names = sorted({name for names in library.symbols.values() for name in names})
    return PREFACE + "".join(f"STUB({name})\n" for name in names)


def version_script(library: Library) -> str:
    """Return the linker's script that gives names the versions they are asked for with; nothing where none has one."""
    versions = [version for version in library.symbols if version]
    return "".join(f"{version} {{ global: *; }};\n" for version in versions[:1])


def _compile_library(library: Library, generated: Path, output: Path) -> None:
    source, script = generated / f"{library.name}.c", generated / f"{library.name}.map"
    source.write_text(generated_source(library), encoding="ascii")
    script.write_text(version_script(library), encoding="ascii")
    scripts = [f"-Wl,--version-script={script}"] if version_script(library) else []
    by_hand = [str(NATIVE / name) for name in sources_of(library.name)]
    core = [f"-L{output}", "-lgpu_stub", "-Wl,-rpath,$ORIGIN"]
    _compile(f"-I{NATIVE}", str(source), *by_hand, *core, *scripts, f"-Wl,-soname,{library.name}", "-o", str(output / library.name))


def _compile(*arguments: str) -> None:
    result = subprocess.run(["gcc", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise StubError(f"gcc fails:\n{result.stderr}")


def _digest(libraries: Iterable[Library]) -> str:
    """Return what changes when anything that is compiled does."""
    digest = hashlib.sha256(PREFACE.encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.read_bytes())
    for library in libraries:
        digest.update(repr((library.name, sorted(library.symbols.items()), sources_of(library.name), FLAGS)).encode())
    return digest.hexdigest()
