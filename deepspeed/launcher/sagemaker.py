"""Entry point of a SageMaker container: reads hyperparameters and hosts from, and writes failures to, its files."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from deepspeed.launcher import runner
from deepspeed.launcher.foreground import last_errors

ROOT = Path("/opt/ml")
FAILURE_BYTES = 1024
"""Number of bytes that the platform shows from the beginning of the failure file."""
_HEAD_BYTES = 384


def main(args: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the `deepspeed` command with the job's hyperparameters as further arguments of the script.

    Args:
        args: options of `deepspeed`, the script, and its arguments; a last word `train` is dropped. None: `sys.argv`.
        root: the platform's folder.

    Returns:
        Exit code of `runner.main`; if it is not 0 or 85 (saved), the reason is written to output/failure in `root`.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    arguments = arguments[:-1] if arguments[-1:] == ["train"] else arguments
    os.environ.update({name: value for name, value in variables(root).items() if name not in os.environ})
    if not os.access(os.environ.get("HOME", ""), os.W_OK):
        os.environ["HOME"] = tempfile.mkdtemp(prefix="home-")
    code = runner.main([*arguments, *hyper_parameters(root)])
    if code not in (0, 85):
        # The launcher's own report, which comes last, else the last lines shown.
        shown = last_errors()
        reports = list(re.finditer(r"^(\[deepspeed\]|deepspeed:) ", shown, re.MULTILINE))
        reason = shown[reports[-1].end() :] if reports else shown[-FAILURE_BYTES // 2 :]
        report_failure(root, f"exit code {code}: {reason}")
    return code


def hyper_parameters(root: Path) -> list[str]:
    """Return the job's hyperparameters as arguments `--name=value`, from SageMaker's file in `root`; empty without it.

    Those of the SDK (`sagemaker_…`) are left out. Values in JSON quotes are unquoted.
    """
    try:
        parameters = json.loads((root / "input/config/hyperparameters.json").read_text())
    except OSError:
        return []
    words: list[str] = []
    for name, value in parameters.items():
        if name.startswith("sagemaker_"):
            continue
        text = str(value)
        if len(text) >= 2 and text[0] == text[-1] == '"':
            text = json.loads(text)
        words += [f"--{name}={text}"]
    return words


def variables(root: Path) -> dict[str, str]:
    """Return the variables that SageMaker's training toolkit would set, such as SM_MODEL_DIR and SM_HOSTS."""
    environment = {
        "SM_MODEL_DIR": str(root / "model"),
        "SM_OUTPUT_DATA_DIR": str(root / "output/data"),
        "SM_CHECKPOINT_DIR": str(root / "checkpoints"),
    }
    try:
        channels = json.loads((root / "input/config/inputdataconfig.json").read_text())
    except OSError:
        channels = {}
    for name in channels:
        environment[f"SM_CHANNEL_{name.upper().replace('-', '_')}"] = str(root / "input/data" / name)
    try:
        resources = json.loads((root / "input/config/resourceconfig.json").read_text())
    except OSError:
        return environment
    environment["SM_HOSTS"] = json.dumps(resources["hosts"])
    environment["SM_CURRENT_HOST"] = resources["current_host"]
    network = resources.get("network_interface_name")
    if network:
        environment["SM_NETWORK_INTERFACE_NAME"] = network
        environment["GLOO_SOCKET_IFNAME"] = environment["NCCL_SOCKET_IFNAME"] = network
    return environment


def report_failure(root: Path, text: str) -> None:
    """Write `text` to the failure file, which the platform shows; of a long text, only beginning and end are kept."""
    data = text.encode()
    if len(data) > FAILURE_BYTES:
        data = data[:_HEAD_BYTES] + b"\n...\n" + data[_HEAD_BYTES + 5 - FAILURE_BYTES :]
    try:
        (root / "output").mkdir(parents=True, exist_ok=True)
        (root / "output/failure").write_text(data.decode(errors="ignore"))
    except OSError as error:
        print(f"[deepspeed] {root}/output/failure cannot be written: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
