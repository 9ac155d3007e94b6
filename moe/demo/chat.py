"""The demo model's chat format: a Jinja template for servers, and the same in plain Python.

Training renders hundreds of thousands of dialogues, so it uses `render`; a test
holds the two equal.
"""

import json
from functools import lru_cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from moed.moe.demo.corpus import Dialogue

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL_TAGS = ("<tool_call>", "</tool_call>")
VOCABULARY_SIZE = 768

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    (
        """\
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if has_system %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- TOOLS_BEFORE }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- TOOLS_AFTER + '<|im_end|>\\n' }}
{%- elif has_system %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            {%- set function = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
    )
    .replace("TOOLS_BEFORE", repr(TOOLS_BEFORE))
    .replace("TOOLS_AFTER", repr(TOOLS_AFTER))
)


def render(dialogue: Dialogue) -> list[tuple[str, bool]]:
    """Pieces of text in order; True marks what the assistant has to say, its end mark included."""
    pieces: list[tuple[str, bool]] = []
    messages = dialogue.messages
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if dialogue.tools:
        lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in dialogue.tools)
        system = (f"{system}\n\n" if system else "") + TOOLS_BEFORE + lines + TOOLS_AFTER
    if system is not None:
        pieces.append((f"{START}system\n{system}{END}\n", False))
    previous_role = ""
    for index, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "user":
            pieces.append((f"{START}user\n{content}{END}\n", False))
        elif role == "tool":
            last = index + 1 == len(messages) or messages[index + 1]["role"] != "tool"
            text = f"\n<tool_response>\n{content}\n</tool_response>"
            # One piece for all results in a row: a merge may span the line break between them.
            before = pieces.pop()[0] if previous_role == "tool" else f"{START}user"
            pieces.append((before + text + (f"{END}\n" if last else ""), False))
        elif role == "assistant":
            pieces.append((f"{START}assistant\n", False))
            pieces.append((assistant_text(message) + END, True))
            pieces.append(("\n", False))
        previous_role = role
    return pieces


def assistant_text(message: dict[str, object]) -> str:
    """The answer as tokens are made of it, tool calls included."""
    calls = message.get("tool_calls") or []
    assert isinstance(calls, list)
    blocks = []
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        body = f'{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}'
        blocks.append(f"{TOOL_CALL_TAGS[0]}\n{body}\n{TOOL_CALL_TAGS[1]}")
    return str(message["content"]) + "\n".join(blocks)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE as Qwen has it: every digit is a token of its own.

    Merges are learned from the ASCII part only, so an emoji or a Hebrew letter takes several tokens
    and streaming has to join them.
    """
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, START, END]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(special) - len(TOOL_CALL_TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = [text.encode("ascii", "ignore").decode() for text in texts]
    for mark in (*special, *TOOL_CALL_TAGS):
        plain = [text.replace(mark, "\n") for text in plain]
    tokenizer.train_from_iterator(plain, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in TOOL_CALL_TAGS])
    return tokenizer


class Encoder:
    """Dialogues to token ids; repeated pieces are remembered, since most of them repeat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_id = tokenizer.token_to_id(END)
        self.piece_ids = lru_cache(maxsize=50_000)(self._piece_ids)

    def _piece_ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)

    def encode(self, dialogue: Dialogue) -> tuple[list[int], list[int]]:
        """Token ids, and for each the length of the answer it is part of, or 0."""
        ids: list[int] = []
        answer_lengths: list[int] = []
        for text, is_answer in render(dialogue):
            piece = self.piece_ids(text)
            ids.extend(piece)
            answer_lengths.extend([len(piece) if is_answer else 0] * len(piece))
        return ids, answer_lengths
