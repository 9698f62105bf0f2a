"""Block-quantised messages on the card: bytes per second of encoding, decoding and summing, beside a copy."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.gpu.plan import MissingError, Setting
from benchmarks.gpu.results import Results
from benchmarks.gpu.rounds import timed
from deepspeed.comm.collectives.block_table import BlockTable
from deepspeed.errors import DeepSpeedError

ROUNDS = 10


def measure(setting: Setting) -> dict[str, Any]:
    """A row of the part `kernels`: gradients of 64 Mi elements in bf16, with 8 and 4 bits."""
    if setting.rehearse:
        raise MissingError("interpreted kernels have no speed")
    from deepspeed.ops.triton.blocks import BlockKernelLauncher
    from deepspeed.ops.triton.load import load_kernels
    from deepspeed.ops.triton.row_variants import block_variants

    try:
        kernels = load_kernels()
        kernels.prepare(variant for variant in block_variants() if kernels.has(variant))
    except DeepSpeedError as error:
        raise MissingError(f"kernels: {error}") from error
    launcher = BlockKernelLauncher(kernels)
    count, says, facts = 1 << 26, [], {}
    copy = Results(setting.folder).rows().get(("environment", "ceilings"), {}).get("bandwidth")
    values = torch.randn(count, device="cuda", dtype=torch.bfloat16)
    for bits in (8, 4):
        table = BlockTable(bits, 256, [([count], 0, 0)])
        payload = torch.empty(table.nbytes, dtype=torch.uint8, device="cuda")
        out = torch.empty_like(values)
        if not (launcher.encode(table, values, payload, None, 0.0) and launcher.decode(table, payload, out)):
            raise MissingError("no kernels of messages are compiled")
        moved = values.nbytes + payload.nbytes
        for name, work in {
            "encode": lambda t=table, p=payload: launcher.encode(t, values, p, None, 0.0),
            "decode": lambda t=table, p=payload, o=out: launcher.decode(t, p, o),
        }.items():
            rate = moved / statistics.median(timed(work) for _ in range(ROUNDS))
            facts[f"{name} {bits}"] = rate
            share = f" ({rate / copy:.2f} of a copy)" if copy else ""
            says.append(f"{name} {bits} bits {rate / 1e12:.2f} TB/s{share}")
        error = float((out.float() - values.float()).abs().max())
        facts[f"error {bits}"] = error
    return {"says": ", ".join(says), "ok": facts["error 8"] < 0.05, **facts}
