from pathlib import Path

import pytest

from dragoman.server.runtime.processor import overflows_in_8_bits


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 avx2 avx512f avx512_vnni", False),
        ("flags\t\t: fpu sse2 avx2 avx_vnni", False),
        ("flags\t\t: fpu sse2 avx2 avx512f avx512bw", True),
        ("Features\t: fp asimd asimddp", True),
    ],
)
def test_only_x86_with_vnni_is_known_not_to_overflow(tmp_path: Path, line: str, expected: bool) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\n{line}\n", encoding="ascii")
    assert overflows_in_8_bits(file) is expected


def test_an_unknown_processor_is_taken_for_one_that_overflows(tmp_path: Path) -> None:
    assert overflows_in_8_bits(tmp_path / "missing")
