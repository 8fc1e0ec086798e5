import numpy as np
import pytest

from dragoman.server.runtime.device.device import OutOfDeviceMemory
from dragoman.server.runtime.device.host import HostDevice


def test_pieces_are_copied_from_pitch_to_pitch() -> None:
    device = HostDevice()
    source, target = device.allocate(12), device.allocate(20)
    staged = np.arange(12, dtype=np.uint8)
    device.upload(source, staged)
    device.copy_pieces(target, 5, source, 4, 3, 3)
    found = np.empty(20, np.uint8)
    device.download(found, target)
    assert found.tolist() == [0, 1, 2, 0, 0, 4, 5, 6, 0, 0, 8, 9, 10, 0, 0, 0, 0, 0, 0, 0]


def test_what_overlaps_or_lies_outside_is_a_mistake() -> None:
    device = HostDevice()
    block = device.allocate(16)
    for call in (lambda: device.copy(block + 4, block, 8), lambda: device.copy(block, block + 12, 8)):
        with pytest.raises(AssertionError):
            call()


def test_memory_is_counted_and_ends() -> None:
    device = HostDevice(max_bytes=100)
    block = device.allocate(60)
    with pytest.raises(OutOfDeviceMemory, match="50 bytes are asked for, 40 are free"):
        device.allocate(50)
    device.free(block)
    assert device.num_bytes == 0 and device.available_bytes() == 100
