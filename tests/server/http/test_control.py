"""What governs a running daemon and tells of it: abort, drain, loads, set-up, rendered prompts."""

import pathlib
import threading
import time
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from tokenizers import Tokenizer

from moed.config.explained import Explained
from moed.server.api.open_generations import MAX_ENDED, Found, OpenGenerations
from moed.server.messages import Drain, StopNow
from tests.server.http.checkpoints import END, START
from tests.server.http.configs import frontend_config
from tests.server.http.served import Served

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
SLOW_STEP_S = 0.02


@pytest.fixture
def slow(served: Served) -> Served:
    """Outputs never end by themselves."""
    for engine in served.engines:
        engine.step_s = SLOW_STEP_S
        engine.script = lambda request: [5] * request.params.max_tokens
    return served


class Background:
    """A request on a thread of its own."""

    def __init__(self, served: Served, path: str, body: Any, **headers: str) -> None:
        self.response: Any = None
        num_before = len(served.arrivals)
        self._arguments = served, path, body, headers
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        served.wait(lambda: len(served.arrivals) > num_before)

    def _run(self) -> None:
        served, path, body, headers = self._arguments
        self.response = served.post(path, body, headers=headers)

    def result(self) -> Any:
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.response


# Abort -------------------------------------------------------------------------------------------


def abort(served: Served, **body: Any) -> Any:
    return served.post("/v1/abort", body)


def test_an_aborted_stream_ends_with_its_reason(slow: Served) -> None:
    with slow.client() as client:
        stream = client.completions.create(model="tiny", prompt="a", max_tokens=400, stream=True)
        first = next(iter(stream))
        told = abort(slow, request_ids=[first.id])
        assert told.json() == {
            "object": "abort",
            "num_aborted": 1,
            "aborted": [first.id],
            "finished": [],
            "not_found": [],
        }
        reasons: list[Any] = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "abort" and set(reasons[:-1]) <= {None}
    slow.wait(lambda: slow.num_running == 0)
    again = abort(slow, request_ids=[first.id])
    assert again.json()["finished"] == [first.id] and again.json()["num_aborted"] == 0


def test_ids_that_never_were_are_not_found(served: Served) -> None:
    refused = abort(served, request_ids=["cmpl-none", "x"])
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "request_not_found"


def test_a_client_aborts_by_its_own_id_with_all_choices(slow: Served) -> None:
    body = {"prompt": "a", "max_tokens": 400, "n": 3}
    whole = Background(slow, COMPLETIONS, body, **{"X-Request-Id": "mine-1"})
    mixed = abort(slow, request_ids=["mine-1", "nobody"]).json()
    assert (mixed["aborted"], mixed["not_found"]) == (["mine-1"], ["nobody"])
    answer = whole.result().json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["abort"] * 3
    assert answer["usage"]["completion_tokens"] < 300
    slow.wait(lambda: slow.num_running == 0)
    assert slow.state.engine.num_open == 0


def test_everything_is_aborted_at_once(slow: Served) -> None:
    calls = [
        Background(slow, COMPLETIONS, {"prompt": "a", "max_tokens": 400}),
        Background(slow, CHAT, {"messages": HELLO, "max_tokens": 400}),
        Background(slow, "/v1/responses", {"input": "hi", "max_output_tokens": 400}),
        Background(slow, "/v1/messages", {"messages": HELLO, "max_tokens": 400}),
    ]
    assert abort(slow, all=True).json()["num_aborted"] == 4
    completion, chat, response, message = (call.result() for call in calls)
    assert completion.json()["choices"][0]["finish_reason"] == "abort"
    assert chat.json()["choices"][0]["finish_reason"] == "abort"
    assert response.json()["status"] == "incomplete"
    assert response.json()["incomplete_details"] == {"reason": "aborted"}
    assert message.json()["stop_reason"] == "max_tokens"
    assert abort(slow, all=True).json()["num_aborted"] == 0


def test_clients_of_other_protocols_take_an_aborted_stream(slow: Served) -> None:
    with anthropic.Anthropic(base_url=slow.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(model="tiny", messages=HELLO, max_tokens=400) as stream:
            next(iter(stream.text_stream))
            abort(slow, request_ids=[stream.current_message_snapshot.id])
            assert stream.get_final_message().stop_reason == "max_tokens"
    with slow.client() as other, other.responses.stream(model="tiny", input="hi") as events:
        created = next(iter(events))
        assert created.type == "response.created"
        abort(slow, request_ids=[created.response.id])
        last = list(events)[-1]
    assert last.type == "response.incomplete"


@pytest.mark.parametrize(
    "body",
    [{}, {"request_ids": []}, {"all": False}, {"request_ids": "a"}, {"request_ids": [""]},
     {"request_ids": ["a"], "all": True}, {"request_ids": ["a"] * 1001}, {"request_ids": [5]}],
)  # fmt: skip
def test_aborts_that_say_nothing_clear(served: Served, body: Any) -> None:
    response = served.post("/v1/abort", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("request_ids", "all", "request_ids[0]")


def test_a_key_aborts_its_own_and_the_admin_all(checkpoint: pathlib.Path) -> None:
    config = frontend_config(checkpoint, api_keys=("alpha", "beta"), admin_api_keys=("root",))
    with Served(config) as own:
        for engine in own.engines:
            engine.step_s = SLOW_STEP_S

        def asked(key: str, body: Any) -> Any:
            return own.post("/v1/abort", body, headers={"x-api-key": key})

        headers = {"x-api-key": "alpha", "X-Request-Id": "same"}
        call = Background(own, COMPLETIONS, {"prompt": "a", "max_tokens": 400}, **headers)
        assert asked("beta", {"request_ids": ["same"]}).status_code == 404
        assert asked("beta", {"all": True}).json()["error"]["type"] == "permission_error"
        assert own.num_running == 1
        assert asked("alpha", {"request_ids": ["same"]}).json()["num_aborted"] == 1
        assert call.result().json()["choices"][0]["finish_reason"] == "abort"
        assert asked("beta", {"request_ids": ["same"]}).status_code == 404
        assert asked("root", {"request_ids": ["same"]}).json()["finished"] == ["same"]
        call = Background(own, COMPLETIONS, {"prompt": "a", "max_tokens": 400}, **headers)
        assert asked("root", {"all": True}).json()["num_aborted"] == 1
        assert call.result().status_code == 200


class Fake:
    """A generation that only counts its aborts."""

    def __init__(self, owner: str, *names: str) -> None:
        self.owner, self.names, self.num_aborts = owner, names, 0

    def abort(self) -> None:
        self.num_aborts += 1


def test_one_id_of_several_requests() -> None:
    generations = OpenGenerations()
    first, second, other = Fake("a", "1", "x"), Fake("a", "2", "x"), Fake("b", "3", "x")
    for generation in (first, second, other):
        generations.add(generation)
    generations.remove(first)
    generations.remove(first)
    assert generations.abort("a", "1") is Found.FINISHED
    assert generations.abort("a", "x") is Found.ABORTED
    assert (first.num_aborts, second.num_aborts, other.num_aborts) == (0, 1, 0)
    assert generations.abort("a", "3") is Found.UNKNOWN
    assert generations.abort(None, "3") is Found.ABORTED
    assert generations.abort_all() == 2
    generations.remove(second)
    assert generations.abort("a", "x") is Found.FINISHED
    for number in range(MAX_ENDED):
        generations.remove(Fake("c", f"n{number}"))
    assert generations.abort("a", "x") is Found.UNKNOWN


# Drain and resume --------------------------------------------------------------------------------


def test_drain_and_resume(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint)) as own:
        for engine in own.engines:
            engine.step_s = SLOW_STEP_S
        call = Background(own, COMPLETIONS, {"prompt": "a", "max_tokens": 30})
        drained = own.post("/admin/drain", None).json()
        assert (drained["status"], drained["num_open_requests"]) == ("draining", 1)
        assert own.get("/livez").status_code == 200
        probe = own.get("/readyz")
        assert probe.status_code == 503 and "resumes" in probe.json()["reason"]
        refused = own.post(COMPLETIONS, {"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_draining"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert own.get("/v1/loads").json()["status"] == "draining"
        waited = own.http.post("/admin/drain?wait_s=10").json()
        assert waited["num_open_requests"] == 0
        assert call.result().json()["choices"][0]["finish_reason"] == "length"
        resumed = own.post("/admin/resume", None).json()
        assert (resumed["status"], resumed["reason"]) == ("ready", None)
        assert own.get("/readyz").status_code == 200
        assert own.complete(prompt="a", max_tokens=1)["choices"]
        assert own.post("/admin/resume", None).json()["status"] == "ready"


def test_waiting_for_a_drain_is_bounded(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint)) as own:
        for engine in own.engines:
            engine.is_paused = True
        with own.http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}):
            begun = time.monotonic()
            assert own.http.post("/admin/drain?wait_s=0.2").json()["num_open_requests"] == 1
            assert 0.15 < time.monotonic() - begun < 3
        for given in ("-1", "x", "nan", "99999"):
            refused = own.http.post(f"/admin/drain?wait_s={given}")
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "wait_s"


def test_a_daemon_that_starts_or_leaves_does_not_resume(checkpoint: pathlib.Path) -> None:
    with Served(frontend_config(checkpoint), ready=False) as own:
        own.wait(lambda: own.get("/livez").status_code == 200)
        for path in ("/admin/drain", "/admin/resume"):
            refused = own.post(path, None)
            assert refused.status_code == 409 and "loading" in refused.json()["error"]["message"]
            assert refused.headers["x-should-retry"] == "false"
        own.make_ready()
        for engine in own.engines:
            engine.is_paused = True
        with own.http.stream("POST", COMPLETIONS, json={"prompt": "a", "stream": True}):
            own.post("/admin/drain", None)
            own.tell(Drain())
            own.wait(lambda: "shutting down" in own.get("/readyz").json()["reason"])
            assert own.post("/admin/resume", None).status_code == 409
            assert own.get("/readyz").status_code == 503
            own.tell(StopNow())
            own.wait_stopped()


# Loads -------------------------------------------------------------------------------------------


def test_loads(slow: Served) -> None:
    with slow.http.stream(
        "POST",
        COMPLETIONS,
        json={"prompt": "a", "max_tokens": 400, "stream": True},
        headers={"X-data-parallel-rank": "1"},
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        body = slow.get("/v1/loads").json()
    assert body["dp_rank_count"] == 2 and body["status"] == "ready"
    assert body["num_open_requests"] == 1
    first, second = body["loads"]
    assert (first["dp_rank"], first["num_running_reqs"]) == (0, 0)
    assert (second["dp_rank"], second["num_running_reqs"], second["num_total_reqs"]) == (1, 1, 1)
    # The engine says one block of 64, of 16 tokens each; 64 requests may run.
    assert (second["num_used_tokens"], second["max_total_num_tokens"]) == (16, 1024)
    assert second["token_usage"] == pytest.approx(1 / 64, abs=1e-4)
    assert second["utilization"] == pytest.approx(1 / 64, abs=1e-4)
    assert body["aggregate"]["total_running_reqs"] == body["aggregate"]["total_reqs"] == 1
    assert body["aggregate"]["avg_token_usage"] == pytest.approx(1 / 128, abs=1e-4)
    slow.wait(lambda: slow.get("/v1/loads").json()["aggregate"]["total_reqs"] == 0)


# The set-up --------------------------------------------------------------------------------------


def test_server_info_names_values_and_origins(checkpoint: pathlib.Path) -> None:
    explained = (
        Explained("port", 8000, "default"),
        Explained("max_num_seqs", 64, "flag --max-num-seqs"),
        Explained("served_model_name", ("tiny",), "auto (MODEL as given)"),
    )
    config = replace(
        frontend_config(checkpoint, generation_config={"temperature": 0.6}), explained=explained
    )
    with Served(config, ready=False) as own:
        own.wait(lambda: own.get("/livez").status_code == 200)
        early = own.get("/server_info").json()
        assert (early["status"], early["context_length"]) == ("starting", None)
        own.make_ready()
        body = own.get("/server_info").json()
    assert body["status"] == "ready" and body["context_length"] == 512
    assert body["settings"]["port"] == {"value": 8000, "origin": "default"}
    assert body["settings"]["served_model_name"]["value"] == ["tiny"]
    assert body["settings"]["max_num_seqs"]["origin"] == "flag --max-num-seqs"
    assert body["sampling_defaults"]["temperature"] == 0.6
    assert [rank["up"] for rank in body["ranks"]] == [True, True]


# Prompts -----------------------------------------------------------------------------------------


def test_a_conversation_rendered(served: Served, tokenizer: Tokenizer) -> None:
    num_before = len(served.arrivals)
    rendered = served.post(
        f"{CHAT}/render",
        {"messages": HELLO, "temperature": 0.5, "logit_bias": {"7": 1}, "nonsense": 1, "n": 2},
    )
    assert rendered.headers["x-moed-ignored-params"] == "nonsense"
    body = rendered.json()
    text = f"{START}user\nhi{END}\n{START}assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert body["object"] == "chat.completion.render" and body["model"] == "tiny"
    (prompt,) = body["prompts"]
    assert prompt == {
        "text": text,
        "token_ids": ids,
        "num_tokens": len(ids),
        "max_tokens": 512 - len(ids),
    }
    sampling = body["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["n"]) == (0.5, 1.0, 2)
    assert sampling["logit_bias"] == {"7": 1.0} and sampling["seed"] is None
    assert body["warnings"]
    assert len(served.arrivals) == num_before, "no engine has heard of it"
    chat = served.post(CHAT, {"messages": HELLO, "max_tokens": 1, "return_token_ids": True})
    assert chat.json()["prompt_token_ids"] == ids


def test_prompts_rendered(served: Served) -> None:
    body = {"prompt": [[5, 6, 7], [8]], "max_tokens": 3, "truncate_prompt_tokens": 2, "seed": 4}
    rendered = served.post(f"{COMPLETIONS}/render", body).json()
    assert [prompt["token_ids"] for prompt in rendered["prompts"]] == [[6, 7], [8]]
    assert [prompt["max_tokens"] for prompt in rendered["prompts"]] == [3, 3]
    assert rendered["sampling"]["seed"] == 4


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_would_be_refused_is_not_rendered(served: Served, path: str) -> None:
    body = {"messages": HELLO, "prompt": "a", "max_tokens": 1000}
    refused = served.post(f"{path}/render", body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert served.post(f"{path}/render", {**body, "model": "x"}).status_code == 404


def test_tokenizer_info_is_enough_for_a_client_without_a_tokenizer(served: Served) -> None:
    info = served.get("/tokenizer_info").json()
    assert info["eos_token"] == END
    assert START in info["chat_template"]
    (end,) = served.post("/tokenize", {"prompt": END, "add_special_tokens": False}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": [end]}).json() == {"prompt": END}
