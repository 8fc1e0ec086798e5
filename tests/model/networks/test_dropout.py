import pytest
import torch

from dragoman.model.networks.dropout import Dropout


def make(p: float) -> Dropout:
    torch.manual_seed(0)
    return Dropout(p).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_elements_are_dropped_with_their_probability_and_the_others_scaled(p, dtype) -> None:
    out = make(p)(torch.ones(1000, 1000, dtype=dtype))
    dropped = out == 0
    assert dropped.double().mean().item() == pytest.approx(p, abs=5 * (p * (1 - p) / 1e6) ** 0.5)
    assert out[~dropped].unique().tolist() == pytest.approx([1 / (1 - p)], rel=4e-3 if dtype == torch.bfloat16 else 1e-4)


def test_every_place_of_a_word_and_of_a_row_is_dropped_alike() -> None:
    dropped = make(0.25)(torch.ones(200_000, 8)) == 0
    rates = dropped.double().mean(0)
    assert rates.tolist() == pytest.approx([0.25] * 8, abs=0.006)
    together = (dropped[:, :, None] & dropped[:, None, :]).double().mean(0)
    assert together[~torch.eye(8, dtype=torch.bool)].tolist() == pytest.approx([0.0625] * 56, abs=0.004)


def test_calls_differ_and_a_seed_repeats_them() -> None:
    x, dropout = torch.ones(1000), make(0.5)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    assert torch.equal(make(0.5)(x), first)


def test_gradient_passes_where_the_value_did() -> None:
    x = torch.randn(3, 5, 7, requires_grad=True)
    out = make(0.5)(x)
    out.sum().backward()
    torch.testing.assert_close(x.grad * x, out)
    assert 0 < (x.grad == 0).sum() < x.numel()


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (2, 3, 5), ()])
def test_any_shape(shape) -> None:
    assert make(0.5)(torch.ones(shape)).shape == shape


@pytest.mark.parametrize(("p", "is_training"), [(0.0, True), (0.5, False)])
def test_nothing_is_dropped_where_nothing_should_be(p, is_training) -> None:
    x = torch.randn(10)
    assert make(p).train(is_training)(x) is x


def test_probability_next_to_one_keeps_values_finite() -> None:
    assert make(0.9999999)(torch.ones(100_000)).isfinite().all()


def test_it_is_printed_with_its_probability() -> None:
    assert str(Dropout(0.1)) == "Dropout(p=0.1)"
