"""The entry point of a SageMaker container on the platform's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deepspeed.launcher.sagemaker import hyper_parameters, variables

ROOT = Path(__file__).parents[3]


def platform(folder, **values):
    config = folder / "input/config"
    config.mkdir(parents=True)
    for name, value in values.items():
        (config / f"{name}.json").write_text(json.dumps(value))


def test_hyper_parameters_are_arguments(tmp_path):
    platform(tmp_path, hyperparameters={"lr": "0.1", "name": '"a b"', "flag": "true", "sagemaker_region": '"x"'})
    assert hyper_parameters(tmp_path) == ["--lr=0.1", "--name=a b", "--flag=true"]


def test_channels_and_hosts(tmp_path):
    resources = {"hosts": ["algo-1"], "current_host": "algo-1", "network_interface_name": "eth0"}
    platform(tmp_path, resourceconfig=resources, inputdataconfig={"train": {}, "val-x": {}})
    found = variables(tmp_path)
    assert found["SM_CHANNEL_VAL_X"] == str(tmp_path / "input/data/val-x")
    assert (found["SM_CURRENT_HOST"], found["GLOO_SOCKET_IFNAME"]) == ("algo-1", "eth0")


def test_a_failure_is_written_where_the_platform_looks(tmp_path):
    platform(tmp_path, resourceconfig={"hosts": ["algo-1"], "current_host": "algo-1"}, hyperparameters={"code": "3"})
    script = (
        "import sys; code = int(sys.argv[-1].partition('=')[2]); "
        + "print('x' * 9000, file=sys.stderr); "
        + "1 / (code - 3)"
    )
    (tmp_path / "train.py").write_text(script)
    call = f"sys.exit(main(['train.py', 'train'], Path({str(tmp_path)!r})))"
    code = f"import sys; from pathlib import Path; from deepspeed.launcher.sagemaker import main; {call}"
    inherited = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=inherited, timeout=60, check=False)
    assert done.returncode == 1
    text = (tmp_path / "output/failure").read_text()
    assert "rank 0 of 1 failed first" in text and text.rstrip().endswith("ZeroDivisionError: division by zero")
    assert len(text) <= 1024 and "xxx" not in text
