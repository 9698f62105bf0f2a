"""lm-evaluation-harness, unmodified, on the server and on Transformers: the same scores and the same texts.

The harness is in an environment of its own, since it pins packages: `DS_LM_EVAL` is that environment's Python
(`pip install -c constraints.txt lm-eval`). Without it, and where `lm_eval` cannot be imported here, tests are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.serving.server import LENGTH, Server

PYTHON = os.environ.get("DS_LM_EVAL", "")
ABSENT = not PYTHON and importlib.util.find_spec("lm_eval") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ABSENT, reason="no lm-eval here, and DS_LM_EVAL names no Python that has it"),
]

CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
  - {{metric: brier_score}}
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: bits_per_byte}}
  - {{metric: word_perplexity}}
"""
WRITTEN = """
task: local_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["q"], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list:
  - {{metric: exact_match}}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"{number} + {number} is",
            "choices": [f" {2 * number}", f" {number}", " none of these"],
            "answer": 0,
            "text": f"the {number}th text, a short one: {number * number}",
        }
        for number in range(8)
    ]
    data = made / "rows.json"
    data.write_text("\n".join(json.dumps(row) for row in rows))
    for name, text in (("choices", CHOICES), ("rolling", ROLLING), ("written", WRITTEN)):
        (made / f"{name}.yaml").write_text(text.format(data=data))
    return made


def evaluate(tasks: Path, model: str, arguments: str, names: str, *options: str) -> tuple[dict[str, Any], list[Any]]:
    """(scores by task, texts of generated answers) of the harness."""
    out = tasks / f"out-{model}-{len(options)}-{names}"
    command = [
        PYTHON or sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", names,
        "--include_path", str(tasks), "--output_path", str(out), "--log_samples", "--device", "cpu", *options,
    ]  # fmt: skip
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = out.rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]
    (written,) = out.rglob("samples_local_written_*.jsonl")
    samples = sorted(map(json.loads, written.open()), key=lambda one: one["doc_id"])
    return scores, [one["filtered_resps"] for one in samples]


def compare(left: dict[str, Any], right: dict[str, Any]) -> int:
    """Number of scores, which are equal to 1e-6."""
    count = 0
    for task, scores in left.items():
        for name, value in scores.items():
            if isinstance(value, float) and "stderr" not in name:
                assert value == pytest.approx(right[task][name], abs=1e-6, rel=1e-6), (task, name)
                count += 1
    return count


def test_completions_score_as_transformers(server: Server, folder: Path, tasks: Path) -> None:
    names = "local_choices,local_rolling,local_written"
    remote = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=2,max_length={LENGTH}"
    local = f"pretrained={folder},dtype=float32,max_length={LENGTH}"
    served, texts = evaluate(tasks, "local-completions", remote, names)
    alone, wanted = evaluate(tasks, "hf", local, names)
    assert compare(served, alone) >= 5
    assert texts == wanted and len(texts) == 8


def test_chats_answer_as_transformers(server: Server, folder: Path, tasks: Path) -> None:
    remote = f"model=tiny,base_url={server.url}/v1/chat/completions,tokenizer={folder},max_length={LENGTH}"
    local = f"pretrained={folder},dtype=float32,max_length={LENGTH}"
    served, texts = evaluate(tasks, "local-chat-completions", remote, "local_written", "--apply_chat_template")
    alone, wanted = evaluate(tasks, "hf", local, "local_written", "--apply_chat_template")
    assert compare(served, alone) >= 1 and texts == wanted and len(texts) == 8
