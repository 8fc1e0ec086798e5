"""What the processor can do that decides how ONNX Runtime has to compute, and what to call it in a report."""

import platform
from pathlib import Path

PROCESSOR_FILE = Path("/proc/cpuinfo")
# Products of 8-bit numbers that are summed in 32 bits; AMX has them, too, and no processor has AMX without VNNI.
EXACT_FLAGS = ("avx512_vnni", "avx_vnni")
# What a kind of processor is called after: the first that it has.
KINDS = (*EXACT_FLAGS, "avx512f", "avx2", "avx", "asimddp", "asimd")


def overflows_in_8_bits(processor_file: Path = PROCESSOR_FILE) -> bool:
    """Tell whether ONNX Runtime's fast 8-bit products may overflow here: on x86 without VNNI, where pairs are summed in 16 bits.

    Args:
        processor_file: Linux's description of the processors. Without one, or with one that has no flags of x86, there is no
            telling, and on other architectures no need: the setting that is chosen by this has no effect there.
    """
    return not _flags(processor_file).intersection(EXACT_FLAGS)


def processor_kind(processor_file: Path = PROCESSOR_FILE) -> str:
    """Name the kind of processor by what it has for products, for example `avx512_vnni` or `avx2`; else by its architecture."""
    flags = _flags(processor_file)
    return next((kind for kind in KINDS if kind in flags), platform.machine() or "unknown")


def _flags(processor_file: Path) -> frozenset[str]:
    """Return what the first processor says that it has: `flags` on x86, `Features` on arm64."""
    try:
        lines = processor_file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), ()))
