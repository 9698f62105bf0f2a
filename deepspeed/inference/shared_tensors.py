"""Description of tensors in a file in shared memory, without torch."""

from __future__ import annotations

from dataclasses import dataclass

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class SharedTensor:
    """Tensor in a file in shared memory.

    Args:
        name: name of the parameter or buffer in the model's state dict.
        dtype: one of `DTYPES`; values are cast to the parameter's dtype.
        shape: shape of the whole tensor.
        offset: its first byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
