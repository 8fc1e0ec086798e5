"""What the processor can do that decides how ONNX Runtime has to compute."""

from pathlib import Path

PROCESSOR_FILE = Path("/proc/cpuinfo")
# Products of 8-bit numbers that are summed in 32 bits; AMX has them, too, and no processor has AMX without VNNI.
EXACT_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})


def overflows_in_8_bits(processor_file: Path = PROCESSOR_FILE) -> bool:
    """Tell whether ONNX Runtime's fast 8-bit products may overflow here: on x86 without VNNI, where pairs are summed in 16 bits.

    Args:
        processor_file: Linux's description of the processors. Without one, or with one that has no flags of x86, there is no
            telling, and on other architectures no need: the setting that is chosen by this has no effect there.
    """
    try:
        lines = processor_file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not EXACT_FLAGS.intersection(flags)
