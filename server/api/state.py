"""All that the routes work with, made once by the front end and passed to `create_app`."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from moed.config.engine_config import EngineConfig
from moed.config.versions import installed_version
from moed.server.api.open_generations import OpenGenerations
from moed.server.chat_template import ChatTemplate
from moed.server.engine_client import EngineClient
from moed.server.grammar_checker import GrammarChecker
from moed.server.health import Health
from moed.server.metrics import Metrics
from moed.server.parsers.registry import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from moed.server.tokenizer import TextTokenizer
from moed.server.tokenizer_info import tokenizer_info
from moed.server.tool_round_trip import reads_back


class OpenRequests:
    """How many API requests are between their arrival and the last byte of their answer."""

    def __init__(self) -> None:
        self._num_open = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_open(self) -> int:
        return self._num_open

    def __enter__(self) -> None:
        self._num_open += 1
        self._is_empty.clear()

    def __exit__(self, *exception: object) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._is_empty.set()

    async def wait_empty(self, timeout_s: float) -> bool:
        """True once none is open, False when the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True)
class TextTools:
    """What stands between text and tokens."""

    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None
    tool_format: ToolFormat | None
    reasoning_format: ReasoningFormat | None
    is_read_back: bool
    """False when the template writes calls that the parser does not read."""
    info: Mapping[str, Any]
    """Of the tokenizer, for clients."""

    @classmethod
    def load(cls, config: EngineConfig) -> "TextTools":
        """Read the checkpoint's files. Raises `ModelError`."""
        folder, server = config.model.path, config.server
        template = ChatTemplate.load(folder)
        source = "" if template is None else template.source
        tools = tool_format(server.tool_call_parser, source)
        tokenizer = TextTokenizer.load(folder)
        return cls(
            tokenizer,
            template,
            tools,
            reasoning_format(server.reasoning_parser, source),
            template is None or tools is None or reads_back(template, tools),
            tokenizer_info(folder, tokenizer, template, config.model.eos_token_ids),
        )


@dataclass
class AppState:
    """`text` is filled once the tokenizer has been read; routes that need it answer 503 before."""

    config: EngineConfig
    engine: EngineClient
    health: Health
    metrics: Metrics
    grammars: GrammarChecker
    text: TextTools | None = None
    open_requests: OpenRequests = field(default_factory=OpenRequests)
    generations: OpenGenerations = field(default_factory=OpenGenerations)
    created_at: int = field(default_factory=lambda: int(time.time()))
    version: str = field(default_factory=lambda: installed_version("moed") or "0+unknown")

    @property
    def tools(self) -> TextTools:
        """The text tools, behind the check that the daemon is ready."""
        assert self.text is not None
        return self.text

    @cached_property
    def system_fingerprint(self) -> str:
        return f"moed-{self.version}-{self.config.digest():016x}"[: len(self.version) + 14]

    @property
    def context_length(self) -> int:
        return self.engine.context_length
