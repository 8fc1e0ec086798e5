"""Rotary positions: what the paper says of them, and the operators' half-split form as complex numbers have it."""

import pytest
import torch

from dragoman.model.config import ModelConfig
from dragoman.model.networks.rotary import angles, rotated

CONFIG = ModelConfig(
    architecture="decoder",
    source_vocab_size=23,
    target_vocab_size=23,
    d_model=64,
    num_heads=4,
    positions="rotary",
    rotary_base=100.0,
    max_target_positions=64,
    max_source_positions=64,
)


def test_pairs_of_numbers_are_turned_like_complex_ones() -> None:
    x, positions = torch.randn(2, 4, 5, 16), torch.tensor([0, 3, 1, 40, 41])
    frequencies = torch.tensor([100.0 ** (-i / 8) for i in range(8)], dtype=torch.float64)
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = turned * torch.polar(torch.ones(5, 8, dtype=torch.float64), positions[:, None] * frequencies)
    expected = torch.cat((turned.real, turned.imag), -1).float()
    torch.testing.assert_close(rotated(x, positions, CONFIG), expected, atol=1e-5, rtol=0)


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(1, 4, 1, 16, dtype=torch.float64), torch.randn(1, 4, 1, 16, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        return (rotated(query, torch.tensor([at]), CONFIG) * rotated(key, torch.tensor([other]), CONFIG)).sum(-1)

    for distance in (0, 1, 7):
        for at in (20, 63):
            torch.testing.assert_close(score(at, at - distance), score(10, 10 - distance), atol=1e-5, rtol=0)
    assert not torch.allclose(score(10, 9), score(10, 8), atol=1e-2)


def test_position_0_is_left_as_it_is_and_lengths_stay() -> None:
    x = torch.randn(1, 4, 3, 16)
    turned = rotated(x, torch.tensor([0, 5, 50]), CONFIG)
    assert torch.equal(turned[:, :, 0], x[:, :, 0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_no_positions_are_no_angles() -> None:
    assert rotated(torch.randn(1, 4, 0, 16), torch.arange(0), CONFIG).shape == (1, 4, 0, 16)
    assert [table.shape for table in angles(7, 16, 10000.0)] == [(7, 8), (7, 8)]


@pytest.mark.parametrize("position", [1, 1000, 100_000])
def test_angles_of_far_positions_are_precise(position: int) -> None:
    """In single precision the angle of a far position would be off by more than its cosine shows."""
    cos, sin = angles(position + 1, 16, 10000.0)
    for i in range(8):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / 16), dtype=torch.float64)
        assert float(cos[position, i]) == pytest.approx(float(angle.cos()), abs=1e-7)
        assert float(sin[position, i]) == pytest.approx(float(angle.sin()), abs=1e-7)
