"""The tensors of a bundle's graphs, as its manifest lists them: what a format version asks for, and whether a list is that."""

from collections.abc import Sequence

from msgspec import Struct

from dragoman.export.caches import Cache, names_of, passed_names, state_names
from dragoman.export.fields import TensorList, listed
from dragoman.export.tensor_names import TensorNames


class Tensors(Struct, frozen=True, forbid_unknown_fields=True):
    """Inputs and outputs of the graphs, in the graphs' order."""

    encoder_inputs: TensorList
    encoder_outputs: TensorList
    decoder_inputs: TensorList
    decoder_outputs: TensorList
    scorer_inputs: TensorList
    scorer_outputs: TensorList

    @classmethod
    def of_layers(cls, num_decoder_layers: int, is_packed: bool = True) -> "Tensors":
        """Return what this format version asks of graphs with so many decoder layers."""
        return cls(*TensorNames.of_layers(num_decoder_layers, is_packed))

    @classmethod
    def of_caches(
        cls, caches: Sequence[Cache], is_packed: bool = True, *, has_prompts: bool = False, has_attention: bool = True
    ) -> "Tensors":
        """Return what it asks of graphs with these caches; see `TensorNames.of_caches`."""
        names = TensorNames.of_caches(
            names_of(caches, "self"),
            names_of(caches, "cross"),
            passed_names(caches),
            is_packed,
            state_names=state_names(caches),
            has_prompts=has_prompts,
            has_attention=has_attention,
        )
        return cls(*names)


def check_tensors(tensors: Tensors, expected: Tensors) -> None:
    """Refuse tensors that are not the ones this format version asks for.

    Raises:
        ValueError: Naming those that are missing, unknown or there twice.
    """
    for field in Tensors.__struct_fields__:
        wanted, found = getattr(expected, field), getattr(tensors, field)
        missing, unknown = set(wanted) - set(found), set(found) - set(wanted)
        if missing:
            raise ValueError(f"tensors.{field} lacks {listed([name for name in wanted if name in missing])}")
        if unknown:
            raise ValueError(f"tensors.{field} has unknown {listed([name for name in found if name in unknown])}")
        if len(found) > len(wanted):
            raise ValueError(f"tensors.{field} has a tensor twice")
