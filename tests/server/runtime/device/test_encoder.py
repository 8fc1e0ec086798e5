"""The encoder on a device: few shapes of batches, padding without a trace, and batches that shrink where memory is short."""

import numpy as np
import pytest

from dragoman.server.runtime.device.device import OutOfDeviceMemory
from dragoman.server.runtime.device.encoder import DeviceEncoder
from dragoman.server.runtime.device.model import Buckets, DeviceModel, padded_sizes
from dragoman.server.runtime.device.runner import DeviceRunner
from tests.server.runtime.conftest import FailingDevice

MAX_POSITIONS = 96


@pytest.fixture
def encoder(device: FailingDevice, model: DeviceModel) -> DeviceEncoder:
    session = device.open_session(model.encoder_path, max_arena_bytes=0, is_captured=False)
    return DeviceEncoder(device, model, session, MAX_POSITIONS)


def source(length: int, seed: int) -> list[int]:
    return [*(3 + (seed * 31 + i * 17) % 270 for i in range(length - 1)), 1]


def encoded(device: FailingDevice, model: DeviceModel, encoder: DeviceEncoder, sources: list[list[int]]) -> list[bytes]:
    """Return what is encoded of each token of each source, tensor by tensor."""
    found = encoder.encode(sources)
    assert found.lengths.tolist() == [len(one) for one in sources]
    kind, parts = model.cross_kv, []
    rows, _, positions, width = device.shapes[-1]
    for address in found.tensors:
        tensor = np.empty((rows, kind.num_pieces, positions, width), np.float32)
        device.download(tensor, address)
        parts += [tensor[row, :, : len(one)].tobytes() for row, one in enumerate(sources)]
    return parts


@pytest.mark.parametrize("lengths", [(5,), (5, 3, 1), (7, 7, 7, 7, 7), (13, 1, 2), (24, 23), (2,) * 7])
def test_padding_leaves_the_bits_of_each_source_alone(
    device: FailingDevice, model: DeviceModel, encoder: DeviceEncoder, lengths: tuple[int, ...]
) -> None:
    sources = [source(length, i) for i, length in enumerate(lengths)]
    together = encoded(device, model, encoder, sources)
    alone = [encoded(device, model, encoder, [one]) for one in sources]
    assert together == [parts[tensor] for tensor in range(len(alone[0])) for parts in alone]
    encoder.padded_shape = lambda num_rows, longest: (num_rows, longest)  # type: ignore[method-assign]
    assert encoded(device, model, encoder, sources) == together
    assert device.shapes[-1][0] == len(sources) and device.shapes[-1][2] == max(lengths)


def test_batches_have_few_shapes(device: FailingDevice, model: DeviceModel, encoder: DeviceEncoder) -> None:
    random = np.random.default_rng(0)
    asked = set()
    for _ in range(120):
        longest = int(random.integers(1, 25))
        sources = [source(longest, i) for i in range(int(random.integers(1, 8)))]
        sources = sources[: encoder.num_fitting([longest] * len(sources))]
        asked.add((len(sources), longest))
        encoder.encode(sources)
    rows, lengths = padded_sizes(MAX_POSITIONS), padded_sizes(model.max_source_tokens)
    assert {(shape[0], shape[2]) for shape in device.shapes} <= {(row, length) for row in rows for length in lengths}
    assert len(set(device.shapes)) <= 9 * 6 < len(asked)


def test_number_that_fits_is_reckoned_with_padding(encoder: DeviceEncoder) -> None:
    for lengths, expected in (
        ([24] * 9, 4),  # 4 · 24 is all there is
        ([13] * 9, 6),  # 6 · 16
        ([9, 24, 24, 24, 24], 4),
        ([24], 1),
        ([1] * (MAX_POSITIONS + 1), MAX_POSITIONS),
        ([1] * (3 * MAX_POSITIONS), MAX_POSITIONS),
    ):
        assert encoder.num_fitting(lengths) == expected


def test_batch_that_proved_too_large_is_not_tried_again(encoder: DeviceEncoder, device: FailingDevice) -> None:
    device.is_short = lambda shape: shape[0] > 1
    lengths = [9] * 5
    while True:
        count = encoder.num_fitting(lengths)
        try:
            encoder.encode([source(9, i) for i in range(count)])
            break
        except OutOfDeviceMemory:
            assert encoder.shrink(lengths[:count])
    tried = [shape[0] for shape in device.shapes]
    assert tried == sorted(set(tried), reverse=True) and tried[-1] == 1
    assert not encoder.shrink([9])


def test_model_starts_though_its_longest_source_has_no_room(model: DeviceModel, buckets: Buckets, device: FailingDevice) -> None:
    limit = model.max_source_tokens
    device.is_short = lambda shape: len(shape) == 4 and shape[2] >= limit
    runner = DeviceRunner(device, model, buckets, prefill_tokens=MAX_POSITIONS, has_graphs=False)
    runner.warm_up()
    runner.prefill([source(5, 0)], [0])
    with pytest.raises(OutOfDeviceMemory):
        runner.prefill([source(limit, 0)], [0])
    limit = 1
    with pytest.raises(OutOfDeviceMemory):
        runner.warm_up()
