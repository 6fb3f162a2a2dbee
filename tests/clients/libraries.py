"""What users of Python libraries do first, against a server that runs.

    python libraries.py URL NAME...

This runs in an environment of the libraries, where speq is not installed.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

ASKED = [{"role": "user", "content": "hi"}]
SAID = "Hello from speq."
URL = sys.argv[1] if len(sys.argv) > 1 else ""
# Where Anthropic's clients begin.
ROOT = URL.removesuffix("/v1")
KEY = "none"
MODEL = "any"
CELLS: dict[str, Callable[[], None]] = {}


class City(BaseModel):
    name: str
    size: int


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


def cell(function: Callable[[], None]) -> Callable[[], None]:
    CELLS[function.__name__] = function
    return function


def openai_client() -> Any:
    import openai

    return openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


@cell
def openai_chat() -> None:
    client = openai_client().chat.completions
    answer = client.create(
        model=MODEL, messages=ASKED, n=2, seed=-1, reasoning_effort="low", logit_bias={"50": 1}
    )
    assert [each.message.content for each in answer.choices] == [SAID, SAID]
    stream = client.create(model=MODEL, messages=ASKED, stream=True)
    pieces = [each.choices[0].delta.content or "" for each in stream if each.choices]
    assert "".join(pieces) == SAID


@cell
def openai_forms_and_tools() -> None:
    import openai

    client, tool = openai_client().chat.completions, openai.pydantic_function_tool(City)
    parsed = client.parse(model=MODEL, messages=ASKED, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    free = client.create(model=MODEL, messages=ASKED, tools=[tool], parallel_tool_calls=False)
    forced = client.create(model=MODEL, messages=ASKED, tools=[tool], tool_choice="required")
    for answer in (free, forced):
        (call,) = answer.choices[0].message.tool_calls
        City.model_validate_json(call.function.arguments)


@cell
def openai_responses() -> None:
    client = openai_client().responses
    assert client.create(model=MODEL, input="hi").output_text == SAID
    parsed = client.parse(model=MODEL, input="hi", text_format=City)
    assert isinstance(parsed.output_parsed, City)


@cell
def anthropic_messages() -> None:
    """A tool, and its result."""
    import anthropic

    client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0).messages
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 200}
    assert client.create(messages=ASKED, **asked).content[0].text == SAID
    assert client.count_tokens(model=MODEL, messages=ASKED).input_tokens > 0
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    asked["tools"] = [{"name": "weather", "input_schema": schema}]
    first = client.create(messages=ASKED, **asked)
    assert first.stop_reason == "tool_use"
    called = [block.model_dump() for block in first.content]
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sunny"}
    turns = [
        *ASKED,
        {"role": "assistant", "content": called},
        {"role": "user", "content": [result]},
    ]
    assert client.create(messages=turns, **asked).content[0].text == "It says: sunny"


@cell
def litellm_sdk() -> None:
    import litellm

    for model, base in (("openai/any", URL), ("hosted_vllm/any", URL), ("anthropic/any", ROOT)):
        given = {"messages": ASKED, "api_base": base, "api_key": KEY}
        assert litellm.completion(model, **given).choices[0].message.content == SAID
    given["api_base"] = URL
    for model in ("openai/any", "hosted_vllm/any"):
        formed = litellm.completion(model, response_format=City, **given)
        City.model_validate_json(formed.choices[0].message.content)
        thought = litellm.completion(model, reasoning_effort="high", **given)
        assert thought.choices[0].message.content == SAID
    answer = litellm.responses(model="openai/any", input="hi", api_base=URL, api_key=KEY)
    assert SAID in str(answer.output)


@cell
def langchain() -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, max_retries=0)
    assert model.invoke("hi").content == SAID
    assert "".join(str(each.content) for each in model.stream("hi")) == SAID
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(City, method=method).invoke("hi"), City)
    json.loads(model.bind(response_format={"type": "json_object"}).invoke("hi").content)
    turns = create_agent(model, [weather]).invoke({"messages": ASKED})["messages"]
    assert "sunny in Paris" in turns[-1].content
    newer = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, use_responses_api=True)
    assert SAID in str(newer.invoke("hi").content)


@cell
def instructor() -> None:
    from instructor import Mode, from_openai

    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA):
        client = from_openai(openai_client(), mode=mode).chat.completions
        made = client.create(model=MODEL, messages=ASKED, response_model=City, max_retries=0)
        assert isinstance(made, City)


@cell
def pydantic_ai() -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    assert Agent(model).run_sync("hi").output == SAID
    assert "sunny in Paris" in Agent(model, tools=[weather]).run_sync("weather?").output
    for form in (City, NativeOutput(City)):
        assert isinstance(Agent(model, output_type=form).run_sync("hi").output, City)


@cell
def openai_agents() -> None:
    import openai
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )

    set_tracing_disabled(True)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(MODEL, openai.AsyncOpenAI(base_url=URL, api_key=KEY))
        agent = Agent(name="a", model=model, tools=[function_tool(weather)])
        assert "sunny in Paris" in Runner.run_sync(agent, "weather?").final_output
        formed = Agent(name="a", model=model, output_type=City)
        assert isinstance(Runner.run_sync(formed, "hi").final_output, City)


@cell
def smolagents() -> None:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(MODEL, api_base=URL, api_key=KEY)
    agent = ToolCallingAgent(tools=[tool(weather)], model=model, max_steps=1, verbosity_level=0)
    agent.run("weather?")
    # Calls are forced, and the shortest one is made.
    steps = [getattr(step, "tool_calls", None) or () for step in agent.memory.steps]
    called = {call.name for calls in steps for call in calls}
    assert called and called <= {"weather", "final_answer"}


@cell
def dspy() -> None:
    import dspy as library

    model = library.LM("openai/any", api_base=URL, api_key=KEY, cache=False)
    assert model("hi", n=2) == [SAID, SAID]


@cell
def llama_index() -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        model=MODEL,
        api_base=URL,
        api_key=KEY,
        context_window=8000,
        is_chat_model=True,
        is_function_calling_model=True,
    )
    assert str(model.complete("hi")) == SAID
    assert isinstance(model.as_structured_llm(City).complete("hi").raw, City)

    async def work() -> str:
        return str(await FunctionAgent(tools=[weather], llm=model).run("weather?"))

    assert "sunny in Paris" in asyncio.run(work())


@cell
def ollama() -> None:
    from ollama import Client

    client = Client(host=ROOT)
    (served,) = client.list().models
    assert client.chat(served.model, ASKED).message.content == SAID
    stream = client.chat("any", ASKED, stream=True)
    assert "".join(part.message.content or "" for part in stream) == SAID
    called = client.chat("any", ASKED, tools=[weather]).message.tool_calls[0].function
    assert (called.name, called.arguments) == ("weather", {"city": "Paris"})
    formed = client.chat("any", ASKED, format=City.model_json_schema()).message.content
    City.model_validate_json(formed)
    assert client.generate("any", "hi").response == SAID


@cell
def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {
        **{"vision": False, "function_calling": True, "json_output": True, "family": "unknown"},
        "structured_output": True,
    }
    client = OpenAIChatCompletionClient(model=MODEL, base_url=URL, api_key=KEY, model_info=info)
    agent = AssistantAgent("a", client, tools=[weather], reflect_on_tool_use=True)

    async def work() -> str:
        return str((await agent.run(task="weather?")).messages[-1].content)

    assert "sunny in Paris" in asyncio.run(work())


@cell
def crewai() -> None:
    from crewai import LLM, Agent
    from crewai.tools import tool

    os.environ["CREWAI_TRACING_ENABLED"] = "false"
    model = LLM(model=f"openai/{MODEL}", base_url=URL, api_key=KEY)
    assert model.call("hi") == SAID
    named = tool("weather")(weather)
    agent = Agent(role="a", goal="b", backstory="c", llm=model, tools=[named], verbose=False)
    assert "sunny in Paris" in agent.kickoff("weather?").raw


@cell
def inspect_ai() -> None:
    from inspect_ai import Task, eval_async
    from inspect_ai.dataset import Sample
    from inspect_ai.model import get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool
    def forecast() -> Any:
        async def execute(city: str) -> str:
            """The weather in a city.

            Args:
                city: its name
            """
            return weather(city)

        return execute

    os.environ["INSPECT_DISPLAY"] = "none"
    model = get_model(f"openai-api/speq/{MODEL}", base_url=URL, api_key=KEY)
    for solver, target in (
        ([generate()], SAID),
        ([use_tools(forecast()), generate()], "sunny in Paris"),
    ):
        task = Task([Sample(input="hi", target=target)], solver=solver, scorer=includes())
        (log,) = asyncio.run(eval_async(task, model=model, log_dir="logs"))
        assert log.results is not None
        assert log.results.scores[0].metrics["accuracy"].value == 1.0


def main() -> None:
    os.environ |= {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": URL, "DO_NOT_TRACK": "1"}
    for name in sys.argv[2:]:
        try:
            CELLS[name]()
            print(f"works {name}", flush=True)
        except Exception as error:
            said = str(error).replace("\n", " ")
            print(f"fails {name}: {type(error).__name__} {said:.300}", flush=True)


if __name__ == "__main__":
    main()
