"""A trained model on disk: `config.json`, `model.safetensors` and `tokenizer.json` in one directory. Never pickle."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dragoman.model.checkpoint_folder import CONFIG_FILE, FORMAT_VERSION, CheckpointFolder
from dragoman.model.checkpoint_folder import WEIGHTS_FILE as WEIGHTS_FILE
from dragoman.model.checkpoint_folder import CheckpointError as CheckpointError
from dragoman.model.files import replaced, write_text
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that makes translations.

    Attributes:
        name: Of the model, for example `en-de`.
        model: In evaluation mode.
        tokenizers: Its vocabularies.
    """

    name: str
    model: Transformer
    tokenizers: Tokenizers

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
        description = {"format_version": FORMAT_VERSION, "name": self.name, "model": self.model.config.to_dict()}
        write_text(directory / CONFIG_FILE, json.dumps(description, indent=2) + "\n")
        self.tokenizers.save(directory)
        with replaced(directory / WEIGHTS_FILE) as temporary:
            save_model(model, str(temporary))

    def _half(self) -> Transformer:
        """Return a copy of the model in half precision."""
        model = copy.deepcopy(self.model).half()
        for name, parameter in model.named_parameters():
            if parameter.isinf().any():
                raise CheckpointError(f"{self.name}: {name} does not fit half precision")
        return model

    @classmethod
    def load(cls, directory: Path, device: torch.device | str = "cpu") -> "Checkpoint":
        """Read a directory that `save` wrote.

        Raises:
            CheckpointError: Naming the file that is missing, damaged, of another format, or does not fit the others.
        """
        folder = CheckpointFolder.load(directory)
        with _NoDrawing():
            model = Transformer(folder.config)
        path = directory / WEIGHTS_FILE
        try:
            load_model(model, path)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        return cls(folder.name, model.to(device).eval(), folder.tokenizers)


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
