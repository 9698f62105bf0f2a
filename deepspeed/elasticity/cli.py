"""`ds_elastic`: the batch of an `elasticity` block and the numbers of devices that can share it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.elasticity.batch import compute_elastic_config
from deepspeed.version import __version__


def main(args: Sequence[str] | None = None) -> int:
    """Print what the block comes to.

    Args:
        args: command line; None takes the process's own.

    Returns:
        0, or 1 when the block cannot be served.
    """
    parser = argparse.ArgumentParser(prog="ds_elastic", description=__doc__)
    parser.add_argument("-c", "--config", required=True, help="the JSON file")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="ranks: prints their micro-batch too")
    options = parser.parse_args(args)
    try:
        config = json.loads(Path(options.config).read_text())
        elastic = compute_elastic_config(config, __version__, options.world_size)
    except (OSError, ValueError) as error:
        print(f"ds_elastic: {error}", file=sys.stderr)
        return 1
    print(json.dumps(config["elasticity"], indent=4, sort_keys=True))
    print(f"final_batch_size .... {elastic[0]}")
    print(f"valid_gpus .......... {elastic[1]}")
    if options.world_size > 0:
        print(f"micro_batch_size .... {elastic[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
