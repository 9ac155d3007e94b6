"""One front end with two fake engines, shared by the tests that leave it as it was."""

import pathlib
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from tests.server.http.checkpoints import (
    CHATML,
    END,
    byte_level_tokenizer,
    token_id,
    write_checkpoint,
)
from tests.server.http.configs import frontend_config
from tests.server.http.fake_engine import repeat_prompt
from tests.server.http.served import Served


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_checkpoint(folder, tokenizer, chat_template=CHATML, eos_token=END)


@pytest.fixture(scope="session")
def shared(checkpoint: pathlib.Path, tokenizer: Tokenizer) -> Iterator[Served]:
    eos = (token_id(tokenizer, END),)
    with Served(frontend_config(checkpoint, eos_token_ids=eos)) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Iterator[Served]:
    """The shared front end; afterwards nothing may be open on any engine."""
    yield shared
    for engine in shared.engines:
        engine.script, engine.step_s, engine.is_paused = repeat_prompt, 0.0, False
        engine.tokens_per_step = 1
    shared.wait(lambda: shared.num_running == 0)
