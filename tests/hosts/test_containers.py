"""Containers of SageMaker and Kubernetes on hosts of their own: one command in each, no ssh, a user without home."""

from __future__ import annotations

import json
import re
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.harness.pool import PATIENCE
from tests.hosts.cluster import ROOT, cluster
from tests.hosts.containers import Containers
from tests.hosts.runs import need_hosts

need_hosts()

STEPS, BATCH, SEQUENCE, PRINTED = 60, 12, 32, 20
# The main example. Instead of a picture it leaves its losses; the model and a checkpoint go where the platform wants.
RUN = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT / "examples/bytes_lm")!r})
import train
of_example = train.train
def and_save(engine, *rest):
    losses = of_example(engine, *rest)
    engine.save_checkpoint(os.environ["SM_CHECKPOINT_DIR"])
    engine.save_16bit_model(os.environ["SM_MODEL_DIR"], "model.bin")
    if engine.global_rank == 0:
        with open(os.environ["SM_MODEL_DIR"] + "/losses.json", "w") as file:
            json.dump([x.hex() for x in losses], file)
    return losses
train.train, train.draw_curve = and_save, lambda *_: None
train.main()
"""
TINY = {
    "deepspeed_config": "ds.json", "width": "24", "layers": "2", "heads": "2", "sequence": str(SEQUENCE),
    "train_bytes": str(STEPS * BATCH * SEQUENCE), "heldout_bytes": "768", "sample_bytes": "1", "prompt": "def a(",
}  # fmt: skip
FOLDERS = {"SM_MODEL_DIR": "/opt/ml/model", "SM_CHECKPOINT_DIR": "/opt/ml/checkpoints"}
LOOP = """
import os, time
import torch, deepspeed
model = torch.nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
          "checkpoint": {"signal_dir": os.environ["SM_CHECKPOINT_DIR"], "use_node_local_storage": True}}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
os.write(1, b"ready\\n")
while True:
    engine.backward(engine(torch.ones(1, 4)).mean())
    engine.step()
    time.sleep(0.02)
"""
ENTRY = [sys.executable, "-m", "deepspeed.launcher.sagemaker"]
LAUNCH = [sys.executable, "-m", "deepspeed.launcher.runner"]


def write(pods: Containers, script: str) -> None:
    """The code, and for SageMaker its files."""
    config = json.loads((ROOT / "examples/bytes_lm/ds_config.json").read_text())
    config.update(train_batch_size=BATCH, steps_per_print=PRINTED, checkpoint={"use_node_local_storage": True})
    for name in pods.cluster.names:
        pods.put(name, "code/train.py", script)
        pods.put(name, "code/ds.json", config)
        if not name.startswith("algo"):
            continue
        # the platform writes every value as a string, and the SDK some in JSON
        given = {**TINY, "prompt": json.dumps(TINY["prompt"]), "sagemaker_region": '"nowhere"'}
        pods.put(name, "input/config/hyperparameters.json", given)
        pods.put(name, "input/config/inputdataconfig.json", {"train": {"TrainingInputMode": "File"}})
        hosts = {"hosts": list(reversed(pods.cluster.names)), "current_host": name, "network_interface_name": "eth0"}
        pods.put(name, "input/config/resourceconfig.json", hosts)


def made(names: list[str]) -> Iterator[Containers]:
    with cluster(names=names) as hosts:
        pods = Containers(hosts)
        yield pods
        pods.close()


@pytest.fixture
def sagemaker() -> Iterator[Containers]:
    yield from made(["algo-1", "algo-2"])


@pytest.fixture
def kubernetes() -> Iterator[Containers]:
    yield from made(["job-0", "job-1"])


def to_end(started, limit=240 * PATIENCE):
    said = [process.communicate(timeout=limit)[0] for process in started]
    return [process.returncode for process in started], said


def example_request() -> dict[str, Any]:
    """What the example asks SageMaker for."""
    return runpy.run_path(str(ROOT / "examples/containers/training_job.py"))["request"]("image", "role", "bucket")


def losses(pods: Containers, name: str) -> list[str]:
    found = json.loads(pods.file(name, "model/losses.json").read_text())
    assert len(found) == STEPS
    return found


def on_one_host(pods: Containers, ranks: int) -> list[str]:
    """The losses of as many ranks in the first container alone; what it has written is removed."""
    words = [f"--{name}={value}" for name, value in TINY.items()]
    first = pods.cluster.names[0]
    for name in ("resourceconfig", "hyperparameters"):
        pods.file(first, f"input/config/{name}.json").unlink(missing_ok=True)
    codes, said = to_end([pods.run(first, [*LAUNCH, "--num_gpus", str(ranks), "train.py", *words], FOLDERS)])
    assert codes == [0], said
    found = losses(pods, first)
    for path in (pods.file(first, "model"), pods.file(first, "checkpoints")):
        for file in sorted(path.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    return found


@pytest.mark.slow
def test_sagemaker_with_an_entry_point_of_its_own(sagemaker):
    write(sagemaker, RUN)
    alone = on_one_host(sagemaker, 4)
    write(sagemaker, RUN)
    started = [sagemaker.run(name, [*ENTRY, "--num_gpus", "2", "train.py", "train"]) for name in ("algo-2", "algo-1")]
    codes, said = to_end(started)
    assert codes == [0, 0], said
    assert losses(sagemaker, "algo-1") == alone
    for metric in example_request()["AlgorithmSpecification"]["MetricDefinitions"]:
        found = [float(value) for text in said for value in re.findall(metric["Regex"], text)]
        times = 1 if metric["Name"] in ("held-out", "bigram") else STEPS // PRINTED
        assert len(found) == times and min(found) > 0, f"{metric}: {said}"
    assert sagemaker.file("algo-1", "model/model.bin").stat().st_size > 1000
    assert not list(sagemaker.file("algo-2", "model").iterdir())  # the platform packs both: one copy is enough
    for name in ("algo-1", "algo-2"):
        assert any(sagemaker.file(name, "checkpoints").rglob("*")), name
        assert not sagemaker.file(name, "output/failure").exists()
    assert {p.stat().st_uid for p in sagemaker.file("algo-1", "model").iterdir()} == {54321}


@pytest.mark.slow
def test_sagemaker_through_the_toolkits_variables(sagemaker):
    """As the toolkit starts the command itself: SM_* variables, hyper-parameters as arguments."""
    write(sagemaker, RUN)
    alone = on_one_host(sagemaker, 4)
    words = [word for name, value in TINY.items() for word in (f"--{name}", value)]
    hosts = {"SM_HOSTS": json.dumps(sagemaker.cluster.names), "SM_NUM_GPUS": "0", **FOLDERS}
    started = [
        sagemaker.run(name, [*LAUNCH, "--num_gpus", "2", "train.py", *words], {**hosts, "SM_CURRENT_HOST": name})
        for name in sagemaker.cluster.names
    ]
    codes, said = to_end(started)
    assert codes == [0, 0], said
    assert losses(sagemaker, "algo-1") == alone


@pytest.mark.slow
def test_sagemaker_fails_with_the_reason_in_every_failure_file(sagemaker):
    write(sagemaker, "import os, time\nif os.environ['RANK'] == '3':\n    raise ValueError('boom')\ntime.sleep(300)")
    started = [sagemaker.run(name, [*ENTRY, "--num_gpus", "2", "train.py", "train"]) for name in ("algo-1", "algo-2")]
    codes, _ = to_end(started, 60)
    assert codes == [1, 1]
    for name in ("algo-1", "algo-2"):
        text = sagemaker.file(name, "output/failure").read_text()
        assert "rank 3 of 4 failed first (host algo-2" in text and text.rstrip().endswith("ValueError: boom"), text
        assert len(text.encode()) <= 1024


@pytest.mark.slow
def test_sagemaker_stops_with_a_checkpoint(sagemaker):
    """SIGTERM to every container, as the platform stops a job."""
    write(sagemaker, LOOP)
    for name in sagemaker.cluster.names:
        sagemaker.put(name, "input/config/hyperparameters.json", {})
    started = [sagemaker.run(name, [*ENTRY, "--num_gpus", "2", "train.py", "train"]) for name in ("algo-1", "algo-2")]
    for process in started:
        assert _ready(process, 2)
    for process in started:
        sagemaker.cluster.inner(process).send_signal(signal.SIGTERM)
    codes, said = to_end(started, 60)
    assert codes == [85, 85], said
    for name in ("algo-1", "algo-2"):
        assert any(sagemaker.file(name, "checkpoints").rglob("*.json")), said


def _ready(process, count: int) -> bool:
    end = time.monotonic() + 120
    while count and time.monotonic() < end:
        line = process.stdout.readline()
        assert line, "it ended"
        count -= line == "ready\n"
    return not count


@pytest.mark.slow
def test_kubernetes_with_the_command_in_every_pod(kubernetes):
    write(kubernetes, RUN)
    alone = on_one_host(kubernetes, 4)
    words = [f"--{name}={value}" for name, value in TINY.items()]
    started = []
    for index, name in reversed(list(enumerate(kubernetes.cluster.names))):
        place = ["--no_ssh", "--node_rank", str(index), "--master_addr", "job-0", "--num_nodes", "2", "--num_gpus", "2"]
        started.append(kubernetes.run(name, [*LAUNCH, *place, "train.py", *words], FOLDERS))
        time.sleep(1)  # the first pod comes up last
    codes, said = to_end(started)
    assert codes == [0, 0], said
    assert losses(kubernetes, "job-0") == alone
    assert kubernetes.file("job-0", "model/model.bin").exists()


@pytest.mark.slow
def test_kubernetes_indexed_job_without_the_launcher(kubernetes):
    """One rank per pod, found from the index of the pod and what the manifest says."""
    write(kubernetes, RUN)
    alone = on_one_host(kubernetes, 2)
    words = [f"--{name}={value}" for name, value in TINY.items()]
    manifest = {"WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "OMP_NUM_THREADS": "1", **FOLDERS}
    started = [
        kubernetes.run(name, [sys.executable, "train.py", *words], {**manifest, "JOB_COMPLETION_INDEX": str(index)})
        for index, name in enumerate(kubernetes.cluster.names)
    ]
    codes, said = to_end(started)
    assert codes == [0, 0], said
    assert losses(kubernetes, "job-0") == alone


@pytest.mark.slow
def test_a_pod_that_is_lost_ends_the_others(kubernetes):
    write(kubernetes, "import os, time\nos.write(1, b'ready\\n')\ntime.sleep(300)")
    started = []
    for index, name in enumerate(kubernetes.cluster.names):
        place = ["--no_ssh", "--node_rank", str(index), "--master_addr", "job-0", "--num_nodes", "2", "--num_gpus", "2"]
        started.append(kubernetes.run(name, [*LAUNCH, *place, "--heartbeat", "3", "train.py"]))
    assert _ready(started[0], 2)
    since = time.monotonic()
    kubernetes.cluster.kill("job-1")
    said, _ = started[0].communicate(timeout=30)
    assert time.monotonic() - since < 8
    assert started[0].returncode not in (0, None) and "(ranks 2 to 3) was lost" in said, said
