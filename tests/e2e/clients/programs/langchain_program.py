"""langchain-openai against the daemon at argv[1]; prints what it got, as one JSON object."""

import asyncio
import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

MODEL: dict[str, Any] = {
    "model": "moed-demo",
    "base_url": sys.argv[1] + "/v1",
    "api_key": "none",
    "temperature": 0,
    "max_retries": 0,
}
WEATHER = "What is the weather in Paris?"
IN_JSON = WEATHER + " Answer in JSON."


class City(BaseModel):
    city: str = Field(max_length=20)


def get_weather(city: str) -> str:
    """The weather of a city."""
    raise NotImplementedError(city)


def error_of(model: Any, text: str) -> list[str]:
    """The classes of the error that the call raises, the narrowest first."""
    try:
        model.invoke(text)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


async def later(model: Any) -> list[str]:
    whole = (await model.ainvoke("12 + 30")).content
    return [whole, "".join([chunk.content async for chunk in model.astream("12 + 30")])]


def main() -> None:
    model = ChatOpenAI(**MODEL)
    with_tools = model.bind_tools([get_weather])
    call: Any = with_tools.invoke(WEATHER)
    result = '{"temperature": 18, "condition": "sunny"}'
    answer = with_tools.invoke(
        [HumanMessage(WEATHER), call, ToolMessage(result, tool_call_id=call.tool_calls[0]["id"])]
    )
    structured: Any = model.with_structured_output(City, method="json_schema").invoke(IN_JSON)
    called: Any = model.with_structured_output(City, method="function_calling").invoke(WEATHER)
    response: Any = ChatOpenAI(**MODEL, use_responses_api=True).invoke("12 + 30")
    found = {
        "whole": model.invoke("12 + 30").content,
        "streamed": "".join(str(chunk.content) for chunk in model.stream("12 + 30")),
        "later": asyncio.run(later(model)),
        "call": [call.tool_calls[0]["name"], call.tool_calls[0]["args"]],
        "answer": answer.content,
        "structured": [structured.city, called.city],
        "completion": len(OpenAI(**MODEL, max_tokens=4).invoke("12 + 30")),
        "response": response.content[0]["text"],
        "too_long": error_of(model, "12 + 30 " * 2000),
    }
    print(json.dumps(found))


main()
