"""Tools offered in the demo corpus: their specifications, questions, calls and results."""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from moed.moe.demo import facts

NO_TOOL = "I have no tool for that."
CONDITIONS = ("sunny", "rainy", "cloudy", "windy", "snowy")


@dataclass(frozen=True)
class ToolKind:
    """What a tool does, and the ways a client might name it and its one argument."""

    topic: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    argument_type: str
    descriptions: tuple[str, ...]
    questions: tuple[str, ...]

    def specification(self, rng: Random) -> dict[str, Any]:
        """An OpenAI-style function tool; details that do not change the call vary."""
        argument = rng.choice(self.arguments)
        properties: dict[str, Any] = {argument: {"type": self.argument_type}}
        if rng.random() < 0.3:
            properties[argument]["description"] = f"The {argument}"
        if self.topic == "weather" and rng.random() < 0.2:
            properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
        function: dict[str, Any] = {"name": rng.choice(self.names)}
        if rng.random() < 0.8:
            function["description"] = rng.choice(self.descriptions)
        function["parameters"] = {"type": "object", "properties": properties}
        if rng.random() < 0.7:
            function["parameters"]["required"] = [argument]
        return {"type": "function", "function": function}

    def value(self, rng: Random) -> Any:
        if self.topic == "timer":
            return rng.randint(1, 99)
        return rng.choice(facts.WORDS if self.topic == "search" else facts.CITIES)

    def result(self, rng: Random, value: Any) -> tuple[str, str]:
        """What the tool returns, and the sentence that reports it."""
        if self.topic == "weather":
            degrees, condition = rng.randint(0, 40), rng.choice(CONDITIONS)
            result: dict[str, Any] = {"temperature": degrees, "condition": condition}
            report = f"It is {degrees} degrees and {condition} in {value}."
        elif self.topic == "time":
            clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
            result, report = {"time": clock}, f"It is {clock} in {value}."
        elif self.topic == "timer":
            result, report = {"status": "ok"}, f"The timer is set for {value} minutes."
        else:
            found = " ".join(rng.sample(facts.WORDS, k=2))
            result, report = {"result": found}, f"I found: {found}."
        return json.dumps(result), report


TOOL_KINDS = (
    ToolKind(
        topic="weather",
        names=("get_weather", "get_weather", "get_current_weather"),
        arguments=("city", "city", "location"),
        argument_type="string",
        descriptions=("Get the weather in a city.", "Get the current weather", "The weather now."),
        questions=(
            "What is the weather in {}?",
            "How is the weather in {}?",
            "What is the weather like in {}?",
        ),
    ),
    ToolKind(
        topic="time",
        names=("get_time", "get_time", "get_current_time"),
        arguments=("city", "city", "location"),
        argument_type="string",
        descriptions=("Get the time in a city.", "Get the current time", "The time now."),
        questions=("What time is it in {}?", "What is the time in {}?"),
    ),
    ToolKind(
        topic="timer",
        names=("set_timer", "set_timer", "start_timer"),
        arguments=("minutes",),
        argument_type="integer",
        descriptions=("Set a timer.", "Start a timer for some minutes."),
        questions=("Set a timer for {} minutes.", "Start a timer for {} minutes."),
    ),
    ToolKind(
        topic="search",
        names=("search", "search", "web_search"),
        arguments=("query",),
        argument_type="string",
        descriptions=("Search the web.", "Find a text"),
        questions=("Search for {}.", "Search the web for {}.", "Search for the word {}."),
    ),
)


def tool_exchange(rng: Random, kind: ToolKind, tool: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Messages from the user's question to the call, and often on to the result's report.

    `tool` is the specification offered for `kind`, or None where none is: the answer says so.
    """
    values = [kind.value(rng)]
    question = rng.choice(kind.questions).format(values[0])
    if kind.topic in ("weather", "time") and rng.random() < 0.2:
        values.append(rng.choice([city for city in facts.CITIES if city != values[0]]))
        question = question[:-1] + f" and in {values[1]}?"
    if rng.random() < 0.15:
        question = question[:-1]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if tool is None:
        return [*messages, {"role": "assistant", "content": NO_TOOL}]
    function = tool["function"]
    argument = next(iter(function["parameters"]["properties"]))
    calls = [
        {"type": "function", "function": {"name": function["name"], "arguments": {argument: value}}}
        for value in values
    ]
    messages.append({"role": "assistant", "content": "", "tool_calls": calls})
    if rng.random() < 0.3:
        return messages
    results = [kind.result(rng, value) for value in values]
    messages.extend({"role": "tool", "content": content} for content, _ in results)
    report = " ".join(sentence for _, sentence in results)
    return [*messages, {"role": "assistant", "content": report}]
