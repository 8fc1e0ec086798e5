"""Networks by the architecture of a configuration; no other module of the package compares its name."""

from collections.abc import Callable

from dragoman.model.config import Architecture, ModelConfig
from dragoman.model.networks.language_model import LanguageModel
from dragoman.model.networks.network import Network
from dragoman.model.networks.rnn import Rnn
from dragoman.model.networks.transformer import Transformer

NETWORKS: dict[Architecture, Callable[[ModelConfig], Network]] = {
    "transformer": Transformer,
    "rnn": Rnn,
    "decoder": LanguageModel,
}


def network(config: ModelConfig) -> Network:
    """Create a network with freshly initialised weights (from PyTorch's global generator)."""
    return NETWORKS[config.architecture](config)
