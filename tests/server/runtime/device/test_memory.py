"""The memory plan against the formula and figures of docs/deploy.md."""

import re
from pathlib import Path

import pytest

from dragoman.export.cuda_contract import DOMAIN, INPUTS, OPERATOR
from dragoman.export.graph_file import GraphFile, NodeInfo
from dragoman.export.tensors import attention_caches
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.device.memory import DEFAULT_SHARE, MIN_ACTIVATION_BYTES, MemoryPlan
from dragoman.server.runtime.device.model import Buckets, DeviceModel

ROOT = Path(__file__).resolve().parents[4]
MIB, GIB = 2**20, 2**30
WEIGHTS = {"encoder": 1000, "decoder": 2000, "scorer": 4000}


class Weighed(DeviceModel):
    """A model without files, whose weights are given."""

    def read_graph(self, path: Path) -> GraphFile:
        return GraphFile((), {}, WEIGHTS[path.stem])


class Biased(Weighed):
    """One with relative positions."""

    def read_graph(self, path: Path) -> GraphFile:
        inputs = tuple(name if name in ("query", "attention_bias") else "" for name in INPUTS)
        return GraphFile((NodeInfo("attention", OPERATOR, DOMAIN, inputs, ("output",)),), {}, WEIGHTS[path.stem])


def planned(
    tmp_path: Path,
    layers: int,
    heads: int,
    width: int,
    positions: int,
    rows: int,
    prefill: int = 2048,
    vocabulary: int = 32_000,
    kind: type[DeviceModel] = Weighed,
) -> MemoryPlan:
    (tmp_path / "scorer.onnx").touch()
    paths = tmp_path / "encoder.onnx", tmp_path / "decoder.onnx"
    caches = attention_caches(layers, heads, width // heads)
    model = kind(*paths, "fp16", caches, width, vocabulary, vocabulary, 0, 1, 2, positions, positions)
    return MemoryPlan.of(model, Buckets.of(rows, vocabulary, positions, positions), prefill, 78)


@pytest.mark.parametrize(("layers", "heads", "width"), [(4, 4, 128), (6, 8, 512), (6, 16, 1024)])
def test_document_has_the_plans_figures(tmp_path: Path, layers: int, heads: int, width: int) -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| .*\(L {layers}, H·Dh {width}\) \| 512 \| (.*) \|$", text, re.MULTILINE)
    units = {"MiB": MIB, "GiB": 1024 * MIB}
    written = [float(number) * units[unit] for number, unit in (cell.split() for cell in row.split(" | "))]
    plans = [planned(tmp_path, layers, heads, width, 512, rows) for rows in (64, 256)]
    slot = 2 * layers * width * (512 + 512) * 2
    assert written == [slot, 64 * slot, 256 * slot]
    assert [plans[0].slot_bytes, plans[0].caches, plans[1].caches] == written


def test_parts_are_those_of_the_formula(tmp_path: Path) -> None:
    plan = planned(tmp_path, 6, 8, 512, 1024, 64)
    assert plan.staging == 2 * 6 * 512 * 2 * 2048
    assert plan.scratch == 64 * 512 * 1024 * 2
    assert planned(tmp_path, 6, 8, 512, 512, 64).scratch == 0
    assert (plan.libraries, plan.graphs) == (256 * MIB, 78 * MIB // 2)
    assert plan.encoder.weights == 1000
    assert plan.decoder.weights == 2000 + 4 * 32_000 * 512
    assert plan.scorer.weights == 4000 + 4 * 32_000 * 512
    assert plan.encoder.activations == plan.decoder.activations == MIN_ACTIVATION_BYTES == 128 * MIB
    # Present keys and values of the encoder, logits, attention that is kept, scores of relative positions.
    sizes = tmp_path, 6, 16, 1024, 512, 1024
    plain, biased = planned(*sizes, prefill=8192), planned(*sizes, prefill=8192, kind=Biased)
    assert plain.encoder.activations == 64 * 1024 * 8192 + 2 * (1024 * 2) * 8192
    assert biased.encoder.activations - plain.encoder.activations == 8 * 16 * 8192 * 512
    assert biased.decoder.activations - plain.decoder.activations == 8 * 16 * 1024 * 512
    assert biased.scorer.activations - plain.scorer.activations == 8 * 16 * 512 * 512
    plan = planned(tmp_path, 6, 8, 512, 512, 2048, vocabulary=250_000)
    assert plan.decoder.activations == 12 * 2048 * 250_000
    attention, presents = 4 * 512 * 512 * (3 * 8 + 2 * 6), 2 * (512 * 2) * 512
    assert plan.scorer.activations == 12 * 512 * 250_000 + 16 * (512 + 512) * 512 * 4 + attention + presents


@pytest.mark.parametrize("limit", [3 * GIB, 7 * GIB + 1])
def test_allowed_memory_is_divided_and_nothing_is_given_twice(tmp_path: Path, limit: int) -> None:
    plan = planned(tmp_path, 6, 8, 512, 512, 64)
    budget = plan.budget(100 * GIB, limit)
    sessions = {"encoder": budget.encoder, "decoder": budget.decoder, "scorer": budget.scorer}
    assert all(size >= getattr(plan, name).total for name, size in sessions.items())
    taken = sum(sessions.values()) + plan.reserved + plan.libraries + plan.graphs
    assert limit - 3 <= taken <= limit
    assert budget.left_free == 100 * GIB - limit
    parts = plan.parts(budget)
    assert sum(parts.values()) == 100 * GIB and parts["left_free"] >= budget.left_free


def test_limit_is_kept_to_the_byte_and_is_nine_tenths_where_there_is_none(tmp_path: Path) -> None:
    plan = planned(tmp_path, 6, 8, 512, 512, 64)
    least = plan.reserved + plan.arena
    for free, limit, allowed in (
        (100 * GIB, 0, int(DEFAULT_SHARE * 100 * GIB)),
        (100 * GIB, 5 * GIB, 5 * GIB),
        (4 * GIB, 5 * GIB, 4 * GIB),
        (least, least, least),
    ):
        assert plan.budget(free, limit).allowed == allowed
    assert plan.budget(least, least).encoder == plan.encoder.total
    with pytest.raises(DeviceError, match=r"64 slots need 0\.7\d GiB .* at most 63 slots fit"):
        plan.budget(least - 1, least)
    (tmp_path / "scorer.onnx").unlink()
    paths = tmp_path / "encoder.onnx", tmp_path / "decoder.onnx"
    bare = Weighed(*paths, "fp16", attention_caches(6, 8, 64), 512, 32_000, 32_000, 0, 1, 2, 512, 512)
    without = MemoryPlan.of(bare, Buckets.of(64, 32_000, 512, 512), 2048, 78)
    assert without.budget(20 * GIB, 0).scorer == without.scorer.total == 0
    assert plan.arena - without.arena == plan.scorer.total
