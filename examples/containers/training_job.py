"""Ask SageMaker for a training job on two hosts: `python training_job.py IMAGE ROLE BUCKET`."""

from __future__ import annotations

import sys
import time
from typing import Any


def request(image: str, role: str, bucket: str) -> dict[str, Any]:
    """What CreateTrainingJob is given; the metrics match lines of the example, and of `steps_per_print` in its JSON."""
    storage = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{bucket}/train", "S3DataDistributionType": "FullyReplicated"}
    return {
        "TrainingJobName": f"bytes-lm-{int(time.time())}",
        "RoleArn": role,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            "MetricDefinitions": [
                {"Name": "held-out", "Regex": r"held out: ([0-9.]+) nats per byte"},
                {"Name": "bigram", "Regex": r"byte bigram: ([0-9.]+)\)"},
                {"Name": "learning-rate", "Regex": r"step [0-9]+: skipped [0-9]+, lr ([0-9.e+-]+)"},
                {"Name": "gradient-norm", "Regex": r"gradient norm ([0-9.e+-]+)"},
                {"Name": "samples-per-second", "Regex": r"([0-9.e+]+) samples/s"},
            ],
        },
        "InputDataConfig": [{"ChannelName": "train", "DataSource": {"S3DataSource": storage}}],
        "OutputDataConfig": {"S3OutputPath": f"s3://{bucket}/output"},
        "CheckpointConfig": {"S3Uri": f"s3://{bucket}/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2, "VolumeSizeInGB": 50},
        "HyperParameters": {"seed": "0", "output": "/opt/ml/model"},
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
    }


def main() -> None:
    """Send the request."""
    import boto3  # pip install boto3

    image, role, bucket = sys.argv[1:]
    answer = boto3.client("sagemaker").create_training_job(**request(image, role, bucket))
    print(answer["TrainingJobArn"])


if __name__ == "__main__":
    main()
