"""The bundled model through the `openai` client, as in the README."""

import asyncio
import re

import httpx
import openai
import pytest

from tests.daemon import Daemon

QUESTION = [{"role": "user", "content": "12 + 30"}]


@pytest.mark.parametrize("question", ["12 + 30", "What is 12 + 30?", "12+30"])
def test_a_sum(daemon: Daemon, question: str) -> None:
    answer = daemon.client().chat.completions.create(
        model="moed-demo", messages=[{"role": "user", "content": question}]
    )
    assert answer.choices[0].message.content == "42"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == 3


def test_a_sum_streamed(daemon: Daemon) -> None:
    stream = daemon.client().chat.completions.create(
        model="moed-demo",
        messages=[{"role": "user", "content": "12 + 30"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "42"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


async def test_many_sums_at_once_with_the_async_client(daemon: Daemon) -> None:
    pairs = [(a, 3 * a % 50) for a in range(10, 34)]
    async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none") as client:

        async def ask(a: int, b: int) -> str | None:
            answer = await client.chat.completions.create(
                model="moed-demo", messages=[{"role": "user", "content": f"{a} + {b}"}]
            )
            return answer.choices[0].message.content

        answers = await asyncio.gather(*(ask(a, b) for a, b in pairs))
    right = sum(answer == str(a + b) for answer, (a, b) in zip(answers, pairs, strict=True))
    assert right >= 0.95 * len(pairs), answers


def test_models_and_metrics(daemon: Daemon) -> None:
    client = daemon.client()
    assert [model.id for model in client.models.list()] == ["moed-demo"]
    assert client.models.retrieve("moed-demo").id == "moed-demo"
    for rank in (0, 1):
        daemon.post("/v1/chat/completions", {"messages": QUESTION}, rank).raise_for_status()
    samples = daemon.metrics()
    text = httpx.get(f"{daemon.url}/metrics").text
    for use in ("weights", "kv_cache"):
        assert re.search(rf'^moed:memory_bytes\{{.*use="{use}"\}} [1-9]', text, re.M)
    for rank in (0, 1):
        assert samples["moed:step_seconds_count", rank] > 0
        assert samples["moed:request_queue_time_seconds_count", rank] > 0
        assert re.search(
            rf'^moed:all2all_wait_seconds_count\{{ep_rank="{rank}".*\}} [1-9]', text, re.M
        )
        assert samples["moed:generation_tokens_total", rank] > 0
        assert daemon.rank_tokens(rank) > 0
        assert samples["moed:rank_up", rank] == 1


def test_a_wrong_name_and_a_wrong_path_are_said_in_the_envelope(daemon: Daemon) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        daemon.client().chat.completions.create(
            model="moed-dem",
            messages=[{"role": "user", "content": "12 + 30"}],
        )
    assert caught.value.code == "model_not_found" and "moed-demo" in str(caught.value)
    missing = httpx.get(f"{daemon.url}/v1/nothing")
    assert missing.status_code == 404
    assert set(missing.json()["error"]) == {"message", "type", "param", "code"}
