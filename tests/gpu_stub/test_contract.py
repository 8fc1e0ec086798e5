"""The rules that export and loading keep to, against the kernel whose rules they are."""

import json
from typing import Any

import pytest

from benchmarks.gpu_stub.bed import Bed

nodes: Any = pytest.importorskip("tests.export.attention_nodes", reason="the rules are not written down yet")
CUDA = "CUDAExecutionProvider"


@pytest.fixture(scope="module")
def answers(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return what the provider says to each node: the good ones, and those that break a rule."""
    import onnx_ir

    folder = tmp_path_factory.mktemp("nodes")
    for name, places in nodes.GOOD.items():
        onnx_ir.save(nodes.model_of(places), folder / f"{name}.onnx")
    for case in nodes.CASES:
        onnx_ir.save(nodes.model_of(case.places, **case.attributes), folder / f"{case.name}.onnx")
    result = bed.run(["-m", "benchmarks.gpu_stub.nodes", str(folder)])
    assert result.stdout.startswith("{"), result.stderr
    found: dict[str, dict[str, str]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("name", nodes.GOOD)
def test_what_the_models_have_is_computed_on_cuda(answers: dict[str, dict[str, str]], name: str) -> None:
    assert answers[name] == {"refusal": "", "provider": CUDA}


@pytest.mark.parametrize("name", [case.name for case in nodes.CASES])
def test_what_breaks_a_rule_is_not(answers: dict[str, dict[str, str]], name: str) -> None:
    """It is refused, or goes to the CPU."""
    assert answers[name]["refusal"] or answers[name]["provider"] != CUDA
