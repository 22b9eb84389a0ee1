"""What an optimizer keeps and moves: bytes of state, traffic of a step."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Optimizer"]

_BLOCK_OF_8_BIT = 256  # elements that share a scale: bitsandbytes `blocksize`, torchao the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Memory and traffic of an optimizer.

    Attributes:
        name: such as `AdamW`.
        state_bytes_per_byte: bytes of state per byte of trained parameter (AdamW: 2 moments).
        traffic_bytes_per_byte: bytes read and written in a step per byte of parameter.
        is_foreach: its step holds a temporary as large as the parameters.
        num_states: tensors of state of each parameter, None: as many as bytes per byte.
    """

    name: str
    state_bytes_per_byte: float
    traffic_bytes_per_byte: float
    is_foreach: bool
    num_states: int | None = None

    @classmethod
    def named(cls, name: str, *, is_foreach: bool, item_bytes: int = 4) -> Optimizer:
        """Return the optimizer of that name: AdamW, Adam, SGD, Adagrad, and those of 8 bits.

        Traffic counts reads of parameter, gradient and states and writes of parameter and states.

        Args:
            name: `SGD momentum` for SGD with a momentum; `AdamW8bit` and `Adam8bit` keep a byte an
                element of each moment and a float32 scale for each block of them (Dettmers et al.
                2022, section 2). `Paged...` of these, and `PagedAdamW`: states lie in memory that
                the driver moves to the host when the device is full, so none of it is needed.
            is_foreach: see the class; states of 8 bits have a kernel of their own without one.
            item_bytes: of an element of a stored parameter.

        Raises:
            ValueError: names what is known.
        """
        counts = {"adamw": 2, "adam": 2, "sgd": 0, "sgd momentum": 1, "adagrad": 1}
        narrow = {"adamw8bit": 2, "adam8bit": 2}
        key = name.lower().replace("_", "")
        is_paged = key.startswith("paged") and "adam" in key
        key = key.removeprefix("paged") if is_paged else key
        if key not in counts | narrow:
            known = ", ".join([*counts, *narrow, "paged forms of adamw, adamw8bit"])
            raise ValueError(f"optimizer {name!r} is not known; known are {known}")
        count, size = counts.get(key, 0), 1.0
        if key in narrow:
            count, size = narrow[key], (1 + 4 / _BLOCK_OF_8_BIT) / item_bytes
        return cls(
            name=name,
            state_bytes_per_byte=0.0 if is_paged else count * size,
            traffic_bytes_per_byte=3 + 2 * count * size,
            is_foreach=is_foreach and key not in narrow and not is_paged,
            num_states=0 if is_paged else count,
        )

    def state_sizes(self, nbytes: int) -> tuple[int, ...]:
        """Return the bytes of each state of a parameter of `nbytes`."""
        count = int(self.state_bytes_per_byte) if self.num_states is None else self.num_states
        return (int(nbytes * self.state_bytes_per_byte / count),) * count if count else ()
