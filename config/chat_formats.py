"""Names of the formats in which models reason and call tools, as vLLM's users know them.

`moed.server.parsers.registry` holds a parser for each.
"""

AUTO, NONE = "auto", "none"

TOOL_CALL_PARSERS = (
    "hermes",
    "qwen3_coder",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "openai",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "pythonic",
)
TOOL_CALL_SYNONYMS = {
    "qwen3_xml": "qwen3_coder",
    "qwen": "hermes",
    "glm47": "glm45",
    "gpt_oss": "openai",
}

REASONING_PARSERS = (
    "qwen3",
    "deepseek_r1",
    "deepseek_v3",
    "glm45",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "seed_oss",
    "openai_gptoss",
)
REASONING_SYNONYMS = {"gpt_oss": "openai_gptoss"}
