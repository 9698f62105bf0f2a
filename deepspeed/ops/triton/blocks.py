"""Host's side of the kernels of block-quantised messages: one launch for all blocks of a message.

`use_block_kernels` puts them where `comm/collectives/block_table.py` looks for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import block_table
from deepspeed.comm.collectives.block_table import BlockTable, Parts
from deepspeed.errors import DeepSpeedError, NotAvailableError
from deepspeed.foundation.log import log_once
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import BLOCK_SIZE, KernelVariant, block_variant, block_variants
from deepspeed.ops.triton.variants import KernelForm


class BlockKernelLauncher:
    """Launches of the kernels; see `block_table.BlockKernels`. A method returns False for what no kernel was built for.

    Args:
        kernels: the kernels.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def encode(self, table: BlockTable, values: Tensor, payload: Tensor, memory: Tensor | None, beta: float) -> bool:
        """Do `BlockTable.encode`."""
        variant = block_variant("encode_blocks", values.dtype, table.bits, memory is not None)
        errors = values if memory is None else memory
        if not self._takes(variant, table, errors.dtype if memory is not None else torch.bfloat16):
            return False
        self._launch(variant, table, (values, errors, payload, _scales(payload)), (beta, 1.0 - beta))
        return True

    def decode(self, table: BlockTable, payload: Tensor, out: Tensor) -> bool:
        """Do `BlockTable.decode`."""
        variant = block_variant("decode_blocks", out.dtype, table.bits)
        if not self._takes(variant, table):
            return False
        self._launch(variant, table, (payload, _scales(payload), out))
        return True

    def sum(self, table: BlockTable, parts: Parts, out: Tensor, scale: float, add: bool) -> bool:
        """Do `StackedTable.sum` for an fp32 `out`; `table` is that of one contribution."""
        own = out if parts.values is None else parts.values
        variant = block_variant("sum_blocks", own.dtype, table.bits)
        if not self._takes(variant, table, accumulator=out.dtype) or parts.stride >= 1 << 31:
            return False
        tensors = (parts.payload, _scales(parts.payload), own, out)
        self._launch(variant, table, tensors, (parts.count, parts.own, parts.stride, scale, int(add)))
        return True

    def _takes(
        self,
        variant: KernelVariant | None,
        table: BlockTable,
        memory: torch.dtype = torch.bfloat16,
        accumulator: torch.dtype = torch.float32,
    ) -> bool:
        """Return whether there is a kernel."""
        if variant is None or table.block != BLOCK_SIZE or not table.small:
            return False
        return memory == torch.bfloat16 and accumulator == torch.float32 and self._kernels.has(variant)

    def _launch(
        self,
        variant: KernelVariant | None,
        table: BlockTable,
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...] = (),
    ) -> None:
        if variant is not None and table.blocks:
            grid = (-(-table.blocks // variant.constants["ROWS"]), 1, 1)
            rows = table.rows(tensors[0].device)
            self._kernels.launch(variant, grid, (*tensors, *rows.unbind(0), table.blocks, *numbers))


def _scales(payload: Tensor) -> Tensor:
    """Return a payload as the scales in it are read."""
    return payload[: payload.numel() // 2 * 2].view(torch.int16)


def traffic(variant: KernelForm, arguments: tuple[Any, ...]) -> float:
    """Return the bytes that a launch reads and writes, by formula; for simulations.

    Blocks count as full ones. A row of the tables has 16 bytes, a scale 2.
    """
    names = [name for name, kind in variant.signature.items() if kind != "constexpr"]
    value = dict(zip(names, arguments, strict=True))
    elements = value["blocks"] * variant.constants["BLOCK"]
    encoded = elements * variant.constants["BITS"] / 8 + 2 * value["blocks"]
    tables = 16.0 * value["blocks"]
    if variant.kernel == "encode_blocks":
        memory = 2 * elements * value["memory"].itemsize if variant.constants["MEMORY"] else 0
        return tables + elements * value["values"].itemsize + encoded + memory
    if variant.kernel == "decode_blocks":
        return tables + elements * value["out"].itemsize + encoded
    plain = int(value["own_rank"] >= 0)
    out = elements * value["out"].itemsize * (2 if value["add"] else 1)
    return tables + (value["count"] - plain) * encoded + plain * elements * value["own"].itemsize + out


def use_block_kernels(device: torch.device) -> None:
    """Let messages on a GPU be encoded by compiled kernels; without them torch operators do it, which is logged once.

    Nothing is compiled, and nothing happens for other devices or if there are kernels already.
    """
    if device.type != "cuda" or block_table.kernels.current is not None:
        return
    from deepspeed.ops.triton.load import load_kernels

    try:
        loaded = load_kernels(device=device)
        built = [variant for variant in block_variants() if loaded.has(variant)]
        if not built:
            raise NotAvailableError("the built kernels lack those of messages; build them again")
        loaded.prepare(built)  # here, where an error of one rank keeps no other waiting
    except (DeepSpeedError, RuntimeError, AssertionError, OSError) as error:
        log_once(f"messages are encoded by torch operators, many small ones: {error}")
        return
    block_table.kernels.current = BlockKernelLauncher(loaded)
