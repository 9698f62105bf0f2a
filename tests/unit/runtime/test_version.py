"""`deepspeed.version` is the text that programs compare, whichever way they came to it; its module is there too."""

from __future__ import annotations

from tests.harness.fresh import run_fresh

WAYS = [
    "import deepspeed; v = deepspeed.version",
    "import deepspeed.version; v = deepspeed.version",
    "import deepspeed.version as v",
    "from deepspeed import version as v",
    "from deepspeed.version import __version__ as v; import deepspeed; assert deepspeed.version == v",
    "import importlib; v = importlib.import_module('deepspeed.version').__version__",
    "from deepspeed.git_version_info import version as v",
    "import deepspeed, deepspeed.env_report; from deepspeed.config import DeepSpeedConfig; v = deepspeed.version",
]


CHECK = """
from packaging import version as p; assert type(v) is str and p.parse(v) >= p.parse('0.16.4'), v
import deepspeed; assert v == deepspeed.__version__ and v >= '0.0.1'
"""


def test_it_is_a_text_and_compares_as_one() -> None:
    run_fresh([way + CHECK for way in WAYS])
