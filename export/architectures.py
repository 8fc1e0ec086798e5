"""Export's view of an architecture: its graphs and their consequences; no other module of export distinguishes architectures.

The requirements on every architecture are in `proof.verify`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from dragoman.export.arguments import ExportError
from dragoman.export.fields import Precision
from dragoman.export.graphs.language_model import PromptGraph, TextScorerGraph, TextStepGraph
from dragoman.export.graphs.rnn import RnnEncoderGraph, RnnScorerGraph, RnnStepGraph, rnn_caches
from dragoman.export.graphs.transformer import EncoderGraph, MemoryProjection, ScorerGraph, StepGraph
from dragoman.export.tensors import Cache, Tensors, attention_caches, is_packed, text_caches
from dragoman.export.tracing import GraphModule
from dragoman.model.config import Architecture as Name
from dragoman.model.config import ModelConfig
from dragoman.model.networks.transformer import DecoderLayer, Transformer


@dataclass(frozen=True, slots=True)
class Products:
    """Properties of products known in advance."""

    # Weights that a graph has in one piece, `[n·M, K]`, and their first piece as the model has it, `[M, K]`.
    joint: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # Weights of products whose last columns are keys and values, and what those two caches are called.
    caches: Mapping[Tensor, tuple[str, str]] = field(default_factory=dict)


def transformer_products(model: Transformer) -> Products:
    """Return a Transformer's: its encoder's graph makes one product of those of all layers, which read the same memory."""
    joint = MemoryProjection(model.decoder).weight
    caches: dict[Tensor, tuple[str, str]] = {}
    for i, layer in enumerate(model.decoder.layers):
        own, cross = cast(DecoderLayer, layer).self_attention, cast(DecoderLayer, layer).cross_attention
        caches[own.input.weight] = f"self_k_{i}", f"self_v_{i}"
        caches[cross.input.weight[cross.width :]] = f"cross_k_{i}", f"cross_v_{i}"
    return Products([(joint, joint[: len(joint) // model.config.num_decoder_layers])], caches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Graphs of models of one architecture; a model is a network of that architecture, in the precision of the graph."""

    # Makes what encodes of a model, and of whether sources come packed; or with prompts, what reads a piece of one.
    encoder: Callable[[Any, bool], GraphModule]
    # Makes what decodes of a model, and of the ids that are candidates, rising; None for all.
    step: Callable[[Any, Sequence[int] | None], GraphModule]
    # Makes what scores of a model, and of whether the encoder's graph takes sources packed.
    scorer: Callable[[Any, bool], GraphModule]
    caches: Callable[[ModelConfig], list[Cache]]  # tells what a decode step keeps of a row, as long as nothing of it is in 8 bits
    num_attention_layers: Callable[[ModelConfig], int]  # tells the layers of the attention that the scorer gives; 0 for none
    precisions: tuple[Precision, ...] = ("fp32", "int8")  # in which there are graphs
    has_prompts: bool = False  # whether a source is a prompt, which is read into the caches that steps write
    has_heads: bool = True  # whether the graphs have attention nodes, which ask something of heads
    has_time_axis: bool = False  # whether 8-bit products of a decode step take rows with the time axis that attention asks for
    has_integer_caches: bool = False  # whether caches can be in 8 bits
    has_queries: bool = False  # whether a decode step can output the queries of heads that align
    products: Callable[[Any], Products] = lambda model: Products()  # tells what calibration cannot see

    def modules(self, model: Any, precision: Precision) -> Iterator[GraphModule]:
        """Yield what is traced of a model, each when it is asked for: encoder, decode step and scorer."""
        yield self.encoder(model, is_packed(precision))
        yield self.step(model, None)
        yield self.scorer(model, is_packed(precision))

    def tensors(self, config: ModelConfig, caches: Sequence[Cache], is_packed: bool, **outputs: bool) -> Tensors:
        """Return what the format asks of the graphs of a model with these caches; `outputs` as `Tensors.of_caches` has them."""
        has_attention = self.num_attention_layers(config) > 0
        return Tensors.of_caches(caches, is_packed, has_prompts=self.has_prompts, has_attention=has_attention, **outputs)


ARCHITECTURES: dict[Name, Architecture] = {
    "transformer": Architecture(
        encoder=EncoderGraph,
        step=StepGraph,
        scorer=ScorerGraph,
        caches=lambda config: attention_caches(config.num_decoder_layers, config.num_heads, config.head_dim),
        num_attention_layers=lambda config: config.num_decoder_layers,
        precisions=("fp32", "int8", "fp16", "bf16"),
        has_time_axis=True,
        has_integer_caches=True,
        has_queries=True,
        products=transformer_products,
    ),
    "decoder": Architecture(
        encoder=lambda model, is_packed: PromptGraph(model),
        step=TextStepGraph,
        scorer=lambda model, is_packed: TextScorerGraph(model),
        caches=lambda config: text_caches(config.num_decoder_layers, config.num_heads, config.head_dim),
        num_attention_layers=lambda config: 0,
        has_prompts=True,
        has_time_axis=True,
    ),
    "rnn": Architecture(
        encoder=lambda model, is_packed: RnnEncoderGraph(model),
        step=RnnStepGraph,
        scorer=lambda model, is_packed: RnnScorerGraph(model),
        caches=rnn_caches,
        num_attention_layers=lambda config: int(config.attention != "none"),
        has_heads=False,
    ),
}


def architecture_of(config: ModelConfig) -> Architecture:
    """Return what export has of a model's architecture.

    Raises:
        ExportError: If it has no graphs.
    """
    if config.architecture not in ARCHITECTURES:
        raise ExportError(f"there are no graphs of the architecture {config.architecture}, so it cannot be exported")
    return ARCHITECTURES[config.architecture]


def check_architecture(config: ModelConfig, precision: Precision, cache_precision: str | None) -> Architecture:
    """Return what export has of a model's architecture, which goes with a precision.

    Raises:
        ExportError: If it does not, or the model's caches are ones that no server reserves.
    """
    found = architecture_of(config)
    if precision not in found.precisions:
        known = " and ".join(found.precisions)
        raise ExportError(f"models of the architecture {config.architecture} are exported in {known}, not in {precision}")
    if cache_precision == "int8" and not found.has_integer_caches:
        raise ExportError(f"caches of the architecture {config.architecture} cannot be in {cache_precision}")
    try:
        found.caches(config)
    except ValueError as error:
        raise ExportError(f"the model cannot be served: {error}") from error
    return found
