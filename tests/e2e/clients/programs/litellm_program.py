"""litellm against the daemon at argv[1]; prints what it got, as one JSON object."""

import asyncio
import json
import sys
from typing import Any

import litellm

URL = sys.argv[1] + "/v1"
MODEL: dict[str, Any] = {"model": "openai/moed-demo", "api_base": URL, "api_key": "none"}
SUM: Any = [{"role": "user", "content": "12 + 30"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}


def streamed(model: str) -> dict[str, Any]:
    options = {**MODEL, "model": model}
    usage = {"include_usage": True}
    chunks: list[Any] = list(
        litellm.completion(
            messages=SUM, temperature=0, stream=True, stream_options=usage, **options
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "finish": [choice.finish_reason for choice in choices if choice.finish_reason],
        "completion_tokens": chunks[-1].usage.completion_tokens,
    }


def error_of(**options: Any) -> list[str]:
    """The classes of the error that the call raises, the narrowest first."""
    try:
        litellm.completion(**{**MODEL, **options}, num_retries=0)
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return []


def main() -> None:
    whole: Any = litellm.completion(messages=SUM, temperature=0, **MODEL)
    call: Any = litellm.completion(messages=WEATHER, temperature=0, tools=[TOOL], **MODEL)
    text: Any = litellm.text_completion(
        **{**MODEL, "model": "text-completion-openai/moed-demo"},
        prompt="12 + 30",
        max_tokens=4,
        logprobs=1,
    )
    response: Any = litellm.responses(input="12 + 30", **MODEL)
    later: Any = asyncio.run(litellm.acompletion(messages=SUM, temperature=0, **MODEL))
    found = {
        "whole": whole.choices[0].message.content,
        "later": later.choices[0].message.content,
        "streamed": [streamed("openai/moed-demo"), streamed("hosted_vllm/moed-demo")],
        "call": json.loads(call.choices[0].message.tool_calls[0].function.arguments),
        "call_finish": call.choices[0].finish_reason,
        "num_logprobs": len(text.choices[0].logprobs.token_logprobs),
        "response": response.output[0].content[0].text,
        "too_long": error_of(messages=[{"role": "user", "content": "12 + 30 " * 2000}]),
        "no_such_model": error_of(messages=SUM, model="openai/nope"),
    }
    print(json.dumps(found))


main()
