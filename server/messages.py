"""Every message between the front end and the engines: one class each, encoded with msgspec,
nothing pickled.

Engines are token-in, token-out. A request can be rebuilt anywhere from its prompt, its parameters
and its output tokens: randomness is a pure function of (`SamplingParams.seed`, output index), and
each token message carries request id, output index and epoch, so that the front end can drop
duplicates and what an older epoch sent.
"""

import msgspec

from moed.server.histogram import Histogram
from moed.server.node_messages import FromNode, Joined, NodeOrder, NodeReport, RanksReady


class ReasoningLimit(msgspec.Struct, frozen=True):
    """How much an output may reason before its end is written for it."""

    begin_id: int | None
    """The token that begins the reasoning; None: the prompt has begun it."""
    end_ids: list[int]
    """Tokens that end it; the first is the one that is written."""
    max_tokens: int


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How to choose tokens. Every value is validated and final: the engine applies no defaults of
    its own.
    """

    max_tokens: int
    """At least 0; 0 only scores the prompt (with `prompt_logprobs`)."""
    seed: int
    """64-bit, unsigned. Always set: a request without one gets one at admission."""
    temperature: float
    """0 means greedy."""
    min_tokens: int = 0
    """No stop token is chosen before this many output tokens."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    """No other token is chosen; None: any may be."""
    bad_words: list[list[int]] = []
    """Sequences of tokens that the output must not hold."""
    logprobs: int | None = None
    """None: none. k: the chosen token's, and the k most likely ones (k may be 0)."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each prompt token but the first."""
    return_routed_experts: bool = False
    """Send which experts each token was routed to."""
    stop_token_ids: list[int] = []
    """Tokens that end the output: those of the request and, unless `ignore_eos`, the model's EOS
    ids.
    """
    grammar: str | None = None
    """What the output must follow, as llguidance reads it; then only an end token comes."""
    reasoning_limit: ReasoningLimit | None = None


class AddRequest(msgspec.Struct, frozen=True, tag="add", kw_only=True):
    """A new request, or one that another engine began (then `output_token_ids` is not empty)."""

    request_id: str
    """Internal and unique in the front end's life; a client's own id never comes here."""
    epoch: int
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = []
    priority: int = 0
    """Lower runs first."""
    cache_salt: str | None = None
    """Prefixes are shared only with requests of the same salt."""


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """Free these requests. Unknown ids are ignored: they have just finished. No answer is sent."""

    request_ids: list[str]


class PauseRequests(msgspec.Struct, frozen=True, tag="pause"):
    """Compute nothing more of these until they are resumed, and let others have their place: nobody
    reads what they have given so far. Unknown ids are ignored.
    """

    request_ids: list[str]


class ResumeRequests(msgspec.Struct, frozen=True, tag="resume"):
    """Go on with paused requests. Unknown ids are ignored."""

    request_ids: list[str]


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """From the one waker: a sleeping rank resumes on any number above its last one."""

    number: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop together with the other ranks, once all have been told."""


class FrontendReplaced(msgspec.Struct, frozen=True, tag="frontend_replaced"):
    """The front end has ended and another one takes its place: its requests are nobody's. From the
    launcher, by the engine's own channel.
    """


class ForgetPrefixes(msgspec.Struct, frozen=True, tag="forget_prefixes"):
    """Compute every new request's prompt from its first token, whatever the KV cache holds."""


ToEngine = (
    AddRequest
    | AbortRequests
    | PauseRequests
    | ResumeRequests
    | Wake
    | Shutdown
    | ForgetPrefixes
    | FrontendReplaced
)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position, of the distribution before temperature and
    filters.
    """

    logprob: float
    """Of the chosen (or, in a prompt, the given) token."""
    rank: int
    """1 for the most likely token."""
    top_ids: list[int]
    top_logprobs: list[float]


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """The experts that a request's tokens were routed to, in each MoE layer."""

    first_position: int
    num_tokens: int
    ids: bytes
    """[num_tokens, MoE layers, K] uint16, little-endian."""


# The error of an output whose request is at fault itself, not the engine.
NOTHING_LEFT = (
    "logit_bias, allowed_token_ids, bad_words, min_tokens and the grammar leave no token to choose"
)


class TokenOutput(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What one step gave one request. Steps that only prefill send nothing."""

    request_id: str
    epoch: int
    output_index: int
    """Index of `token_ids[0]` among the request's output tokens."""
    token_ids: list[int]
    finish_reason: str | None = None
    """"stop" (a stop token), "length", or "error"; None while it goes on. The front end alone says
    "abort", where somebody has asked for it.
    """
    stop_token_id: int | None = None
    """The stop token that ended it: also the last of `token_ids`."""
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    """One per token of `token_ids`, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Once, with the first output: one per prompt token, the first None."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, thanks to the prefix cache."""
    queue_s: float = 0.0
    """With the first output: seconds between the request's arrival and its first step."""
    num_preemptions: int = 0
    """With the last output: how often the request has given its KV blocks to others."""
    routed_experts: list[RoutedExperts] = []
    """When asked for: of the tokens computed since the last output. What preemption has computed
    again comes twice.
    """


class RankStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now and counters since the start, of one rank."""

    rank: int
    num_running: int
    num_waiting: int
    num_kv_blocks_used: int
    num_kv_blocks: int
    num_queued_tokens: int
    """Tokens still to be computed of waiting and running prompts."""
    num_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    max_step_tokens: int
    """Most tokens any step ran so far: never above B."""
    num_finished: int
    num_aborted: int
    num_prefix_queries: int
    """Prompt tokens of requests that looked for their prefix in the cache."""
    num_prefix_hits: int
    """Those of them that were found."""
    num_paused: int = 0
    """Requests that neither run nor wait, since their clients do not read."""


# Between processes of one host, and of two.
INTRA, INTER = "intra", "inter"
SCOPES = (INTRA, INTER)


class WireBytes(msgspec.Struct, frozen=True, array_like=True):
    """Payload of one process's rows to other processes, and of their results back."""

    dispatch: int
    combine: int


class ExpertLoad(msgspec.Struct, frozen=True, tag="expert_load"):
    """What the experts of one process have computed since it was ready, and what its rows took to
    reach others: at most once a second, and when it goes to sleep.
    """

    rank: int
    """Of the process: DP rank x tensor parallel size + member."""
    num_steps: int
    """That all processes have made together until then."""
    num_tokens: int
    """That its DP rank has run in them; 0 for members but the first."""
    layers: list[int]
    """The decoder layers that have experts."""
    rows: dict[str, list[list[int]]]
    """By phase of the group's step, layer and slot: (token, choice) pairs, padding excluded."""
    wire_bytes: dict[str, dict[str, WireBytes]]
    """By phase and scope: see `SCOPES`."""


class DurationCounts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram over buckets of `moed.server.metric_buckets`, since the start."""

    counts: list[int]
    """By bucket, each its own; the last one has no limit."""
    sum_s: float

    @classmethod
    def of(cls, histogram: Histogram) -> "DurationCounts":
        return cls(list(histogram.counts), histogram.sum)


class StepDurations(msgspec.Struct, frozen=True, tag="step_durations"):
    """How long one rank's steps have taken since it was ready: at most once a second, and when it
    goes to sleep.
    """

    rank: int
    steps: dict[str, DurationCounts]
    """By phase."""
    waits: DurationCounts
    """For the other ranks, before each step."""
    parts: dict[str, dict[str, DurationCounts]]
    """By `moed.moe.part_times.Part` and phase, over `PART_S`; of a step now and then."""


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step of one rank gave, and its statistics after it."""

    rank: int
    outputs: list[TokenOutput]
    stats: RankStats


class RankReady(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """This rank has done one real MoE step through dispatch and combine with all others."""

    rank: int
    """Of the process: DP rank x tensor parallel size + member."""
    num_kv_blocks: int
    """Agreed: the minimum over ranks."""
    block_size: int
    max_model_len: int
    """Agreed: L, or what `auto` became."""
    startup_s: dict[str, float]
    """Seconds by phase: import, rendezvous, load, warm_up."""
    memory_bytes: dict[str, int] = {}
    """By use: weights, kv_cache."""


class RankProgress(msgspec.Struct, frozen=True, tag="progress"):
    """What a starting rank is doing."""

    rank: int
    phase: str


FromEngine = StepOutputs | ExpertLoad | StepDurations | RankReady | RankProgress | FromNode


class RankFailure(msgspec.Struct, frozen=True, tag="failure", kw_only=True):
    """A rank's last words, to the launcher."""

    rank: int
    error: str
    """One paragraph for a person."""
    details: str
    """The traceback when the fault is ours, else empty."""
    is_consequence: bool
    """True when it only lost a peer; the peer's own failure is the cause."""
    exit_code: int


class AtDoor(msgspec.Struct, frozen=True, tag="at_door"):
    """This rank has left every older group, and waits to be told to `Join`."""

    rank: int
    epoch: int


class PeerGone(msgspec.Struct, frozen=True, tag="peer_gone"):
    """This rank is well, and a collective of its group has failed."""

    rank: int
    epoch: int
    error: str


FromRank = RankFailure | AtDoor | PeerGone | Joined | RanksReady


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Give up the group, whatever it is doing, and come to the door of `epoch`: `AtDoor`."""

    epoch: int


class Join(msgspec.Struct, frozen=True, tag="join"):
    """All ranks are at the door: form the group. Rank 0 gets the store's socket right after."""

    epoch: int
    store_port: int


class NewFrontend(msgspec.Struct, frozen=True, tag="new_frontend"):
    """The front end has ended; another one will listen at `address`."""

    number: int
    """How many there have been before."""
    address: str


ToRank = Leave | Join | NewFrontend


class Regrouping(msgspec.Struct, frozen=True, tag="regrouping"):
    """A rank is gone, and the group is formed anew: requests are held until it is ready."""

    epoch: int
    rank: int | None
    """None: all are there, and did not get on."""
    error: str


class RankSlow(msgspec.Struct, frozen=True, tag="rank_slow"):
    """A rank keeps the others waiting; empty: not any more."""

    error: str


class RankLost(msgspec.Struct, frozen=True, tag="rank_lost"):
    """A rank is gone: every open request gets an error event at once; answered with `Drained`."""

    rank: int
    error: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new requests, finish open ones within `shutdown_timeout_s`, then tell all ranks
    `Shutdown`; answered with `Drained`."""


class StopNow(msgspec.Struct, frozen=True, tag="stop_now"):
    """End open requests with an error event, tell all ranks `Shutdown`, and leave."""


class LastLaunch(msgspec.Struct, frozen=True, tag="last_launch"):
    """Under torchrun: no other ranks will be started after these."""


ToFrontend = RankLost | Regrouping | RankSlow | Drain | StopNow | NodeOrder | LastLaunch


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The HTTP socket answers (probes, and 503 to the rest while the ranks start)."""


class GroupReady(msgspec.Struct, frozen=True, tag="group_ready", kw_only=True):
    """All ranks are ready: requests are served."""

    num_kv_blocks: int
    max_model_len: int
    epoch: int = 0


class Active(msgspec.Struct, frozen=True, tag="active"):
    """The ranks have been woken: the watchdog should look at them. Not more than once a second."""

    wake_number: int


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """No request is open any more; after a drain, all ranks have been told `Shutdown`."""

    num_unfinished: int
    """Requests that got an error event instead of their end."""


class FrontendFailure(msgspec.Struct, frozen=True, tag="frontend_failure", kw_only=True):
    """The front end's last words: it cannot serve, for a reason that a user can mend."""

    error: str
    exit_code: int


class StopAsked(msgspec.Struct, frozen=True, tag="stop_asked"):
    """Another node was asked to stop: treated as a signal to this one."""


class Wired(msgspec.Struct, frozen=True, tag="wired", kw_only=True):
    """Under torchrun, to rank 0: where ranks of `epoch` find the front end."""

    told: dict[str, str]
    """For rank 0, which tells the others; see `moed.server.wire`."""
    epoch: int
    url: str
    items: dict[str, str]
    """What must be equal on all ranks, as the front end knows it."""


FromFrontend = (
    Serving | GroupReady | Active | Drained | FrontendFailure | StopAsked | NodeReport | Wired
)
