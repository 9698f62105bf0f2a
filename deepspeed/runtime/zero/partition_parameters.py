"""Old address of `zero.Init`: the very module `deepspeed.zero.api.init_context`, so that a name patched here is in
use.
"""

from __future__ import annotations

import sys

from deepspeed.zero.api import init_context
from deepspeed.zero.api.gathered_parameters import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
)
from deepspeed.zero.api.init_context import Init, get_accelerator
from deepspeed.zero.parameters.ds_attributes import ZeroParamStatus, ZeroParamType

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
]
for _name in __all__:
    setattr(init_context, _name, globals()[_name])
sys.modules[__name__] = init_context
