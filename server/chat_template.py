"""The checkpoint's chat template, rendered as transformers does, in a sandbox.

A template is code from the Hub: it sees plain JSON values and a few helpers, and can reach nothing
else.
"""

import contextlib
import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moed.config.errors import ModelError

# A template that runs on after so much text is at fault.
MAX_MESSAGE_CHARACTERS = 2000
# Its last space is lost where a template trims the message.
CONTINUE_MARK = "CONTINUE-THE-FINAL-MESSAGE-HERE "
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class TemplateFailed(Exception):
    """The conversation cannot be rendered; the message is the template's own where it has one."""


class GenerationBlocks(jinja2.ext.Extension):
    """`{% generation %} … {% endgeneration %}` marks what an assistant says; rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a model has never seen in training."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationBlocks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One checkpoint's template (or several by name), and the special tokens it may print."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`sources`: at least "default". Raises `ModelError` for one that does not compile."""
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._sources = dict(sources)
        try:
            self._templates = {
                name: environment.from_string(source) for name, source in sources.items()
            }
        except jinja2.TemplateError as error:
            raise ModelError(f"the checkpoint's chat template does not compile: {error}") from None

    @classmethod
    def load(cls, folder: str) -> "ChatTemplate | None":
        """The template of a checkpoint; None when it has none. chat_template.jinja comes first,
        then chat_template.json, then tokenizer_config.json. Raises `ModelError`.
        """
        root = pathlib.Path(folder)
        config = read_json(root / "tokenizer_config.json")
        sources = _sources(root, config)
        if not sources:
            return None
        if "default" not in sources:
            sources["default"] = next(iter(sources.values()))
        return cls(sources, special_tokens(config))

    @cached_property
    def wants_text_arguments(self) -> bool:
        """True for templates that print the arguments of earlier calls as they are, and so need
        them as JSON text; most take objects.
        """
        return not self._renders_call({"a": 1}) and self._renders_call('{"a": 1}')

    def _renders_call(self, arguments: Any) -> bool:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00001", "type": "function", "function": function}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call00001", "name": "f", "content": "y"},
        ]
        try:
            self.render(
                messages,
                None,
                add_generation_prompt=True,
                continue_final_message=False,
                options={},
            )
        except TemplateFailed:
            return False
        return True

    @property
    def source(self) -> str:
        """All of the template's own text."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        options: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises `TemplateFailed`."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        chat = [self._prepare(message, self._sources[name]) for message in messages]
        ending = _mark_ending(chat) if continue_final_message else None
        # Nothing that a request brings may hide what the server itself passes.
        variables = {
            **self._special_tokens,
            **options,
            "messages": chat,
            "tools": list(tools) if tools else None,
            "documents": options.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._templates[name].render(variables)
        except jinja2.TemplateError as error:
            raise TemplateFailed(_shorten(str(error))) from None
        except RecursionError:
            raise TemplateFailed("the conversation is nested too deeply") from None
        except Exception as error:  # a template is code, and may fail in any way
            raise TemplateFailed(_shorten(f"{type(error).__name__}: {error}")) from None
        return text if ending is None else _cut_at_mark(text, ending)

    @staticmethod
    def _prepare(message: Mapping[str, Any], source: str) -> dict[str, Any]:
        """A copy as templates expect it: all names of reasoning, no role that they do not know."""
        prepared = dict(message)
        if prepared.get("role") == "developer" and "developer" not in source:
            prepared["role"] = "system"
        values = (prepared[field] for field in REASONING_FIELDS if prepared.get(field) is not None)
        if (reasoning := next(values, None)) is not None:
            prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
        return prepared


def _mark_ending(chat: list[dict[str, Any]]) -> str:
    content = chat[-1].get("content") if chat else None
    if not isinstance(content, str) or not content.strip():
        raise TemplateFailed("continue_final_message needs a final message with text content")
    chat[-1]["content"] = content + CONTINUE_MARK
    return content


def _cut_at_mark(text: str, content: str) -> str:
    position = text.rfind(CONTINUE_MARK.strip())
    if position < 0:
        raise TemplateFailed("the chat template drops the final message: it cannot be continued")
    is_trimmed = not text.startswith(CONTINUE_MARK, position)
    return text[:position].rstrip() if is_trimmed else text[:position]


def _sources(root: pathlib.Path, config: Mapping[str, Any]) -> dict[str, str]:
    found = config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(found, str):
        sources["default"] = found
    elif isinstance(found, list):
        sources.update({entry["name"]: entry["template"] for entry in found})
    if isinstance(other := read_json(root / "chat_template.json").get("chat_template"), str):
        sources["default"] = other
    for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    with contextlib.suppress(FileNotFoundError):
        sources["default"] = (root / "chat_template.jinja").read_text(encoding="utf-8")
    return sources


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, as text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _shorten(message: str) -> str:
    message = message or "the chat template refused the conversation"
    if len(message) <= MAX_MESSAGE_CHARACTERS:
        return message
    return message[:MAX_MESSAGE_CHARACTERS] + "…"
