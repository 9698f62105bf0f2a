"""Tool loops of agent frameworks as they come from PyPI: `python agent_loops.py FRAMEWORK URL OPTIONS`.

Runs in the environment that `DS_AGENTS` names, which has the frameworks and none of ours. OPTIONS is JSON: `loops`,
`streamed`, `forced` (the first turn has to call), `tokens` of an answer. Prints a list with a row for each loop: the
final answer, and the calls that reached the tool.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

CITIES = ["Bonn", "Köln", "Łódź", "São Paulo", "東京"]
CALLS: list[dict[str, Any]] = []


def weather(city: str, day: int) -> str:
    """Look up the weather.

    Args:
        city: Name of the city.
        day: Number of days from now.
    """
    CALLS.append({"city": city, "day": day})
    return f"{city} is sunny with {day + 17} degrees"


def question(number: int) -> str:
    return f"What is the weather in {CITIES[number % len(CITIES)]} on day {number % 9 + 1}?"


def openai_agents(url: str, options: dict[str, Any]) -> Any:
    """`openai-agents`, with the chat completions that other servers have."""
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    choice = "required" if options["forced"] else None
    settings = ModelSettings(temperature=0, tool_choice=choice, max_tokens=options["tokens"])

    async def ask(text: str) -> Any:
        client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        model = OpenAIChatCompletionsModel("tiny", client)
        agent = Agent(
            name="forecaster", instructions="Be brief.", tools=[function_tool(weather)], model=model,
            model_settings=settings,
        )  # fmt: skip
        if not options["streamed"]:
            return (await Runner.run(agent, text)).final_output
        result = Runner.run_streamed(agent, text)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return lambda text: asyncio.run(ask(text))


def pydantic_ai(url: str, options: dict[str, Any]) -> Any:
    """`pydantic-ai`; with `forced`, the answer is an object, which the model has to give by calling a tool of it."""
    from pydantic import BaseModel
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Forecast(BaseModel):
        city: str
        degrees: int

    async def read(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    async def ask(text: str) -> Any:
        model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, api_key="none"))
        output: Any = Forecast if options["forced"] else str
        agent: Any = Agent(
            model, tools=[] if options["forced"] else [weather], output_type=output,
            model_settings={"temperature": 0, "max_tokens": options["tokens"]},
        )  # fmt: skip
        said = (await agent.run(text, event_stream_handler=read if options["streamed"] else None)).output
        return said.model_dump() if options["forced"] else said

    return lambda text: asyncio.run(ask(text))


def smolagents(url: str, options: dict[str, Any]) -> Any:
    """`smolagents`, whose every turn has to call; its own tool takes the final answer."""
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    model = OpenAIModel("tiny", api_base=url, api_key="none", temperature=0, max_tokens=options["tokens"])

    def ask(text: str) -> Any:
        agent = ToolCallingAgent(
            tools=[tool(weather)], model=model, max_steps=5, stream_outputs=options["streamed"], verbosity_level=0
        )
        return agent.run(text)

    return ask


def main() -> None:
    name, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    ask, rows = globals()[name](url, options), []
    for number in range(options["loops"]):
        CALLS.clear()
        answer = ask(question(number))
        rows.append({"answer": answer, "calls": list(CALLS)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
