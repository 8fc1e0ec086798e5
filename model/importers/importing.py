"""Import of a foreign folder: a checkpoint of ours, which appears whole or not at all, and a report.

The written checkpoint is read again and compared with what was read; on request its network is compared with Transformers.
"""

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.checkpoint_folder import CONFIG_FILE, WEIGHTS_FILE
from dragoman.model.config import ModelConfig
from dragoman.model.files import put_directory
from dragoman.model.generation import Languages, LanguageTable, around
from dragoman.model.importers.families import family_of
from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.generation import SEARCH_FIELDS, TOKEN_FIELDS, ForeignGeneration, read_generation
from dragoman.model.importers.languages import TASKS_FIELD, PromptOptions, tasks_of
from dragoman.model.importers.mapping import Family, lay_out, load, model_config
from dragoman.model.importers.report import Report
from dragoman.model.importers.tokenizers import read_tokenizers, with_special_tokens
from dragoman.model.importers.weights import Foreign, Limits

_MAX_NAME: Final = 64
# Of the largest logit, at least 1: sums in another order differ by less.
_TOLERANCE: Final = 1e-4
_ROWS, _SOURCE, _TARGET = 4, 16, 12
_TEXTS: Final = (
    "The house is small.",
    "What does it cost, 12.50 or 3,000?",
    "Größe und Maß: schön, daß es (fast) regnet!",
    "L’été dernier, elle a dit : « peut-être ».",
    "Он сказал: «Привет».",
    "今天天气很好。",
)
_PADDING: Final = {
    "masked": "never generated, as bad_words_ids says; the probability that the model gives it is lost",
    "excluded": "never generated, as bad_words_ids says; its probability goes to the other tokens (renormalize_logits)",
    "predicted": "generated if the model gives it the best score, for nothing in the folder rules it out (bad_words_ids would)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options of an import; without a name, the model has the folder's.

    With `reads_special_tokens`, special tokens that a text names are tokens where a request does not say.
    """

    name: str = ""
    limits: Limits = field(default_factory=Limits)
    prompts: PromptOptions = field(default_factory=PromptOptions)
    is_half: bool = False
    is_forced: bool = False
    is_checked: bool = False
    reads_special_tokens: bool = False


def import_checkpoint(source: Path, output: Path, options: ImportOptions) -> Report:
    """Read a foreign folder and write a checkpoint.

    Raises:
        ForeignError: Naming the file, and what is missing, damaged, not supported, or in the way.
        CheckpointError: If the written checkpoint cannot be read.
    """
    output = output.absolute()
    check_output(source, output, options.is_forced)
    report = Report()
    foreign = Foreign.open(source)
    family = family_of(foreign.config)
    layout = lay_out(family, foreign, options.limits, report)
    fields = foreign.generation.fields if foreign.generation.path.exists() else None
    config, tokenizer = foreign.config.fields, foreign.tokenizer.fields
    generation = read_generation(source, layout.config, config, fields, tokenizer, options.prompts)
    network = model_config(foreign.config, **layout.config.to_dict() | {"padding": generation.padding})
    tokenizers = read_tokenizers(foreign, family.tokenizers, network, report)
    tokenizers = with_special_tokens(foreign, tokenizers, network, generation.token_ids, options.reads_special_tokens, report)
    defaults = msgspec.structs.replace(generation.defaults, special_tokens_in_text=options.reads_special_tokens or None)
    model = load(layout._replace(config=network), foreign.weights)
    _tell(foreign, family, network, generation, report)
    name = options.name or default_name(source.absolute().name, str(config["model_type"]))
    checkpoint = Checkpoint(name, model, tokenizers, generation.template, generation.languages, defaults)
    if options.is_checked:
        _verify_against_transformers(source, checkpoint, report)
    _write(checkpoint, output, options, report)
    return report


def default_name(name: str, otherwise: str) -> str:
    """Return a name that a model can be served by, as near as can be to that of a folder or a repository."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:_MAX_NAME] or otherwise


def check_output(source: Path, output: Path, is_forced: bool) -> None:
    """Refuse an output that lies in the source or around it, or that holds something else than a checkpoint to be replaced."""
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
    weights, model_type = foreign.weights, foreign.config.fields["model_type"]
    report.found[:0] = [
        f"{family.name} (model_type {model_type}): {config.num_encoder_layers}+{config.num_decoder_layers} layers, "
        f"d_model {config.d_model}, {config.num_heads} heads of {config.head_dim}, {config.source_vocab_size:,} source and "
        f"{config.target_vocab_size:,} target tokens",
        f"weights: {weights.path.name}, {len(weights)} tensors of {' and '.join(sorted(weights.dtypes))}"
        f"{'' if weights.dtypes == {'F32'} else ', read into single precision'}",
    ]
    report.translated.append(f"the padding token, {config.pad_id}, is {_PADDING[config.padding]}")
    report.translated += [*generation.notes, *generation.fields]
    told = SEARCH_FIELDS | TOKEN_FIELDS | ({TASKS_FIELD} if tasks_of(foreign.config.fields) else set())
    report.ignore_unread(foreign.config.unread, told)


def _write(checkpoint: Checkpoint, output: Path, options: ImportOptions, report: Report) -> None:
    """Write a checkpoint beside its place, read it again, and put it there."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as staging:
            directory = Path(staging) / "checkpoint"
            checkpoint.save(directory, options.is_half)
            _verify_written(directory, checkpoint, options.is_half, report)
            put_directory(directory, output, Path(staging) / "replaced")
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ForeignError(f"{output}: {reason}") from error


def _verify_written(directory: Path, checkpoint: Checkpoint, is_half: bool, report: Report) -> None:
    """Read a written checkpoint: it has every weight as it was read, and its logits are numbers."""
    written = Checkpoint.load(directory)
    parameters = dict(written.model.named_parameters())
    for name, parameter in checkpoint.model.named_parameters():
        expected = parameter.half().float() if is_half else parameter
        if not torch.equal(parameters[name], expected):
            raise ForeignError(f"{directory}: {name} was written as another")
    with torch.no_grad():
        logits: Tensor = written.model(*_inputs(written))
    if not logits.isfinite().all():
        raise ForeignError(f"{directory}: random tokens make logits that are no numbers")
    count = sum(parameter.numel() for parameter in parameters.values())
    how = "rounded to half precision" if is_half else "bit for bit what was read"
    report.checked.append(f"{count:,} weights read again from the checkpoint, {how}; logits of random tokens are finite")


def _verify_against_transformers(source: Path, checkpoint: Checkpoint, report: Report) -> None:
    """Load the foreign folder in Transformers, too, and compare logits of random tokens and ids of texts."""
    try:
        from transformers import AutoModelForSeq2SeqLM
        from transformers.utils import logging as transformers_logging
    except ImportError as error:
        raise ForeignError("--check compares with Transformers, which is not installed: pip install transformers") from error
    logging: Any = transformers_logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        theirs = AutoModelForSeq2SeqLM.from_pretrained(
            source, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        ).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ForeignError(f"{source}: Transformers cannot read it: {error}") from error
    sources, lengths, targets = _inputs(checkpoint)
    mask = torch.arange(sources.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected: Tensor = theirs(
            input_ids=sources,
            attention_mask=mask.long(),
            decoder_input_ids=targets,
            decoder_attention_mask=torch.ones_like(targets),
        ).logits
        found: Tensor = checkpoint.model(sources, lengths, targets)
    difference = (found - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    if not difference <= _TOLERANCE * scale:
        allowed = f"{difference:.1e}, where {_TOLERANCE * scale:.1e} is allowed"
        raise ForeignError(f"{source}: logits differ from those of Transformers by {allowed}")
    within = f"within {difference:.1e} of those of Transformers (the largest is {scale:.1f})"
    report.checked.append(f"logits of {_ROWS} random sources are {within}")
    _compare_texts(source, checkpoint, report)


def _compare_texts(source: Path, checkpoint: Checkpoint, report: Report) -> None:
    """Report the number of texts whose ids are those of Transformers' tokeniser."""
    from transformers import AutoTokenizer

    languages = checkpoint.languages or Languages()
    default = LanguageTable(languages.source, languages.default_source).default
    language = default or next(iter(languages.source), None)
    try:
        theirs = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        if language is not None and hasattr(theirs, "src_lang"):
            theirs.src_lang = language.code
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        report.checked.append(f"Transformers cannot read the tokeniser: {' '.join(str(error).split())[:200]}")
        return
    said = around(checkpoint.template, language, None, checkpoint.model.config.eos_id)
    ours = [[*said.source_prefix, *ids, *said.source_suffix] for ids in checkpoint.tokenizers.source.encode_batch(_TEXTS)]
    equal = sum(ids == theirs(text)["input_ids"] for ids, text in zip(ours, _TEXTS, strict=True))
    report.checked.append(f"ids of {equal} of {len(_TEXTS)} texts, special tokens included, are those of Transformers’ tokeniser")


def _inputs(checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor]:
    """Return random sources `[B, S]`, their lengths `[B]` and targets `[B, T]`, of one generator's numbers."""
    config = checkpoint.model.config
    chosen = torch.Generator().manual_seed(0)
    size = min(_SOURCE, config.max_source_positions), min(_TARGET, config.max_target_positions)
    sources = torch.randint(config.source_vocab_size, (_ROWS, size[0]), generator=chosen)
    # Padding within a text would be another length.
    sources = sources.where(sources != config.pad_id, config.eos_id)
    lengths = torch.randint(1, size[0] + 1, (_ROWS,), generator=chosen)
    sources = sources.where(torch.arange(size[0]) < lengths[:, None], config.pad_id)
    targets = torch.randint(config.target_vocab_size, (_ROWS, size[1]), generator=chosen)
    targets = targets.where(targets != config.pad_id, config.eos_id)
    targets[:, 0] = config.decoder_start_id
    return sources, lengths, targets
