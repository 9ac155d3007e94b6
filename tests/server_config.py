"""The front end's settings in tests: plain HTTP, no keys, nothing logged."""

from moed.config.engine_config import ObservabilityConfig, ServerConfig

SERVER = ServerConfig(
    host="127.0.0.1",
    port=0,
    shutdown_timeout_s=5.0,
    drain_delay_s=0.0,
    api_keys=(),
    max_logprobs=20,
    log_level="warning",
    access_log=False,
    strict_params=False,
    tool_call_parser="auto",
    reasoning_parser="auto",
    max_request_bytes=1_000_000,
    admin_api_keys=(),
    request_timeout_s=None,
    slow_reader_timeout_s=60.0,
    tls=None,
    cors=None,
    observability=ObservabilityConfig(
        log_format="text", log_requests=False, metrics_compat="vllm", otlp_traces_endpoint=None
    ),
)
