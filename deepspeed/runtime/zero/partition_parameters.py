"""Old address of `zero.Init`: the very module `deepspeed.zero.init_context`, so that a name patched here is in use."""

from __future__ import annotations

import sys

from deepspeed.zero import init_context
from deepspeed.zero.client_surface import ZeroParamStatus, ZeroParamType
from deepspeed.zero.gathered import GatheredParameters, register_external_parameter, unregister_external_parameter
from deepspeed.zero.init_context import Init, get_accelerator

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
