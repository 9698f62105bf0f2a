"""What `accelerate launch` starts in a test: the usual loop, with all that DeepSpeed needs from the command line.

accelerate launch --use_deepspeed … tests/clients/launched.py RESULT.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.clients.accelerate_runs import gloo, loop  # noqa: E402

if __name__ == "__main__":
    accelerator = Accelerator(kwargs_handlers=gloo())
    run, (model, *_) = loop(accelerator)
    found = dataclasses.asdict(run) | {"stage": model.zero_optimization_stage(), "ranks": accelerator.num_processes}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))
    accelerator.end_training()
