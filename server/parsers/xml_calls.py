"""Formats that write each argument by itself, as text between tags: its type is the schema's.

Qwen3-Coder, GLM-4.5, MiniMax-M2 and DeepSeek-V3.2.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from moed.server.parsers.reader import Emit, Reader, Steps, ignore
from moed.server.parsers.sink import Sink
from moed.server.parsers.tagged_calls import HERMES_BEGIN, HERMES_END, tagged
from moed.server.parsers.typed_values import ToolTypes, escape, is_text, quote, to_json

QWEN_FUNCTION, QWEN_FUNCTION_END = "<function=", "</function>"
QWEN_PARAMETER, QWEN_PARAMETER_END = "<parameter=", "</parameter>"
GLM_KEY, GLM_KEY_END = "<arg_key>", "</arg_key>"
GLM_VALUE, GLM_VALUE_END = "<arg_value>", "</arg_value>"
ATTRIBUTE = re.compile(r"""(\w+)\s*=\s*["']?([^"'>]*)["']?""")


@dataclass
class Arguments:
    """Writes the arguments of one call as an object."""

    sink: Sink
    num_values: int = 0

    def value(
        self, reader: Reader, key: str, types: frozenset[str], ends: Sequence[str], trims: bool
    ) -> Steps[str | None]:
        """One argument, up to the first of `ends`, which is returned. `trims`: without a line break
        at either end. Text is passed on as it comes.
        """
        before = ", " if self.num_values else "{"
        self.num_values += 1
        self.sink.arguments(f"{before}{quote(key)}: ")
        if trims:
            yield from reader.accept("\n")
        if not is_text(types):
            text, end = yield from reader.text_until(ends)
            if end is not None:
                self.sink.arguments(to_json(text.removesuffix("\n") if trims else text, types))
            return end
        self.sink.arguments('"')
        writer = _WithoutLastBreak(lambda text: self.sink.arguments(escape(text)))
        end = yield from reader.until(ends, writer if trims else writer.emit)
        if end is not None:
            self.sink.arguments('"')
        return end

    def close(self) -> None:
        self.sink.arguments("}" if self.num_values else "{}")


class _WithoutLastBreak:
    """Passes text on, but for a line break at its very end."""

    def __init__(self, emit: Emit) -> None:
        self.emit = emit
        self._held = ""

    def __call__(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        if kept := text.removesuffix("\n"):
            self.emit(kept)


def qwen3_coder(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`"""
    ends = (QWEN_PARAMETER_END, QWEN_PARAMETER, QWEN_FUNCTION_END)

    def call(mark: str) -> Steps[None]:
        if mark == HERMES_BEGIN and not (yield from reader.accept_after_space(QWEN_FUNCTION)):
            return
        name, found = yield from reader.text_until((">", "\n"))
        if found != ">" or not name.strip():
            return
        sink.start_call(name.strip())
        arguments = Arguments(sink)
        tag = yield from reader.until((QWEN_PARAMETER, QWEN_FUNCTION_END, HERMES_END), ignore)
        while tag == QWEN_PARAMETER:
            key, _ = yield from reader.text_until((">",))
            kinds = types.types(name.strip(), key.strip())
            tag = yield from arguments.value(reader, key.strip(), kinds, ends, trims=True)
            if tag == QWEN_PARAMETER_END:
                tag = yield from reader.until(
                    (QWEN_PARAMETER, QWEN_FUNCTION_END, HERMES_END), ignore
                )
        if tag is not None:
            arguments.close()
        if tag == QWEN_FUNCTION_END:
            yield from reader.accept_after_space(HERMES_END)

    yield from tagged(reader, sink, (HERMES_BEGIN, QWEN_FUNCTION), call)


def glm45(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`"""

    def call(mark: str) -> Steps[None]:
        text, tag = yield from reader.text_until((GLM_KEY, HERMES_END))
        name = text.strip()
        if tag is None or not name:
            return
        sink.start_call(name)
        arguments = Arguments(sink)
        while tag == GLM_KEY:
            key, _ = yield from reader.text_until((GLM_KEY_END,))
            yield from reader.until((GLM_VALUE,), ignore)
            kinds = types.types(name, key.strip())
            tag = yield from arguments.value(reader, key.strip(), kinds, (GLM_VALUE_END,), False)
            if tag == GLM_VALUE_END:
                tag = yield from reader.until((GLM_KEY, HERMES_END), ignore)
        if tag is not None:
            arguments.close()

    yield from tagged(reader, sink, (HERMES_BEGIN,), call)


@dataclass(frozen=True)
class InvokeTags:
    """`<P invoke name="NAME"><P parameter name="KEY">VALUE</P parameter></P invoke>` in a section:
    the tags of one model.
    """

    section: tuple[str, str]
    prefix: str
    """What stands after `<` and `</`."""
    trims: bool

    def begin(self, tag: str) -> str:
        return f"<{self.prefix}{tag}"

    def end(self, tag: str) -> str:
        return f"</{self.prefix}{tag}>"


MINIMAX = InvokeTags(("<minimax:tool_call>", "</minimax:tool_call>"), "", trims=True)
DSML = "｜DSML｜"
DEEPSEEK_V32 = InvokeTags(
    (f"<{DSML}function_calls>", f"</{DSML}function_calls>"), DSML, trims=False
)


def invokes(tags: InvokeTags, reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    invoke, invoke_end = tags.begin("invoke"), tags.end("invoke")
    parameter, parameter_end = tags.begin("parameter"), tags.end("parameter")
    section_begin, section_end = tags.section

    def section(mark: str) -> Steps[None]:
        while (yield from reader.until((invoke, section_end), ignore)) == invoke:
            head, found = yield from reader.text_until((">",))
            name = dict(ATTRIBUTE.findall(head)).get("name", "").strip()
            if found is None or not name:
                return
            sink.start_call(name)
            yield from values(name, Arguments(sink))

    def values(name: str, arguments: Arguments) -> Steps[None]:
        tag = yield from reader.until((parameter, invoke_end, section_end), ignore)
        while tag == parameter:
            head, _ = yield from reader.text_until((">",))
            attributes = dict(ATTRIBUTE.findall(head))
            key = attributes.get("name", "").strip()
            kinds = types.types(name, key)
            if (is_string := attributes.get("string")) is not None:
                kinds = frozenset({"string"}) if is_string == "true" else kinds - {"string"}
            tag = yield from arguments.value(reader, key, kinds, (parameter_end,), tags.trims)
            if tag == parameter_end:
                tag = yield from reader.until((parameter, invoke_end, section_end), ignore)
        if tag is not None:
            arguments.close()
        if tag == section_end:
            reader.put_back(section_end)

    yield from tagged(reader, sink, (section_begin,), section)


def minimax_m2(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    yield from invokes(MINIMAX, reader, sink, types)


def deepseek_v32(reader: Reader, sink: Sink, types: ToolTypes) -> Steps[None]:
    """Each argument says whether it is a string."""
    yield from invokes(DEEPSEEK_V32, reader, sink, types)
