"""Two ranks that run both sides of the diffs of pages and write their losses: `both_sides.py OUT PORT PAGE …`.

What all sides import is imported once; each side of each rank then is a process of its own, forked before anything has
started, with a port of its own for each side.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import accelerate  # noqa: F401
import torch
import torch._dynamo
import torch.distributed.fsdp

import deepspeed.engine.initialize
import deepspeed.zero.api.init_context  # noqa: F401
from tests.docs.diffs import sides


def run(text: str, name: str, out: Path) -> None:
    """In the child: the side's losses are written to `out`; the process ends here."""
    try:
        torch.set_num_threads(1)
        names = {"__name__": "side"}
        exec(compile(text, name, "exec"), names)
        out.write_text(json.dumps(names["losses"]))
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(out: Path, port: int, pages: list[Path]) -> None:
    every = [(page, side, text) for page in pages for side, text in sides(page).items()]
    for at, (page, side, text) in enumerate(every):
        os.environ["MASTER_PORT"] = str(port + at)
        children = []
        for rank in range(2):
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
            children.append(os.fork())
            if children[-1] == 0:
                run(text, f"{page.name}, {side}", out / f"{page.stem}-{side}-{rank}.json")
        if failed := [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]:
            raise SystemExit(f"{page.name}, {side}: rank(s) {failed} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(path) for path in sys.argv[3:]])
