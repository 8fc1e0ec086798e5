"""The plan against the document's formula; that it is what is taken, the runner's tests show."""

import re
from pathlib import Path

import pytest

from dragoman.export.caches import attention_caches
from dragoman.server.runtime.device.buckets import Buckets
from dragoman.server.runtime.device.memory import DEFAULT_SHARE, MIN_ARENA_BYTES, MemoryPlan
from dragoman.server.runtime.device.model import DeviceModel

ROOT = Path(__file__).resolve().parents[4]
MIB = 2**20


def planned(tmp_path: Path, layers: int, heads: int, width: int, positions: int, rows: int) -> MemoryPlan:
    for name in ("encoder", "decoder"):
        (tmp_path / f"{name}.weights").write_bytes(b"x" * 1000)
    paths = tmp_path / "encoder.onnx", tmp_path / "decoder.onnx"
    caches = attention_caches(layers, heads, width // heads)
    model = DeviceModel(*paths, "fp16", caches, width, 32_000, 32_000, 0, 1, 2, positions, positions)
    return MemoryPlan.of(model, Buckets.of(rows, 32_000, positions, positions), 2048)


@pytest.mark.parametrize(("layers", "heads", "width"), [(4, 4, 128), (6, 8, 512), (6, 16, 1024)])
def test_the_document_has_the_plans_figures(tmp_path: Path, layers: int, heads: int, width: int) -> None:
    text = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| .*\(L {layers}, H·Dh {width}\) \| 512 \| (.*) \|$", text, re.MULTILINE)
    units = {"MiB": MIB, "GiB": 1024 * MIB}
    written = [float(number) * units[unit] for number, unit in (cell.split() for cell in row.split(" | "))]
    plans = [planned(tmp_path, layers, heads, width, 512, rows) for rows in (64, 256)]
    slot = 2 * layers * width * (512 + 512) * 2
    assert written == [slot, 64 * slot, 256 * slot]
    assert [plans[0].slot_bytes, plans[0].caches, plans[1].caches] == written


def test_the_other_parts_are_the_documents(tmp_path: Path) -> None:
    plan = planned(tmp_path, 6, 8, 512, 1024, 64)
    assert plan.staging == 2 * 6 * 512 * 2 * 2048
    assert plan.scratch == 64 * 512 * 1024 * 2
    assert plan.weights == 2000 + (2 + 4) * 32_000 * 512
    assert plan.activations >= max(MIN_ARENA_BYTES, 12 * 64 * 32_000)
    assert planned(tmp_path, 6, 8, 512, 512, 64).scratch == 0


def test_a_limit_is_kept_and_nine_tenths_where_there_is_none(tmp_path: Path) -> None:
    plan = planned(tmp_path, 6, 8, 512, 512, 64)
    assert plan.budget(100 * 2**30, 0) == int(DEFAULT_SHARE * 100 * 2**30)
    assert plan.budget(100 * 2**30, 5 * 2**30) == 5 * 2**30
    assert plan.budget(4 * 2**30, 5 * 2**30) == 4 * 2**30
