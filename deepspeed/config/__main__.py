"""`python -m deepspeed.config` is `ds_config`."""

from __future__ import annotations

import sys

from deepspeed.config.cli import main

sys.exit(main())
