"""Losses over chunks of a projection, against PyTorch's own."""

import pytest
import torch
from torch.nn import functional as F

from dragoman.model.training import loss
from dragoman.model.training.loss import projected_cross_entropy, r_drop_cross_entropy

D, V, PAD = 8, 19, 3


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ROWS", 7)
    torch.manual_seed(0)


def assert_same(value: torch.Tensor, expected: torch.Tensor, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    (value * 0.7).backward()
    (expected * 0.7).backward()
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(6,), (4, 6), (1, 10, 5)], ids=["one chunk", "four chunks", "eight chunks"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_value_and_gradients_equal_cross_entropy(shape, has_bias, smoothing) -> None:
    inputs = [torch.randn(*shape, D), torch.randn(V, D), *([torch.randn(V)] if has_bias else [])]
    labels = torch.randint(0, V, shape)
    labels.view(-1)[::4] = PAD
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    value = projected_cross_entropy(ours[0], ours[1], ours[2] if has_bias else None, labels, PAD, smoothing)
    logits = F.linear(theirs[0], theirs[1], theirs[2] if has_bias else None).flatten(0, -2)
    expected = F.cross_entropy(logits, labels.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    assert_same(value, expected, ours, theirs)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
def test_two_passes_are_drawn_together_as_the_paper_says(has_bias, alpha) -> None:
    """Against R-Drop's equation 4 written with PyTorch's own losses, halved."""
    inputs = [torch.randn(2, 4, 6, D), torch.randn(V, D), *([torch.randn(V)] if has_bias else [])]
    labels = torch.randint(0, V, (4, 6))
    labels.view(-1)[::4] = PAD
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    value = r_drop_cross_entropy(ours[0], ours[1], ours[2] if has_bias else None, labels, PAD, 0.1, alpha)
    first, second = F.linear(theirs[0], theirs[1], theirs[2] if has_bias else None)[:, labels != PAD]
    real = labels[labels != PAD]
    entropies = sum(F.cross_entropy(logits, real, reduction="sum", label_smoothing=0.1) for logits in (first, second))
    p, q = first.log_softmax(-1), second.log_softmax(-1)
    divergences = sum(F.kl_div(b, a, reduction="sum", log_target=True) for a, b in ((p, q), (q, p)))
    assert_same(value, (entropies + alpha * divergences / 2) / 2, ours, theirs)


def test_padding_gets_no_gradient_and_alone_costs_nothing() -> None:
    hidden, labels = torch.randn(2, 3, D, requires_grad=True), torch.tensor([[1, PAD, 2], [PAD, PAD, 4]])
    projected_cross_entropy(hidden, torch.randn(V, D), None, labels, PAD, 0.1).backward()
    assert (hidden.grad.abs().sum(-1) > 0).tolist() == (labels != PAD).tolist()
    hidden, weight = torch.randn(4, D, requires_grad=True), torch.randn(V, D, requires_grad=True)
    value = projected_cross_entropy(hidden, weight, None, torch.full((4,), PAD), PAD, 0.1)
    value.backward()
    assert value.item() == 0.0 and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("alpha", [None, 5.0], ids=["one pass", "two passes"])
def test_half_precision_is_as_near_as_its_rounding(alpha) -> None:
    """Hidden states in bfloat16, as autocast gives them, against the same numbers in float32; the loss stays in float32."""
    given, weight, labels = torch.randn(2, 40, D).bfloat16(), torch.randn(V, D), torch.randint(4, V, (40,))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, table = given.to(dtype).requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            if alpha is None:
                value = projected_cross_entropy(hidden, table, None, labels.expand(2, -1), PAD, 0.1)
            else:
                value = r_drop_cross_entropy(hidden, table, None, labels, PAD, 0.1, alpha)
        value.backward()
        assert (value.dtype, hidden.grad.dtype, table.grad.dtype) == (torch.float32, dtype, torch.float32)
        found[dtype] = value.detach(), hidden.grad.float(), table.grad
    for exact, rounded in zip(found[torch.float32], found[torch.bfloat16], strict=True):
        assert (exact - rounded).norm() < 0.02 * exact.norm()
    with torch.autocast("cpu", torch.bfloat16):  # of states in single precision, it is the same
        value = projected_cross_entropy(given.float(), weight, None, labels.expand(2, -1), PAD, 0.1)
    assert torch.equal(value, found[torch.float32][0]) or alpha is not None
