"""Parameters that the server does not know: refused by name where they would change the answer,
else told to the client as ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moed.config.engine_config import EngineConfig
from moed.server.api.bodies.sampling import SamplingBody
from moed.server.api.errors import UnsupportedParameter

# Parameters that would change the answer: leaving them out silently would be a wrong answer.
# The values that mean "off" pass.
OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "best_of": (None,),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "structured_outputs.whitespace_pattern": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "tool_choice": (None, "auto", "none"),
    "echo": (None, False),
    "thinking_token_budget": (None,),
    "early_stopping": (None, False),
    "logprob_token_ids": (None, []),
    "stop_regex": (None, ""),
    "no_stop_trim": (None, False),
    "repetition_detection": (None,),
    "guided_whitespace_pattern": (None,),
    "guided_decoding": (None,),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "kv_transfer_params": (None,),
    "lora_path": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "web_search_options": (None,),
}
# What takes the place of some of them.
INSTEAD = {
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "best_of": "n gives several choices",
    "use_beam_search": "n gives several choices",
}


@dataclass(frozen=True)
class Ignored:
    """Parameters that the server does not know, and notes on what it does not do."""

    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def headers(self) -> dict[str, str]:
        """Names as a header; those that do not fit into one are in the body's warnings."""
        shown = [name for name in self.names if name.isascii() and name.isprintable()]
        return {"x-moed-ignored-params": ", ".join(shown)[:1000]} if shown else {}

    @property
    def warnings(self) -> list[str]:
        unknown = [f"parameter {name[:100]!r} is not known and was ignored" for name in self.names]
        return [*unknown, *self.notes]


def check_unknown(body: SamplingBody, config: EngineConfig) -> Ignored:
    """Refuse by name what would change the answer; note the rest. Raises `UnsupportedParameter`."""
    ignored = []
    for name, value in body.unknown_fields().items():
        if name in OFF_VALUES:
            is_off = value in OFF_VALUES[name] or (name == "best_of" and value == (body.n or 1))
            if not is_off:
                raise UnsupportedParameter(
                    f"{name} is not supported by this server with the value that was given; "
                    f"{INSTEAD.get(name, 'leave it out')}",
                    param=name,
                )
        elif value is not None:
            ignored.append(name)
    if ignored and config.server.strict_params:
        raise UnsupportedParameter(
            f"{ignored[0][:100]} is not a parameter of this route (strict_params is on)",
            param=ignored[0][:100],
        )
    return Ignored(tuple(ignored))
