"""Position tables that files leave out are Transformers', number for number."""

import pytest
import torch
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.pegasus.modeling_pegasus import PegasusSinusoidalPositionalEmbedding

from dragoman.model.importers.positions import halves, tensor2tensor


@pytest.mark.parametrize("theirs", [MarianSinusoidalPositionalEmbedding, PegasusSinusoidalPositionalEmbedding])
@pytest.mark.parametrize("shape", [(64, 32), (33, 6), (40, 7), (1, 2), (1024, 16)])
def test_halves(theirs: type[MarianSinusoidalPositionalEmbedding], shape: tuple[int, int]) -> None:
    assert torch.equal(halves(*shape), theirs(*shape).create_weight())


@pytest.mark.parametrize(("rows", "width", "padding"), [(66, 32, 1), (34, 6, 0), (1100, 16, 1), (40, 9, 3)])
def test_tensor2tensor(rows: int, width: int, padding: int) -> None:
    """Its row of padding is zero and never read: positions begin behind it."""
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(rows, width, padding)
    assert torch.equal(tensor2tensor(rows, width)[padding + 1 :], theirs[padding + 1 :])
