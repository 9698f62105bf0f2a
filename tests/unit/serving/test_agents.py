"""Tool loops of agent frameworks, unmodified: `openai-agents`, `pydantic-ai` and `smolagents`, whole and streamed.

They are in an environment of their own: `DS_AGENTS` is that environment's Python (`pip install -c constraints.txt
openai-agents 'pydantic-ai-slim[openai]' 'smolagents[openai]'`). Without it, tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed.serving.chat_format import ChatFormat
from tests.harness.pool import PATIENCE
from tests.unit.serving.agent_loops import CITIES
from tests.unit.serving.inline import InlineServer, inline
from tests.unit.serving.server import make_folder
from tests.unit.serving.test_structured import TEMPLATE, saying

PYTHON = os.environ.get("DS_AGENTS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="DS_AGENTS names no Python with the frameworks"),
]
PROGRAM = Path(__file__).with_name("agent_loops.py")
LOOPS = 5
LONG = 32768  # tokens, which are bytes here; a prompt of `smolagents` has some 9,000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InlineServer]:
    with mock.patch("tests.unit.serving.server.LENGTH", LONG):
        folder = make_folder(tmp_path_factory.mktemp("agents"))
    with inline(folder, {"threads": 1}, chat_template=TEMPLATE, reasoning_parser="none") as made:
        yield made


def run(server: InlineServer, framework: str, **options: Any) -> list[dict[str, Any]]:
    """A row for each loop: the answer, and the calls that reached the tool."""
    options = {"loops": LOOPS, "streamed": False, "forced": False, "tokens": 600, **options}
    command = [PYTHON, str(PROGRAM), framework, f"{server.url}/v1", json.dumps(options)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300 * PATIENCE)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = done.stdout.rindex('[{"answer"')  # frameworks print too
    return json.JSONDecoder().raw_decode(done.stdout, rows)[0]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("framework", ["openai_agents", "pydantic_ai", "smolagents"])
def test_loops_of_a_scripted_model(server: InlineServer, framework: str, streamed: bool) -> None:
    """Two calls at once, a further one, and an answer; each prompt has the results of the calls before."""
    texts, wanted, turns = [], [], 3
    for number in range(LOOPS):
        city, day = CITIES[number], number + 1
        last = f'{city}: "{number}" degrees'
        calls = [{"city": city, "day": day}, {"city": CITIES[number - 1], "day": 30}, {"city": "x'\"\\\n", "day": -1}]
        written = [call("weather", **one) for one in calls]
        texts += ["\n".join(written[:2]), written[2]]
        texts.append(call("final_answer", answer=last) if framework == "smolagents" else last)
        wanted.append({"answer": last, "calls": calls})
    prompts, own = [], ChatFormat.text

    def text(self: Any, *args: Any, **kwargs: Any) -> str:
        prompts.append(own(self, *args, **kwargs))
        return prompts[-1]

    with mock.patch.object(ChatFormat, "text", text), saying(server, *texts):
        rows = run(server, framework, streamed=streamed)
    for row, expected in zip(rows, wanted, strict=True):
        row["calls"][:2] = sorted(row["calls"][:2], key=lambda one: one["day"])  # those of one turn run at once
        assert row == expected
    assert len(prompts) == turns * LOOPS
    for number in range(LOOPS):
        _, second, third = prompts[turns * number : turns * (number + 1)]
        results = [f"{CITIES[number]} is sunny with {number + 18} degrees", f"{CITIES[number - 1]} is sunny with 47"]
        assert all(result in prompt for result in results for prompt in (second, third))
        assert "is sunny with 16 degrees" in third and "is sunny with 16 degrees" not in second


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("framework", ["openai_agents", "pydantic_ai"])
def test_loops_of_the_trained_model(framework: str, streamed: bool) -> None:
    """It has to call: the tool takes what it writes, or the framework makes its object of it."""
    from tests.trained import base

    with inline(base(), {"dtype": "bf16"}) as server:
        rows = run(server, framework, streamed=streamed, forced=True, tokens=200)
    assert len(rows) == LOOPS
    for row in rows:
        if framework == "pydantic_ai":
            assert isinstance(row["answer"]["city"], str) and isinstance(row["answer"]["degrees"], int)
            continue
        assert isinstance(row["answer"], str) and row["calls"]
        assert all(isinstance(one["city"], str) and isinstance(one["day"], int) for one in row["calls"])
