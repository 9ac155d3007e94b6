"""What the user may set: one field per setting, with its default, limits and help.

Flags, environment variables, file keys and the help are all generated from this class;
`moed.config.validation` builds the pydantic-settings model from it. None stands for "decided by
`resolve()` or at start".
"""

from dataclasses import dataclass

from moed.config.chat_formats import (
    REASONING_PARSERS,
    REASONING_SYNONYMS,
    TOOL_CALL_PARSERS,
    TOOL_CALL_SYNONYMS,
)
from moed.config.options import option

MODEL = "Model"
PARALLEL = "Parallelism"
NODES = "Several nodes"
SCHEDULING = "Scheduling"
MEMORY = "Memory"
HTTP = "HTTP"
PROCESSES = "Processes"
GROUPS = (MODEL, PARALLEL, NODES, SCHEDULING, MEMORY, HTTP, PROCESSES)


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Settings of `moed serve`, as given, before any cross-check."""

    model: str | None = option(
        None,
        "checkpoint directory, or org/name on the Hugging Face Hub",
        group=MODEL,
        common=True,
        shown_default="the bundled moed-demo",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "name(s) that clients use; several are aliases",
        group=MODEL,
        common=True,
        metavar="NAME",
        shown_default="MODEL as given",
    )
    max_model_len: int | None = option(
        None,
        "prompt plus output tokens of one request; auto: what the model and the memory allow",
        group=MODEL,
        common=True,
        unit="tokens",
        minimum=2,
        shown_default="auto",
    )
    dtype: str = option(
        "auto",
        "number format of weights and activations; auto: that of the checkpoint",
        group=MODEL,
        common=True,
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms={"float": "float32", "half": "float16"},
    )
    revision: str | None = option(
        None,
        "branch, tag or commit on the Hub",
        group=MODEL,
        metavar="NAME",
        shown_default="the main branch",
    )
    offline: bool = option(False, "take Hub models from the local cache only", group=MODEL)
    load_format: str = option(
        "auto",
        "auto: safetensors; dummy: random weights, no weights are read",
        group=MODEL,
        choices=("auto", "dummy"),
        synonyms={"safetensors": "auto"},
    )
    seed: int = option(0, "of dummy weights", group=MODEL, minimum=0)

    data_parallel_size: int = option(
        1,
        "ranks: processes with attention of their own, sharing the experts",
        group=PARALLEL,
        common=True,
        short="-dp",
        minimum=1,
    )
    tensor_parallel_size: int = option(
        1,
        "processes that share the attention heads of one data-parallel rank",
        group=PARALLEL,
        short="-tp",
        minimum=1,
    )
    enable_expert_parallel: bool = option(
        True,
        "spread whole experts over all processes; off: each holds a shard of every expert",
        group=PARALLEL,
    )
    expert_placement: str | None = option(
        None,
        "JSON file that says which rank holds which experts, copies included (`moed place`)",
        group=PARALLEL,
        metavar="FILE",
        shown_default="even shares in order",
    )
    all2all_backend: str = option(
        "auto",
        "how rows travel to their experts; auto: local for one rank, else all2allv",
        group=PARALLEL,
        common=True,
        metavar="NAME",
    )
    device: str = option(
        "auto",
        "auto: cuda where an NVIDIA device is found, else cpu",
        group=PARALLEL,
        common=True,
        choices=("auto", "cpu", "cuda"),
    )
    agreement_backend: str = option(
        "auto",
        "what carries the ranks' agreement before each step; auto: nccl on GPUs, gloo on CPUs",
        group=PARALLEL,
        choices=("auto", "nccl", "gloo"),
    )
    attention_backend: str = option(
        "auto",
        "auto: FlashInfer's kernels on GPUs where they are installed and know the model's "
        "attention, else torch's own (sdpa)",
        group=PARALLEL,
        choices=("auto", "flashinfer", "sdpa"),
        synonyms={"torch": "sdpa"},
    )
    cpu_kernels: str = option(
        "auto",
        "what computes on CPUs; auto: native, the kernels in C++, where they could be built, else "
        "torch",
        group=PARALLEL,
        choices=("auto", "native", "torch"),
    )
    num_threads: int | None = option(
        None,
        "CPU threads of each rank; auto (or 0): available cores divided by local ranks",
        group=PARALLEL,
        minimum=1,
        shown_default="auto",
    )
    distributed_timeout: float = option(
        300.0,
        "bound on any one collective, the wait for a slower rank's loading included",
        group=PARALLEL,
        unit="seconds",
        minimum=1,
    )

    nnodes: int = option(
        1,
        "nodes (machines) that run this command together; torchrun says so itself",
        group=NODES,
        minimum=1,
        aliases=("num_nodes",),
    )
    node_rank: int = option(
        0, "which of them this is; the first, 0, has the HTTP port", group=NODES, minimum=0
    )
    master_addr: str | None = option(
        None,
        "address of the first node, the same on all",
        group=NODES,
        metavar="ADDRESS",
        shown_default="none",
    )
    master_port: int = option(
        29500, "port there, where the ranks meet", group=NODES, minimum=1, maximum=65535
    )
    host_interface: str | None = option(
        None,
        "network interface for all that goes between nodes; it must be of a private network",
        group=NODES,
        metavar="NAME",
        shown_default="that of the route to the first node",
    )
    rendezvous_timeout: float = option(
        45.0,
        "how long a node waits for the others to come",
        group=NODES,
        unit="seconds",
        minimum=1,
    )
    probe_port: int | None = option(
        None,
        "port on which nodes other than the first answer /livez and /readyz; 0: a free one",
        group=NODES,
        minimum=0,
        maximum=65535,
        shown_default="as --port",
    )
    transport_key_file: str | None = option(
        None,
        "file with a secret that all nodes share; or set MOED_TRANSPORT_KEY",
        group=NODES,
        metavar="FILE",
        shown_default="each launch makes one, which hosts of the private network can read",
    )
    transport_key: str | None = option(
        None,
        "secret that all nodes share",
        group=NODES,
        on_command_line=False,
        secret=True,
        shown_default="none",
    )

    max_num_batched_tokens: int | None = option(
        None,
        "most tokens that one rank runs in one step (B); sizes every MoE buffer",
        group=SCHEDULING,
        common=True,
        unit="tokens",
        minimum=1,
        shown_default="2048; 256 with a batched backend",
    )
    max_num_seqs: int | None = option(
        None,
        "most requests that one rank runs in one step (S)",
        group=SCHEDULING,
        common=True,
        minimum=1,
        shown_default="256, or B where that is smaller",
    )
    enforce_eager: bool = option(
        False, "on GPUs, launch decode steps anew instead of replaying graphs", group=SCHEDULING
    )
    step_ahead: bool = option(
        False,
        "prepare the next step while the GPU computes (nothing is won on CPUs)",
        group=SCHEDULING,
    )
    enable_chunked_prefill: bool = option(True, "split long prompts over steps", group=SCHEDULING)
    max_num_queued_requests: int = option(
        1024,
        "requests that wait, all ranks together, before new ones get 503",
        group=SCHEDULING,
        minimum=0,
    )

    gpu_memory_utilization: float = option(
        0.92,
        "share of each GPU's memory to use",
        group=MEMORY,
        common=True,
        minimum=0.01,
        maximum=1,
        metavar="SHARE",
    )
    kv_cache_memory: int | None = option(
        None,
        "KV cache of each rank, instead of a share",
        group=MEMORY,
        common=True,
        aliases=("kv_cache_memory_bytes",),
        unit="bytes",
        minimum=1,
        shown_default="from the share",
    )
    num_kv_blocks: int | None = option(
        None,
        "KV blocks of each rank, instead of an amount of memory",
        group=MEMORY,
        aliases=("num_gpu_blocks_override",),
        minimum=1,
        shown_default="from the memory",
    )
    enable_prefix_caching: bool = option(
        True,
        "compute what prompts have in common once, as long as it stays in the KV cache",
        group=MEMORY,
    )
    block_size: int = option(16, "tokens in one KV block", group=MEMORY, minimum=1, maximum=1024)

    host: str = option(
        "127.0.0.1",
        "address to listen on; 0.0.0.0 for all",
        group=HTTP,
        common=True,
        metavar="ADDRESS",
    )
    port: int = option(
        8000,
        "port to listen on; 0: a free one",
        group=HTTP,
        common=True,
        minimum=0,
        maximum=65535,
    )
    api_key_file: str | None = option(
        None,
        "file with one accepted API key a line; or set MOED_API_KEY",
        group=HTTP,
        common=True,
        metavar="FILE",
        shown_default="no key is asked for",
    )
    api_keys: tuple[str, ...] = option(
        (),
        "accepted API keys",
        group=HTTP,
        on_command_line=False,
        aliases=("api_key",),
        secret=True,
    )
    admin_api_key_file: str | None = option(
        None,
        "file with one admin key a line, which /admin/* and /server_info then ask for; or set "
        "MOED_ADMIN_API_KEY",
        group=HTTP,
        metavar="FILE",
        shown_default="an API key opens them; without any, only this machine",
    )
    admin_api_keys: tuple[str, ...] = option(
        (),
        "accepted admin keys",
        group=HTTP,
        on_command_line=False,
        aliases=("admin_api_key",),
        secret=True,
    )
    ssl_keyfile: str | None = option(
        None,
        "PEM file with the key of an https:// port",
        group=HTTP,
        metavar="FILE",
        shown_default="plain http://",
    )
    ssl_certfile: str | None = option(
        None,
        "PEM file with its certificate, and those between it and the authority",
        group=HTTP,
        metavar="FILE",
        shown_default="plain http://",
    )
    ssl_ca_certs: str | None = option(
        None,
        "PEM file with the authorities whose client certificates are taken",
        group=HTTP,
        metavar="FILE",
        shown_default="none",
    )
    ssl_cert_reqs: int = option(
        0,
        "certificates of clients; 0: none are asked for, 1: they may show one, 2: they must",
        group=HTTP,
        minimum=0,
        maximum=2,
    )
    ssl_ciphers: str | None = option(
        None,
        "ciphers of TLS 1.2, as OpenSSL writes them",
        group=HTTP,
        metavar="LIST",
        shown_default="OpenSSL's",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin(s) of web pages that may call from a browser, such as https://chat.example; *: all",
        group=HTTP,
        metavar="ORIGIN",
        shown_default="none",
    )
    allow_credentials: bool = option(
        False, "let pages of those origins send cookies and the like", group=HTTP
    )
    allowed_methods: tuple[str, ...] = option(
        ("*",), "HTTP method(s) that they may use; *: all", group=HTTP, metavar="METHOD"
    )
    allowed_headers: tuple[str, ...] = option(
        ("*",), "header(s) that they may send; *: all", group=HTTP, metavar="HEADER"
    )
    request_timeout: float | None = option(
        None,
        "bound on a request from its arrival to the end of its answer; auto: no bound",
        group=HTTP,
        unit="seconds",
        minimum=0.001,
        shown_default="no bound",
    )
    slow_reader_timeout: float = option(
        60.0,
        "how long a client may read nothing of an answer that waits for it, before it is cut off",
        group=HTTP,
        unit="seconds",
        minimum=0.001,
    )
    max_logprobs: int = option(
        20, "most logprobs per token that a request may ask for", group=HTTP, minimum=0
    )
    max_request_bytes: int = option(
        32 * 1024 * 1024,
        "largest request body; a larger one gets 413",
        group=HTTP,
        unit="bytes",
        minimum=1024,
    )
    strict_params: bool = option(
        False, "refuse requests with unknown parameters, instead of warning", group=HTTP
    )
    tool_call_parser: str = option(
        "auto",
        "how the model calls tools; auto: as its chat template does; none, or one of "
        + ", ".join(TOOL_CALL_PARSERS),
        group=HTTP,
        choices=("auto", "none", *TOOL_CALL_PARSERS),
        synonyms=TOOL_CALL_SYNONYMS,
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto",
        "how the model marks its reasoning; auto: as its chat template does; none, or one of "
        + ", ".join(REASONING_PARSERS),
        group=HTTP,
        choices=("auto", "none", *REASONING_PARSERS),
        synonyms=REASONING_SYNONYMS,
        metavar="NAME",
    )
    log_requests: bool = option(
        False,
        "log a JSON line for each request that has ended; never prompts or outputs",
        group=HTTP,
        aliases=("enable_log_requests",),
    )
    metrics_compat: str = option(
        "vllm",
        "vllm: /metrics shows what vLLM shows under its names too",
        group=HTTP,
        choices=("vllm", "none"),
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "send an OpenTelemetry span for each request to this OTLP/HTTP address, such as "
        "http://collector:4318/v1/traces",
        group=HTTP,
        metavar="URL",
        shown_default="no spans",
    )
    access_log: bool = option(True, "log a line for each HTTP request", group=HTTP)

    config: str | None = option(
        None,
        "YAML or TOML file with settings; flags and MOED_* variables win over it",
        group=PROCESSES,
        common=True,
        metavar="FILE",
        shown_default="none",
    )
    log_level: str = option(
        "info",
        "least severe log lines to print",
        group=PROCESSES,
        common=True,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "text",
        "json: each log line is one object",
        group=PROCESSES,
        choices=("text", "json"),
    )
    shutdown_timeout: float = option(
        30.0,
        "how long SIGTERM lets open requests finish",
        group=PROCESSES,
        common=True,
        unit="seconds",
        minimum=0,
    )
    drain_delay: float = option(
        0.0,
        "of that time, how long new requests are still served while /readyz is red already: as "
        "long as a load balancer takes to see it",
        group=PROCESSES,
        unit="seconds",
        minimum=0,
    )
    on_rank_failure: str = option(
        "recover",
        "recover: form the group anew and go on with all open requests; exit: end with an error",
        group=PROCESSES,
        choices=("recover", "exit"),
    )
    max_restarts: int = option(
        10,
        "most recoveries, of ranks and of the front end, in ten minutes; one more ends the daemon "
        "(torchrun counts by its own --max-restarts)",
        group=PROCESSES,
        minimum=0,
    )
    recovery_timeout: float = option(
        60.0,
        "how long requests are held while the ranks recover, before they get an error",
        group=PROCESSES,
        unit="seconds",
        minimum=0,
    )
    step_timeout: float = option(
        120.0,
        "a rank that keeps the others waiting for longer in one step is ended; half of it turns "
        "readiness red",
        group=PROCESSES,
        unit="seconds",
        minimum=1,
    )
    fault_injection: str | None = option(None, "faults on demand", group=PROCESSES, hidden=True)
