"""Every family and variant: what is imported computes what Transformers computes of the same folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.importers.foreign import Foreign, Limits
from dragoman.model.importers.layout import load
from dragoman.model.importers.registry import FAMILIES, family_of
from dragoman.model.importers.report import Report
from dragoman.model.networks.transformer import Transformer
from tests.model.importers.conftest import change_json
from tests.oracles.checkpoints import load_tokenizer
from tests.oracles.texts import lines
from tests.oracles.variants import VARIANTS

# T5's activation and norms are ONNX Runtime's and PyTorch's own here, and spelt out there: they differ in the last bits.
T5_TOLERANCE = 2e-5
LAYOUTS = ("hub", "transformers")


def network(folder: Path, **limits: Any) -> Transformer:
    """Read a folder's network, without its texts."""
    foreign = Foreign.open(folder)
    family = family_of(foreign.config)
    return load(family.architecture.lay_out(foreign, Limits(**limits), Report()), foreign.weights)


def logits(model: Transformer, folder: Path, kind: str, size: int = 13) -> tuple[Tensor, Tensor]:
    """Return the logits of random sources and targets of ours and of theirs."""
    config, chosen = model.config, torch.Generator().manual_seed(1)
    usable = min(config.source_vocab_size, config.target_vocab_size)
    lengths = torch.tensor([size, 1, 5, size - 1])
    sources = torch.randint(3, usable, (4, size), generator=chosen)
    mask = torch.arange(size) < lengths[:, None]
    others = (sources == config.pad_id) & mask
    sources = sources.where(mask & ~others, config.pad_id).where(~others, config.eos_id)
    targets = torch.randint(3, usable, (4, 9), generator=chosen)
    targets = targets.where(targets != config.pad_id, config.eos_id)
    targets[:, 0] = config.decoder_start_id
    theirs = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(
            input_ids=sources,
            attention_mask=mask.long(),
            decoder_input_ids=targets,
            decoder_attention_mask=torch.ones_like(targets),
        ).logits
        return model(sources, lengths, targets), expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, layout: str, foreign: Callable[..., Path]) -> None:
    folder = foreign(variant, layout)
    ours, theirs = logits(network(folder), folder, VARIANTS[variant].model)
    assert theirs.std() > 0.5  # answers that say nothing would agree, too
    if VARIANTS[variant].model.startswith(("T5", "MT5", "UMT5")):
        torch.testing.assert_close(ours, theirs, atol=T5_TOLERANCE, rtol=0)
    else:
        assert torch.equal(ours, theirs)


# What of a variant's tokeniser is otherwise in Transformers: its class of T5 takes token 2 for the unknown one, which here is 0.
OTHER_UNKNOWN = {("madlad", "hub")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_becomes_a_checkpoint(variant: str, layout: str, foreign: Callable[..., Path], imported: Any) -> None:
    """Read again it computes the same, and texts have the ids that the family's tokeniser gives them."""
    folder = foreign(variant, layout)
    output, report = imported(folder)
    checkpoint = Checkpoint.load(output)
    expected = network(folder)
    for name, parameter in checkpoint.model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
    assert checkpoint.name == folder.name
    theirs = load_tokenizer(folder)
    texts = list(lines()[:200])
    expected_ids = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    if (variant, layout) in OTHER_UNKNOWN:
        texts = [text for text, ids in zip(texts, expected_ids, strict=True) if 2 not in ids]
        expected_ids = [ids for ids in expected_ids if 2 not in ids]
    assert checkpoint.tokenizers.source.encode_batch(texts) == expected_ids
    target = checkpoint.tokenizers.target
    unknown = target.encode("\ue000")[-1]  # which no vocabulary has
    known = [text for text in texts if unknown not in target.encode(text) and "⁇" not in target.decode(target.encode(text))]
    assert len(known) > 10
    assert [target.decode(target.encode(text)) for text in known] == known
    assert any(line.startswith(FAMILIES[family_of(Foreign.open(folder).config).model_type].name) for line in report.found)


@pytest.mark.parametrize("variant", ["marian", "bart", "m2m100", "pegasus", "t5", "umt5"])
def test_half_precision_weights_are_those_of_transformers(variant: str, copied: Callable[..., Path]) -> None:
    folder = copied(variant)
    kind = getattr(transformers, VARIANTS[variant].model)
    kind.from_pretrained(folder).half().save_pretrained(folder)
    ours, theirs = logits(network(folder), folder, VARIANTS[variant].model)
    torch.testing.assert_close(ours, theirs, atol=T5_TOLERANCE, rtol=0)


@pytest.mark.parametrize(("variant", "most"), [("marian", 160), ("m2m100", 160), ("bart", 160), ("t5", 400)])
def test_the_last_position_is_right(variant: str, most: int, foreign: Callable[..., Path]) -> None:
    """M2M100's table is made here, and may be longer; relative positions have none; every table may be shorter."""
    folder = foreign(variant)
    ours, theirs = logits(network(folder), folder, VARIANTS[variant].model, most)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    if variant == "m2m100":
        model = network(folder, max_source_tokens=700, max_target_tokens=20)
        assert (model.config.max_source_positions, model.config.max_target_positions) == (700, 20)
        ours, theirs = logits(model, folder, VARIANTS[variant].model, 700)  # which makes a longer table when it needs one
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    if variant == "bart":
        assert network(folder, max_source_tokens=20).encoder.embedding.positions.shape[0] == 22


@pytest.mark.parametrize("variant", ["m2m100", "bart", "marian"])
def test_what_generate_fills_rows_with_is_not_the_networks_padding(variant: str, copied: Callable[..., Path]) -> None:
    """M2M100's positions begin behind the padding of config.json, whatever generation_config.json calls so."""
    folder = copied(variant)
    pad_id = json.loads((folder / "config.json").read_text())["pad_token_id"]
    model = network(folder)
    change_json(folder / "generation_config.json", pad_token_id=model.config.eos_id)
    assert network(folder).config == model.config
    assert model.config.pad_id == pad_id
    ours, theirs = logits(network(folder), folder, VARIANTS[variant].model)
    assert torch.allclose(ours, theirs, atol=1e-4)
