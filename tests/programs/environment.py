"""Environments of the programs: one over the environment this runs in, older releases as folders, and the reference.

Everything is installed once into a folder and found again there. The reference is only run, never read.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.clients.versions import layered, torch_line

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ["torchvision", "einops", "msgpack", "ninja", "py-cpuinfo", "fire", "sh", "pytz", "openpyxl", "scikit-learn",
            "tensorboard", "tensorboardX", "boto3", "diffusers", "sentencepiece", "scipy", "timm"]  # fmt: skip
# What programs of 2021 import and newer releases have no more: `transformers.AdamW`, `datasets.load_metric`.
OLDER = ["transformers==4.46.3", "tokenizers==0.20.3", "datasets==2.21.0", "huggingface_hub==0.26.5",
         "accelerate==1.1.1", "dill==0.3.8", "multiprocess==0.70.16", "fsspec==2024.6.1",]  # fmt: skip
REFERENCE = ["deepspeed==0.19.8"]


def interpreter(folder: Path) -> Path:
    """The interpreter of the programs' environment, made at the first call."""
    python = folder / "environment" / "bin" / "python"
    if not (folder / "environment" / "done").exists():
        layered(folder / "environment")
        (folder / "constraints.txt").write_text(torch_line())
        command = [python, "-m", "pip", "install", "-q", "-c", folder / "constraints.txt", *PACKAGES]
        subprocess.run(command, check=True)
        (folder / "environment" / "done").touch()
    return python


def packages(folder: Path, name: str, wanted: list[str]) -> Path:
    """A folder with `wanted` and nothing they depend on, for `PYTHONPATH`."""
    place = folder / name
    if not (place / "done").exists():
        command = [interpreter(folder), "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target",
                   place, *wanted]  # fmt: skip
        subprocess.run(command, check=True)
        (place / "done").touch()
    return place


def paths(folder: Path, side: str, older: bool) -> str:
    """`PYTHONPATH` of a side ("here" or "reference"): patches from outside, the package, older releases."""
    package = REPOSITORY if side == "here" else packages(folder, "reference", REFERENCE)
    places = [Path(__file__).parent / "shim", package]
    if older:
        places.append(packages(folder, "older", OLDER))
    return os.pathsep.join(map(str, places))
