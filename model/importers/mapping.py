"""Mapping of foreign networks to ours: an architecture's tables of settings and tensor names, applied to a folder.

Shared and tied token tables are told from the tensors, not from the flags of the configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from dragoman.model.checkpoint import with_weights
from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.importers.files import ForeignError, Settings, is_whole, listed
from dragoman.model.importers.report import Report
from dragoman.model.importers.tokenizers import TokenizerFiles
from dragoman.model.importers.weights import Foreign, Limits, Weights
from dragoman.model.networks.transformer import Transformer, transformer_of

SIDES: Final = ("encoder", "decoder")
_ACTIVATIONS: Final = {"relu": "relu", "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh"}
ACTIVATIONS: Final = _ACTIVATIONS | {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}
_BIAS: Final = "final_logits_bias"
_POSITIONS: Final = "embedding.positions"
TableMaker = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Layout of networks, shared by families."""

    settings: Mapping[str, Any]  # fixed settings of `ModelConfig`
    sizes: Mapping[str, str]  # sizes of `ModelConfig`, each with its field of `config.json`
    # Returns the other settings, but for those that the tensors decide.
    read: Callable[["Family", Foreign, Limits, Report], Mapping[str, Any]]
    # Their tensor for each of our parameters but token tables; `{part}` is weight or bias, `{last}` the feed-forward part of a T5
    # layer, `{inner}` its inner projection, `*` q, k and v, which are one matrix here.
    names: Mapping[str, str]
    prefix: str = ""  # before all names but those of the head; `BartModel` and its like are saved without
    unused: tuple[str, ...] = ()  # tensors of old files that no version of the network reads
    is_head_required: bool = True  # whether a projection that is said to be untied must be there


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models."""

    name: str  # its usual name
    architecture: Architecture  # layout of its network
    settings: Mapping[str, Any]  # its fixed settings of `ModelConfig`
    defaults: Mapping[str, Any]  # Transformers' values for fields that `config.json` lacks
    tokenizers: tuple[TokenizerFiles, ...]  # files of its tokeniser; `tokenizer.json` is read where these are missing
    has_output_bias: bool = False  # the logits may have a bias each
    make_positions: TableMaker | None = None  # makes the position tables that files leave out; None where they are trained
    has_longer_tables: bool = False  # position tables are made as long as needed, whatever `max_position_embeddings` says


class Layout(NamedTuple):
    """A network before its weights are read: configuration, and the tensors that make up each parameter, one below the other."""

    config: ModelConfig
    names: Mapping[str, tuple[str, ...]]
    make_positions: TableMaker | None


def lay_out(family: Family, foreign: Foreign, limits: Limits, report: Report) -> Layout:
    """Return our configuration, and the tensors that our parameters are made of."""
    config, weights, kind = foreign.config, foreign.weights, family.architecture
    prefix = kind.prefix if any(f"{kind.prefix}{side}.layers.0.fc1.weight" in weights for side in SIDES) else ""
    sizes = {ours: config.size(theirs) for ours, theirs in kind.sizes.items()}
    fields = {**kind.settings, **sizes, "padding": "predicted", **kind.read(family, foreign, limits, report)}
    ours = model_config(config, **fields)
    if ours.num_encoder_layers + ours.num_decoder_layers > len(weights):
        raise ForeignError(f"{config.path}: more layers than {weights.path} has tensors")
    for name in kind.unused:
        if f"{prefix}{name}" in weights:
            weights.pass_over(f"{prefix}{name}")
    is_tied = config.find("tie_word_embeddings", bool) is not False
    tables = _choose_tables(prefix, weights, report, is_tied, ours.is_embedding_shared, kind.is_head_required)
    has_bias = family.has_output_bias and _BIAS in weights
    if has_bias and not (has_bias := bool(weights.read(_BIAS).any())):
        report.translated.append(f"{_BIAS} is zero everywhere: left out")
    fields |= {"is_embedding_shared": tables.encoder == tables.decoder, "is_projection_tied": tables.head == tables.decoder}
    ours = model_config(config, **fields, has_output_bias=has_bias)
    names: dict[str, tuple[str, ...]] = {
        "encoder.embedding.tokens.weight": (tables.encoder,),
        "decoder.embedding.tokens.weight": (tables.decoder,),
        "decoder.projection.weight": (tables.head,),
        "decoder.output_bias": (_BIAS,),
    }
    depth, inner = max(ours.num_encoder_layers, ours.num_decoder_layers), "wi_1" if ours.is_ffn_gated else "wi"
    for side, n, part in product(SIDES, range(depth), ("weight", "bias")):
        values = {"side": side, "n": n, "part": part, "last": 1 + SIDES.index(side), "inner": inner}
        for ours_name, theirs in kind.names.items():
            name = prefix + theirs.format(**values)
            names[ours_name.format(**values)] = tuple(name.replace("*", which) for which in ("qkv" if "*" in name else "-"))
    return Layout(ours, names, family.make_positions)


def load(layout: Layout, weights: Weights) -> Transformer:
    """Read the weights of a layout; all of them are there and as large as the configuration says, and none is left.

    Raises:
        ForeignError: Naming the file and the tensors that are missing, of another shape, or not used.
    """
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Transformer(layout.config).state_dict().items()}
    used = {name: layout.names[name] for name in shapes}
    if layout.make_positions is not None:
        made = {name for name in used if name.endswith(_POSITIONS) and used[name][0] not in weights}
        used |= dict.fromkeys(made, ())
    names = list(dict.fromkeys(name for parts in used.values() for name in parts))
    if missing := [name for name in names if name not in weights]:
        raise ForeignError(f"{weights.path}: {listed(missing)} missing")
    for name, parts in used.items():
        _check_shapes(parts, shapes[name], weights, name.endswith(_POSITIONS))
    if left := sorted({*weights.unread} - {*names}):
        raise ForeignError(f"{weights.path}: {listed(left)}: nothing in this architecture has a use for it")
    tensors: dict[tuple[str, ...], Tensor] = {}
    found: dict[str, Tensor] = {}
    for name, parts in used.items():
        if not parts:
            assert layout.make_positions is not None
            found[name] = layout.make_positions(*shapes[name])
            continue
        if parts not in tensors:
            read = [weights.read(part) for part in parts]
            tensors[parts] = torch.cat(read) if len(read) > 1 else _cut(read[0], shapes[name])
        found[name] = tensors[parts]
    return transformer_of(with_weights(layout.config, found))


def _cut(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor in our shape: a bias may be [1, V], a table of positions longer."""
    return tensor[: shape[0]].clone() if tensor.dim() == len(shape) and tensor.shape[0] > shape[0] else tensor.reshape(shape)


def _check_shapes(parts: tuple[str, ...], shape: tuple[int, ...], weights: Weights, may_be_longer: bool) -> None:
    """Refuse tensors that do not make up a parameter of that shape."""
    for name in parts:
        found = weights.describe(name)
        expected = (shape[0] // len(parts), *shape[1:])
        size = found.size[1:] if len(found.size) == len(shape) + 1 and found.size[0] == 1 else found.size  # [1, V] of a bias
        if may_be_longer and len(size) == len(shape) and size[0] >= shape[0]:
            size = (shape[0], *size[1:])
        if size != expected:
            raise ForeignError(f"{found.path}: {name} is {list(found.size)}, where config.json asks for {list(expected)}")


class _Tables(NamedTuple):
    """Names of the token tables; two that are equal have one name."""

    encoder: str
    decoder: str
    head: str


def _choose_tables(
    prefix: str, weights: Weights, report: Report, is_tied: bool, are_sides_shared: bool, is_head_required: bool
) -> _Tables:
    """Choose the token tables; refuse a folder that has none for a side, or lacks the head that the configuration requires.

    The flags are those of the configuration; differences between them and the tensors are reported.
    """
    shared, encoder, decoder = (f"{prefix}{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"))
    head = "lm_head.weight"
    of_both = [shared] * are_sides_shared
    is_one = is_tied and are_sides_shared
    first = _first(weights, [encoder, *of_both, *[decoder, head] * is_one])
    second = _first(weights, [decoder, *of_both, *[encoder] * is_one, *[head] * is_tied])
    if not is_tied and is_head_required and head not in weights:
        raise ForeignError(
            f"{weights.path}: {head} is missing, though config.json says that it is a table of its own (tie_word_embeddings)"
        )
    last = _first(weights, [head, second])
    is_really_tied = weights.are_equal(last, second)
    is_really_one = weights.are_equal(first, second)
    chosen = _Tables(second if is_really_one else first, second, second if is_really_tied else last)
    if is_tied and not is_really_tied:
        differing = f"{last} and {second} differ: they stay two"
        report.translated.append(f"config.json says that the output projection is tied to the token table, but {differing}")
    if not is_tied and is_really_tied:
        how = ("there is no projection of its own" if head not in weights else "the tensors are equal") + ": they are one"
        report.translated.append(f"config.json says that the output projection is not tied to the token table, but {how}")
    told = "one token table for both sides" if is_really_one else "a token table for each side"
    report.translated.append(f"{told}, the output projection {'is the decoder’s' if is_really_tied else 'has its own weights'}")
    for name in (shared, encoder, decoder, head):
        if name in weights and name not in chosen:
            if name == shared and not any(weights.are_equal(name, kept) for kept in chosen[:2]):
                report.ignored.append(f"{weights.path.name}: {name}: both sides have tables of their own")
            weights.pass_over(name)
    return chosen


def _first(weights: Weights, names: list[str]) -> str:
    for name in names:
        if name in weights:
            return name
    raise ForeignError(f"{weights.path}: {names[0]} is missing")


def model_config(config: Settings, **fields: Any) -> ModelConfig:
    """Return our configuration; raise `ForeignError`, naming the file, if there can be no such model."""
    try:
        return ModelConfig(**fields)
    except ModelConfigError as error:
        raise ForeignError(f"{config.path}: {error}") from error


def activation(config: Settings, name: str, value: str) -> str:
    """Return our name of an activation; raise `ForeignError` if it is not supported."""
    if value not in ACTIVATIONS:
        raise ForeignError(f"{config.path}: {name} {value!r} is not known here; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def special_ids(foreign: Foreign, start: int | None = None) -> dict[str, int]:
    """Return the tokens that pad, end and start a sequence: of generation_config.json, where it names them, or of config.json.

    Padding is config.json's first: the network counts positions by it, where the one that `generate` fills rows with has no effect.
    Where neither file names the decoder's start token, it is `start`, or else bos_token_id.
    """
    found = {name: _special_id(foreign, f"{name}_token_id") for name in ("pad", "eos", "decoder_start")}
    if found["decoder_start"] is None:
        found["decoder_start"] = _special_id(foreign, "bos_token_id") if start is None else start
    if missing := [name for name, token_id in found.items() if token_id is None]:
        raise ForeignError(f"{foreign.config.path}: {missing[0]}_token_id is missing")
    return {f"{name}_id": token_id for name, token_id in found.items() if token_id is not None}


def _special_id(foreign: Foreign, name: str) -> int | None:
    files = foreign.generation, foreign.config
    for settings in files[::-1] if name == "pad_token_id" else files:
        value = settings.take(name)
        if isinstance(value, list) and name == "eos_token_id":
            if len(value) != 1:
                raise ForeignError(f"{settings.path}: eos_token_id names {len(value)} ends of sequence; there can be one here")
            value = value[0]
        if value is not None:
            if not is_whole(value):
                raise ForeignError(f"{settings.path}: {name} must be a whole number, not {value!r}")
            return int(value)
    return None
