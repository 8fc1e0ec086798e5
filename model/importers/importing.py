"""Import of a foreign folder: a checkpoint of ours, which appears whole or not at all, and a report."""

import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.checkpoint_folder import CONFIG_FILE, WEIGHTS_FILE
from dragoman.model.config import ModelConfig
from dragoman.model.files import put_directory
from dragoman.model.importers.families import family_of
from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.generation import SEARCH_FIELDS, TOKEN_FIELDS, ForeignGeneration, read_generation
from dragoman.model.importers.languages import TASKS_FIELD, Wishes, tasks_of
from dragoman.model.importers.mapping import Family, lay_out, load, model_config
from dragoman.model.importers.report import Report
from dragoman.model.importers.special_tokens import with_special_tokens
from dragoman.model.importers.tokenizers import read_tokenizers
from dragoman.model.importers.verifying import verify_against_transformers, verify_written
from dragoman.model.importers.weights import Foreign, Limits

_MAX_NAME: Final = 64
_PADDING: Final = {
    "masked": "never generated, as bad_words_ids says; the probability that the model gives it is lost",
    "excluded": "never generated, as bad_words_ids says; its probability goes to the other tokens (renormalize_logits)",
    "predicted": "generated if the model gives it the best score, for nothing in the folder rules it out (bad_words_ids would)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Options of an import.

    Attributes:
        name: Of the model; empty for the folder's.
        limits: Of lengths.
        wishes: Languages and tasks.
        is_half: Keep weights in half precision.
        is_forced: Let the checkpoint take the place of one that is there.
        is_checked: Compare with Transformers, too.
        reads_special_tokens: Special tokens that a text names are tokens where a request does not say.
    """

    name: str = ""
    limits: Limits = field(default_factory=Limits)
    wishes: Wishes = field(default_factory=Wishes)
    is_half: bool = False
    is_forced: bool = False
    is_checked: bool = False
    reads_special_tokens: bool = False


def import_checkpoint(source: Path, output: Path, order: Order) -> Report:
    """Read a foreign folder and write a checkpoint.

    Raises:
        ForeignError: Naming the file, and what is missing, damaged, not supported, or in the way.
        CheckpointError: If the written checkpoint cannot be read.
    """
    output = output.absolute()
    check_output(source, output, order.is_forced)
    report = Report()
    foreign = Foreign.open(source)
    family = family_of(foreign.config)
    layout = lay_out(family, foreign, order.limits, report)
    fields = foreign.generation.fields if foreign.generation.path.exists() else None
    config, tokenizer = foreign.config.fields, foreign.tokenizer.fields
    generation = read_generation(source, layout.config, config, fields, tokenizer, order.wishes)
    network = model_config(foreign.config, **layout.config.to_dict() | {"padding": generation.padding})
    layout = replace(layout, config=network)
    tokenizers = read_tokenizers(foreign, family.tokenizers, network, report)
    tokenizers = with_special_tokens(foreign, tokenizers, network, generation, order.reads_special_tokens, report)
    defaults = msgspec.structs.replace(generation.defaults, special_tokens_in_text=order.reads_special_tokens or None)
    model = load(layout, foreign.weights)
    _tell(foreign, family, network, generation, report)
    name = order.name or default_name(source.absolute().name, family.model_type)
    checkpoint = Checkpoint(name, model, tokenizers, generation.template, generation.languages, defaults)
    if order.is_checked:
        verify_against_transformers(source, checkpoint, report)
    _write(checkpoint, output, order, report)
    return report


def default_name(name: str, otherwise: str) -> str:
    """Return a name that a model can be served by, as near as can be to that of a folder or a repository."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:_MAX_NAME] or otherwise


def check_output(source: Path, output: Path, is_forced: bool) -> None:
    """Refuse an output that lies in the source or around it, or that holds something else than a checkpoint to be replaced.

    Raises:
        ForeignError: Naming what is in the way.
    """
    inner, outer = output.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise ForeignError(f"{output}: lies in {source} or around it; choose another place")
    if output.exists() or output.is_symlink():
        if not output.is_dir():
            raise ForeignError(f"{output}: exists and is not a directory")
        if any(output.iterdir()):
            if not is_forced:
                raise ForeignError(f"{output}: exists and is not empty; --force replaces a checkpoint")
            if not ((output / CONFIG_FILE).is_file() and (output / WEIGHTS_FILE).is_file()):
                raise ForeignError(f"{output}: exists and is not a checkpoint; it will not be replaced")
    place = next(parent for parent in output.parents if parent.exists())
    if not place.is_dir():
        raise ForeignError(f"{place}: exists and is not a directory")


def _tell(foreign: Foreign, family: Family, config: ModelConfig, generation: ForeignGeneration, report: Report) -> None:
    """Report the network, the weights and the settings of generation."""
    weights = foreign.weights
    report.found[:0] = [
        f"{family.name} (model_type {family.model_type}): {config.num_encoder_layers}+{config.num_decoder_layers} layers, "
        f"d_model {config.d_model}, {config.num_heads} heads of {config.head_dim}, {config.source_vocab_size:,} source and "
        f"{config.target_vocab_size:,} target tokens",
        f"weights: {weights.path.name}, {len(weights)} tensors of {' and '.join(sorted(weights.dtypes))}"
        f"{'' if weights.dtypes == {'F32'} else ', read into single precision'}",
    ]
    report.translated.append(f"the padding token, {config.pad_id}, is {_PADDING[config.padding]}")
    report.translated += [*generation.notes, *generation.fields]
    told = SEARCH_FIELDS | TOKEN_FIELDS | ({TASKS_FIELD} if tasks_of(foreign.config.fields) else set())
    report.ignore_unread(foreign.config.unread, told)


def _write(checkpoint: Checkpoint, output: Path, order: Order, report: Report) -> None:
    """Write a checkpoint beside its place, read it again, and put it there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as staging:
            directory = Path(staging) / "checkpoint"
            checkpoint.save(directory, order.is_half)
            verify_written(directory, checkpoint, order.is_half, report)
            put_directory(directory, output, Path(staging) / "replaced")
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ForeignError(f"{output}: {reason}") from error
