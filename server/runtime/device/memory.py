"""What a model takes of a device's memory, reckoned before any of it is taken. docs/gpu.md has the formula."""

from dataclasses import dataclass

from dragoman.server.runtime.device.buckets import Buckets
from dragoman.server.runtime.device.device import DeviceError
from dragoman.server.runtime.device.model import DeviceModel

GIB = 2**30
DEFAULT_SHARE = 0.9
"""Of the memory that is free at the start, what is taken where no limit is set."""
MIN_ARENA_BYTES = 2**28
"""Left to ONNX Runtime beyond the weights, at the least, for activations."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of each part.

    Attributes:
        slot_bytes: One slot's caches; in a Transformer 2 · L · H · Dh · (T + S) · bytes of an element.
        caches: All slots'.
        scratch: For laying caches out anew, as large as one of them; nothing where there is one capacity only.
        staging: The encoder's outputs, until they lie in their slots.
        arrays: Inputs and outputs of a step.
        weights: Of both graphs, the table of tokens once more, which they may share on disk, and the output projection twice more,
            as it is widened to single precision.
        activations: An estimate of what a step computes with: logits, log-probabilities and the search for the likeliest.
    """

    slot_bytes: int
    caches: int
    scratch: int
    staging: int
    arrays: int
    weights: int
    activations: int

    @classmethod
    def of(cls, model: DeviceModel, buckets: Buckets, prefill_tokens: int) -> "MemoryPlan":
        """Reckon for a model.

        Args:
            model: Its dimensions.
            buckets: The last of each are what memory is reserved for.
            prefill_tokens: Positions of one run of the encoder at the most, padding included.
        """
        max_rows, width = buckets.rows[-1], model.d_model
        kinds = (model.self_kv, buckets.targets), (model.cross_kv, buckets.sources)
        slot = sum(kind.num_tensors * kind.token_bytes * sizes[-1] for kind, sizes in kinds)
        moved = [kind.token_bytes * sizes[-1] for kind, sizes in kinds if len(sizes) > 1]
        widened = 4 * model.num_choices * width if model.element_bytes == 2 else 0
        shared = model.element_bytes * model.target_vocab_size * width
        return cls(
            slot_bytes=slot,
            caches=slot * max_rows,
            scratch=max(moved, default=0) * max_rows,
            staging=model.cross_kv.num_tensors * model.cross_kv.token_bytes * prefill_tokens,
            arrays=step_input_bytes(max_rows) + step_output_bytes(max_rows, buckets.candidates[-1]) + 16 * prefill_tokens,
            weights=model.weights_bytes + shared + widened,
            activations=max(MIN_ARENA_BYTES, 3 * 4 * max_rows * model.num_choices + 16 * prefill_tokens * width * 4),
        )

    @property
    def reserved(self) -> int:
        """What the runner itself allocates, all of it at the start."""
        return self.caches + self.scratch + self.staging + self.arrays

    @property
    def arena(self) -> int:
        """What ONNX Runtime is expected to take."""
        return self.weights + self.activations

    def budget(self, available: int, limit: int) -> int:
        """Return the bytes that may be taken, having made sure that they are enough.

        Args:
            available: What is free.
            limit: What the operator allows; 0 for `DEFAULT_SHARE` of what is free.

        Raises:
            DeviceError: If it does not fit, with what would.
        """
        allowed = min(limit, available) if limit else int(DEFAULT_SHARE * available)
        if self.reserved + self.arena <= allowed:
            return allowed
        per_slot = self.slot_bytes + (self.scratch + self.arrays) // max(1, self.caches // self.slot_bytes)
        room = allowed - self.arena - self.staging
        num_slots = max(0, room // per_slot)
        advice = f"at most {num_slots} slots fit (--max-slots)" if num_slots else "not even one slot fits"
        raise DeviceError(
            f"{self.caches // self.slot_bytes} slots need {self.reserved / GIB:.2f} GiB of device memory and the model about "
            f"{self.arena / GIB:.2f} GiB, but {allowed / GIB:.2f} GiB may be used of {available / GIB:.2f} GiB free; {advice}"
        )


def step_input_bytes(num_rows: int) -> int:
    """Return the size of a step's tokens, positions and source lengths."""
    return 3 * 8 * num_rows


def step_output_bytes(num_rows: int, num_candidates: int) -> int:
    """Return the size of a step's candidates: ids of 8 bytes, log-probabilities of 4."""
    return 12 * num_rows * num_candidates
