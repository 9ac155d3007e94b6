"""An `EngineClient` whose channel writes down what is sent, and whose engines are the test."""

from typing import Any

from moed.server.ended_requests import Origin
from moed.server.engine_client import ChoiceSpec, EngineClient, Submission
from moed.server.health import Health
from moed.server.lifecycle import FrontendPlace
from moed.server.messages import (
    AddRequest,
    FromEngine,
    RankReady,
    RankStats,
    SamplingParams,
    StepOutputs,
    ToEngine,
    TokenOutput,
)
from moed.server.metrics import Metrics
from moed.server.wire import Wire
from tests.server.http.configs import frontend_config

ORIGIN = Origin(
    request_id="req-1",
    operation="text_completion",
    model="tiny",
    num_per_prompt=1,
    max_tokens=None,
    temperature=0.0,
    top_p=1.0,
    headers={},
)
PARAMS = SamplingParams(max_tokens=10, seed=0, temperature=0.0)


class RecordingChannel:
    def __init__(self) -> None:
        self.sent: list[tuple[int, ToEngine]] = []

    def start_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    async def receive(self) -> FromEngine:
        raise NotImplementedError

    def send(self, rank: int, message: ToEngine) -> None:
        self.sent.append((rank, message))


class Bench:
    """A client with two ranks that are ready."""

    def __init__(self, tmp_path: Any, **config: Any) -> None:
        self.channel = RecordingChannel()
        self.config = frontend_config(tmp_path, **config)
        self.health = Health(2)
        self.health.on_tokenizer()
        self.client = EngineClient(
            self.config,
            self.channel,
            self.health,
            Metrics(self.config),
            place=FrontendPlace(Wire(""), 0, 0),
        )
        for rank in range(2):
            self.become_ready(rank)

    def become_ready(self, rank: int) -> None:
        ready = RankReady(
            rank=rank, num_kv_blocks=64, block_size=16, max_model_len=512, startup_s={}
        )
        self.client.handle(ready, lambda _: None)

    def submit(self, count: int = 1, rank: int | None = None) -> Submission:
        return self.client.submit([ChoiceSpec([1, 2, 3], PARAMS)] * count, ORIGIN, 0, rank)

    @property
    def added(self) -> list[AddRequest]:
        return [m for _, m in self.channel.sent if isinstance(m, AddRequest)]

    def output(self, rank: int, request_id: str, **values: Any) -> None:
        output = TokenOutput(request_id=request_id, **{"epoch": 0, **values})
        self.client.handle(StepOutputs(rank, [output], stats(rank)), lambda _: None)


def stats(rank: int) -> RankStats:
    zeros = dict.fromkeys(RankStats.__struct_fields__, 0)
    return RankStats(**{**zeros, "rank": rank, "num_kv_blocks": 64})


def received(submission: Submission) -> list[tuple[int, list[int]]]:
    """(choice, token ids) of all outputs that are there."""
    if not submission._outputs and submission._failure is not None:
        raise submission._failure
    found = [(index, output.token_ids) for index, output in submission._outputs]
    submission._outputs.clear()
    return found
