"""Ranks that torchrun starts again serve for a front end with the same settings, or not at all."""

import dataclasses
from typing import Any

import pytest

from moed.config.errors import ConfigError
from moed.server.messages import Wired
from moed.server.torchrun import refuse_other_settings
from tests.server.http.configs import frontend_config


def test_other_settings_than_those_of_the_front_end_are_refused(tmp_path: Any) -> None:
    config = frontend_config(tmp_path)
    wired = Wired(told={}, epoch=1, url="", items=dict(config.agreement_items()))
    refuse_other_settings(config, wired)
    scheduler = dataclasses.replace(config.scheduler, max_num_seqs=7)
    with pytest.raises(ConfigError, match="max_num_seqs is 7, and was 64 before torchrun"):
        refuse_other_settings(dataclasses.replace(config, scheduler=scheduler), wired)
