"""A trained model on disk: `config.json`, `model.safetensors` and `tokenizer.json` in one directory. Never pickle."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dragoman.model.checkpoint_folder import CONFIG_FILE, CheckpointFolder, describe
from dragoman.model.checkpoint_folder import WEIGHTS_FILE as WEIGHTS_FILE
from dragoman.model.checkpoint_folder import CheckpointError as CheckpointError
from dragoman.model.config import ModelConfig
from dragoman.model.files import replaced, write_text
from dragoman.model.generation import Defaults, Languages, Template
from dragoman.model.networks.architectures import network
from dragoman.model.networks.network import Network
from dragoman.model.text.tokenizers import Tokenizers


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that makes translations."""

    name: str  # of the model, for example `en-de`
    model: Network  # in evaluation mode
    tokenizers: Tokenizers  # its vocabularies
    template: Template = field(default_factory=Template)  # tokens around every text
    languages: Languages | None = None  # those it reads and writes; None where it is not told them
    defaults: Defaults = field(default_factory=Defaults)  # values for fields that a request leaves out

    def save(self, directory: Path, is_half: bool = False) -> None:
        """Write into a directory, made if absent; each file appears whole or not at all.

        Args:
            directory: Where to.
            is_half: Round weights to half precision (float16): half the size, read back into single precision.

        Raises:
            CheckpointError: If a weight is too large for half precision.
        """
        model = self._half() if is_half else self.model
        directory.mkdir(parents=True, exist_ok=True)
        description = describe(self.name, self.model.config, self.template, self.languages, self.defaults)
        write_text(directory / CONFIG_FILE, json.dumps(description, indent=2) + "\n")
        self.tokenizers.save(directory)
        with replaced(directory / WEIGHTS_FILE) as temporary:
            save_model(model, str(temporary))

    def _half(self) -> Network:
        """Return a model with the weights in half precision; what parts share is rounded once."""
        rounded: dict[int, Tensor] = {}
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.model.state_dict(keep_vars=True).items():
            if id(parameter) not in rounded:
                rounded[id(parameter)] = parameter.detach().half()
                if rounded[id(parameter)].isinf().any():
                    raise CheckpointError(f"{self.name}: {name} does not fit half precision")
            tensors[name] = rounded[id(parameter)]
        return _assigned(self.model.config, tensors)

    @classmethod
    def load(cls, directory: Path, device: torch.device | str = "cpu") -> "Checkpoint":
        """Read a directory that `save` wrote.

        Raises:
            CheckpointError: Naming the file that is missing, damaged, of another format, or does not fit the others.
        """
        folder = CheckpointFolder.load(directory)
        path = directory / WEIGHTS_FILE
        try:
            model = with_weights(folder.config, load_file(path))
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        return cls(folder.name, model.to(device), folder.tokenizers, folder.template, folder.languages, folder.defaults)


def with_weights(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Network:
    """Return a model, in evaluation mode, whose parameters *are* these tensors where they are in single precision: none is copied.

    Args:
        config: Its dimensions.
        tensors: Each parameter by one of its names at least; one that several parts of the model share has several.

    Raises:
        ValueError: Naming tensors that are missing, not of the model or of another shape.
    """
    given = {name: tensor.float() for name, tensor in tensors.items()}
    return _assigned(config, given)


def _assigned(config: ModelConfig, tensors: dict[str, Tensor]) -> Network:
    """Return a model, in evaluation mode, whose parameters are these tensors, of whatever precision."""
    with _NoDrawing():
        model = network(config)
    names: dict[int, list[str]] = {}
    for name, parameter in model.state_dict(keep_vars=True).items():
        names.setdefault(id(parameter), []).append(name)
    for shared in names.values():
        found = next((tensors[name] for name in shared if name in tensors), None)
        if found is not None:
            tensors.update(dict.fromkeys(shared, found))
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(" ".join(str(error).split())) from error
    return model.eval()


# Called with what is to be filled as `self`, or as `tensor`.
_DRAWING = (Tensor.uniform_, Tensor.normal_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_)


class _NoDrawing(TorchFunctionMode):
    """Leaves weights undrawn that are read from a file right after: it holds them all, or is refused. All else is made as usual."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return a tensor as it is in place of filling it with random numbers."""
        kwargs = kwargs or {}
        if func in _DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any] | None = None) -> None:
    """Write tensors and a JSON object in one safetensors file, atomically."""
    with replaced(path) as temporary:
        save_file(tensors, temporary, {"json": json.dumps(metadata or {})})


def average_weights(paths: list[Path]) -> dict[str, Tensor]:
    """Return the mean of several weight files (Vaswani et al., 2017, section 6.1), summed in float64.

    Raises:
        ValueError: If they do not all hold tensors of the same names; a shared one has one name among a run's validated weights
            and another in a checkpoint.
    """
    total = {name: tensor.double() for name, tensor in load_file(paths[0]).items()}
    for path in paths[1:]:
        weights = load_file(path)
        if weights.keys() != total.keys():
            raise ValueError(f"{path} and {paths[0]} differ in {', '.join(sorted(weights.keys() ^ total.keys()))}")
        for name, tensor in weights.items():
            total[name] += tensor
    return {name: (tensor / len(paths)).float() for name, tensor in total.items()}


def average_checkpoints(directories: Sequence[Path]) -> Checkpoint:
    """Load checkpoints and return the first with the mean of all their parameters, summed in float64.

    Args:
        directories: One or more; a directory named twice counts twice.

    Raises:
        CheckpointError: If one cannot be read, or differs from the first in its model (dropouts aside) or its vocabulary; their
            parameters would not mean the same.
    """
    folders = [CheckpointFolder.load(directory) for directory in directories]
    for folder in folders[1:]:
        folders[0].refuse_other_model(folder)
    checkpoints = [Checkpoint.load(directory) for directory in directories]
    parameters = [dict(checkpoint.model.named_parameters()) for checkpoint in checkpoints]  # a shared table comes once
    with torch.no_grad():
        means = {name: torch.stack([each[name].double() for each in parameters]).mean(0) for name in parameters[0]}
        for name, mean in means.items():
            parameters[0][name].copy_(mean)
    return checkpoints[0]
