"""Whatever bytes come, they are understood or refused with a reason; nothing else is raised while they are read."""

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.inference.inference_pb2 import InferParameter, InferTensorContents, ModelInferRequest
from dragoman.server.faces.grpc.errors import to_status
from dragoman.server.faces.grpc.reading import Refused
from dragoman.server.faces.oip.datatypes import DATATYPES
from dragoman.server.faces.oip.inference import INPUTS, Inference
from dragoman.server.faces.oip.outputs import OUTPUTS
from dragoman.server.faces.oip.reading import infer_reader
from tests.system.harness.openinference_messages import asking, raw_bytes, with_parameters, with_tensor

NUM_EXAMPLES = 10_000 if os.environ.get("TEST_ALL_EXAMPLES") else 1_000
NUM_MUTATIONS = 10_000
reads = infer_reader(ModelInferRequest.FromString, lambda: 100)
quick = settings(max_examples=NUM_EXAMPLES, suppress_health_check=list(HealthCheck), database=None)


def check(data: bytes) -> Inference | Refused:
    outcome = reads(data)
    if isinstance(outcome, Refused):
        assert outcome.error.code == "INVALID_ARGUMENT"
        field, colon, reason = outcome.error.message.partition(": ")
        assert field and colon and reason
        assert to_status(outcome.error, outcome.request_id).details
    else:
        assert len(outcome) >= 1
    return outcome


integers = st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 4)
numbers = st.floats() | st.floats(width=32)
keys = st.sampled_from([*INPUTS, "n", "max_tokens", "?"])
json_like = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=5,
).map(repr)
parameters = st.builds(
    lambda pair: InferParameter(**dict([pair])),
    st.tuples(st.just("bool_param"), st.booleans())
    | st.tuples(st.just("int64_param"), integers)
    | st.tuples(st.just("uint64_param"), st.integers(0, 2**64 - 1))
    | st.tuples(st.just("double_param"), st.floats())
    | st.tuples(st.just("string_param"), st.text() | json_like),
) | st.just(InferParameter())
names = st.sampled_from(INPUTS) | st.text(max_size=5)
contents = st.builds(
    InferTensorContents,
    bool_contents=st.lists(st.booleans(), max_size=2),
    int_contents=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=2),
    uint64_contents=st.lists(st.integers(0, 2**64 - 1), max_size=2),
    fp32_contents=st.lists(st.floats(width=32), max_size=2),
    bytes_contents=st.lists(st.binary(max_size=4), max_size=2),
)
tensors = st.builds(
    ModelInferRequest.InferInputTensor,
    name=names,
    datatype=st.sampled_from([*DATATYPES, "BF16", ""]),
    shape=st.lists(integers, max_size=3),
    contents=st.none() | contents,
    parameters=st.dictionaries(names, parameters, max_size=1),
)
raws = st.binary(max_size=20) | st.lists(st.binary(max_size=4) | json_like.map(str.encode), max_size=3).map(lambda x: raw_bytes(*x))
requests = st.builds(
    ModelInferRequest,
    model_name=st.text(max_size=3),
    id=st.text(max_size=3),
    parameters=st.dictionaries(names | st.sampled_from(["timeout", "triton_enable_empty_final_response"]), parameters, max_size=4),
    inputs=st.lists(tensors, max_size=4),
    outputs=st.lists(st.builds(ModelInferRequest.InferRequestedOutputTensor, name=st.sampled_from([*OUTPUTS, "?"])), max_size=3),
    raw_input_contents=st.lists(raws, max_size=4),
)


@quick
@given(requests)
def test_messages_of_any_content(request: ModelInferRequest) -> None:
    check(request.SerializeToString())


@quick
@given(parameters, names, st.lists(raws, min_size=1, max_size=3))
def test_a_good_text_with_anything_beside_it(parameter: InferParameter, name: str, contents: list[bytes]) -> None:
    request = asking("a", "b")
    request.parameters[name].CopyFrom(parameter)
    for number, content in enumerate(contents):
        request.inputs.add(name=INPUTS[-1 - number], datatype="BYTES", shape=[1])
        request.raw_input_contents.append(content)
    check(request.SerializeToString())


@quick
@given(st.binary(max_size=200))
def test_bytes_that_are_no_message(data: bytes) -> None:
    check(data)


@pytest.mark.parametrize("seed", range(2))
def test_good_messages_with_a_few_bytes_changed(seed: int) -> None:
    chosen = random.Random(seed)
    good = with_parameters(asking("a dog", "runs", shape=[2, 1], id="mine"), num_beams=2, timeout=5, sampling_parameters='{"n": 2}')
    with_tensor(with_tensor(good, "seed", [1, 2], "UINT64"), "forced_prefix", ["Ein", "Der"], shape=[2, 1])
    data = good.SerializeToString()
    kinds = set()
    for _ in range(NUM_MUTATIONS // 2):
        changed = bytearray(data)
        for _ in range(chosen.randint(1, 4)):
            position = chosen.randrange(len(changed))
            match chosen.randrange(3):
                case 0:
                    changed[position] = chosen.randrange(256)
                case 1:
                    del changed[position : position + chosen.randint(1, 8)]
                case _:
                    changed[position:position] = chosen.randbytes(chosen.randint(1, 4))
        kinds.add(type(check(bytes(changed))))
    assert kinds == {Inference, Refused}
