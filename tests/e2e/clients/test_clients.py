"""Clients that people have already, unmodified, with the bundled model.

They live in a virtual environment of their own (`make test-slow` makes it): their pins and moed's
have nothing to do with each other.
"""

import json
import os
import pathlib
import subprocess
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from moed.config.model import bundled_checkpoint
from tests.daemon import ROOT, Daemon

HERE = pathlib.Path(__file__).parent
ENVIRONMENT = ROOT / "build" / "clients"
TIMEOUT_S = 240

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (ENVIRONMENT / ".installed").exists(),
        reason=f"the clients are not installed; see {ENVIRONMENT / 'install.log'}",
    ),
]


def run(command: list[str], folder: pathlib.Path) -> str:
    """Standard output of a program of the clients' environment; no network but the daemon."""
    offline = {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LANGSMITH_TRACING": "false",
    }
    program, *arguments = command
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / program), *arguments],
        env={**os.environ, **offline},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def ask(program: str, daemon: Daemon, folder: pathlib.Path) -> Any:
    path = HERE / "programs" / f"{program}_program.py"
    return json.loads(run(["python", str(path), daemon.url], folder).splitlines()[-1])


def test_litellm(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    found = ask("litellm", daemon, tmp_path)
    assert found["whole"] == found["later"] == found["response"] == "42"
    for streamed in found["streamed"]:
        assert streamed == {"text": "42", "finish": ["stop"], "completion_tokens": 3}
    assert found["call"] == {"city": "Paris"} and found["call_finish"] == "tool_calls"
    assert found["num_logprobs"] == 4
    assert found["too_long"][0] == "ContextWindowExceededError"
    assert found["no_such_model"][0] == "NotFoundError"


def test_langchain_openai(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    found = ask("langchain", daemon, tmp_path)
    assert found["whole"] == found["streamed"] == found["response"] == "42"
    assert found["later"] == ["42", "42"]
    assert found["call"] == ["get_weather", {"city": "Paris"}]
    assert found["answer"] == "It is 18 degrees and sunny in Paris."
    assert found["structured"] == ["Paris", "Paris"]
    assert found["completion"] == 4
    assert "ContextOverflowError" in found["too_long"]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_lm_eval_local_completions(daemon: Daemon, tmp_path: pathlib.Path, batch_size: int) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    sums = HERE / "tasks" / "sums.jsonl"
    for name in ("sums.yaml", "sums_generated.yaml"):
        text = (HERE / "tasks" / name).read_text()
        (tasks / name).write_text(text.replace("SUMS_FILE", str(sums)))
    model = f"model=moed-demo,base_url={daemon.url}/v1/completions,num_concurrent=2"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "moed_sums,moed_sums_generated", "--include_path", str(tasks)]
    command += ["--batch_size", str(batch_size), "--output_path", "out", "--log_samples"]
    run(command, tmp_path)
    (path,) = tmp_path.glob("out/*/results_*.json")
    results = json.loads(path.read_text())["results"]
    assert results["moed_sums"]["acc,none"] == 1
    assert results["moed_sums_generated"]["exact_match,none"] == 1
    (path,) = tmp_path.glob("out/*/samples_moed_sums_2*.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == len(sums.read_text().splitlines())
    for sample in samples:
        for arguments, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            expected = log_likelihood(arguments["arg_0"], arguments["arg_1"])
            assert float(answer[0]) == pytest.approx(expected, abs=1e-3)


def log_likelihood(context: str, continuation: str) -> float:
    """By `transformers`. As lm-eval splits it: space before the continuation belongs to it."""
    tokenizer = Tokenizer.from_file(str(bundled_checkpoint() / "tokenizer.json"))
    tokens = tokenizer.encode(context + continuation).ids
    num_context = len(tokenizer.encode(context.rstrip()).ids)
    oracle: Any = AutoModelForCausalLM.from_pretrained(
        str(bundled_checkpoint()), dtype=torch.float32
    )
    with torch.inference_mode():
        logits: torch.Tensor = oracle(input_ids=torch.tensor([tokens])).logits[0]
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    positions = range(num_context, len(tokens))
    return sum(float(logprobs[position - 1, tokens[position]]) for position in positions)
