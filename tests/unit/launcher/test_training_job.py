"""The example that asks SageMaker for a training job: a request the platform takes, metrics as a run prints them."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEPS, BATCH, SEQUENCE, PRINTED = 12, 4, 16, 4
TINY = {
    "deepspeed_config": "ds.json", "width": 16, "layers": 1, "heads": 1, "sequence": SEQUENCE,
    "train_bytes": STEPS * BATCH * SEQUENCE, "heldout_bytes": 512, "sample_bytes": 1, "output": "out",
}  # fmt: skip
HOUSE_LINES = 10  # that a run may have, beside those every `steps_per_print` updates


def request() -> dict[str, Any]:
    made = runpy.run_path(str(ROOT / "examples/containers/training_job.py"))["request"]
    return made("image", "arn:aws:iam::123456789012:role/train", "bucket")


def test_the_request_is_one_that_the_platform_takes() -> None:
    """Its documented patterns and limits; boto3 would check the types alone."""
    asked = request()
    assert re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", asked["TrainingJobName"])
    assert asked["RoleArn"].startswith("arn:aws:iam::")
    assert all(isinstance(value, str) for value in asked["HyperParameters"].values())
    metrics = asked["AlgorithmSpecification"]["MetricDefinitions"]
    assert len(metrics) <= 40 and len({metric["Name"] for metric in metrics}) == len(metrics)
    assert all(re.compile(metric["Regex"]).groups == 1 and len(metric["Regex"]) <= 500 for metric in metrics)
    for channel in asked["InputDataConfig"]:
        assert re.fullmatch(r"[A-Za-z0-9.\-_]{1,64}", channel["ChannelName"])
        assert channel["DataSource"]["S3DataSource"]["S3Uri"].startswith("s3://bucket/")
    assert asked["OutputDataConfig"]["S3OutputPath"].startswith("s3://bucket/")
    assert asked["ResourceConfig"]["InstanceCount"] == 2 and asked["StoppingCondition"]["MaxRuntimeInSeconds"] > 0


@pytest.mark.slow
def test_its_metrics_match_what_a_run_prints(tmp_path: Path) -> None:
    config = json.loads((ROOT / "examples/bytes_lm/ds_config.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps({**config, "train_batch_size": BATCH, "steps_per_print": PRINTED}))
    words = [f"--{name}={value}" for name, value in TINY.items()]
    script = [str(ROOT / "examples/bytes_lm/train.py"), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", *script],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    log = done.stdout + done.stderr  # CloudWatch has both
    for metric in request()["AlgorithmSpecification"]["MetricDefinitions"]:
        found = [float(value) for value in re.findall(metric["Regex"], log)]
        times = 1 if metric["Name"] in ("held-out", "bigram") else STEPS // PRINTED
        assert len(found) == times and min(found) > 0, f"{metric}: {log}"
    said = [line for line in done.stderr.splitlines() if not re.search(r"\] step [0-9]+: ", line)]
    assert len(said) <= HOUSE_LINES, done.stderr
