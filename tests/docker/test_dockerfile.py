"""docker/Dockerfile, what it copies, and the compose file, without a Docker engine."""

import json
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from moed.config.cli import read_flags
from moed.config.names import settings
from moed.config.sources import read_variables
from moed.config.validation import validate

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
# Variables of the image that start like settings.
SETTING = re.compile(r"\bMOED_[A-Z_]+")


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint is not None, "hadolint comes with the test extra"
    run = subprocess.run(
        [hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "")


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    """`.dockerignore` begins with everything: what it does not name again cannot be copied."""
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)
        for source in line.split()
    }
    assert copied == allowed
    assert all((ROOT / source).exists() for source in copied)


def test_both_variants_have_all_their_stages() -> None:
    stages = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.M))
    for variant in ("cpu", "cuda"):
        assert {f"packages-{variant}", f"base-{variant}"} <= stages
    assert set(re.findall(r"--from=(\S+)", DOCKERFILE)) <= stages


def test_manners_of_the_image() -> None:
    last = DOCKERFILE[DOCKERFILE.rindex("FROM ") :]
    assert re.search(r"^USER [1-9]\d*:0$", last, re.M)
    assert 'ENTRYPOINT ["tini", "--", "moed"]' in last
    assert '["moed", "healthcheck"]' in last
    assert "march=native" not in DOCKERFILE + (ROOT / "setup.py").read_text()
    unpinned = [
        image
        for image in re.findall(r"^ARG \w+_IMAGE=(\S+)", DOCKERFILE, re.M)
        if not re.search(r":\d+\.\d+\.\d+", image)
    ]
    assert unpinned == []
    assert set(SETTING.findall(DOCKERFILE)) <= {s.variable for s in settings().values()}


def test_the_deep_ep_of_the_image_is_the_one_that_calls_are_held_against() -> None:
    text = (DOCKER / "cuda-requirements.txt").read_text()
    signatures = json.loads((ROOT / "dist/deep_ep/signatures.json").read_text())
    assert signatures["version"] in text.split("tokenspeed-deepep==")[1].split()[0]
    requirements = re.findall(r"^[a-z].*$", text, re.M)
    assert all(re.fullmatch(r"[\w-]+==\S+ \\", line) for line in requirements)
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}$", text, re.M)) == len(requirements)


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_compose_file_is_valid(compose: Any) -> None:
    folder = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text())
    jsonschema.validate(compose, schema)


def test_compose_file_agrees_with_the_rest(compose: Any) -> None:
    for name in ("moed-cpu", "moed-cuda"):
        service = compose["services"][name]
        command = service["command"]
        assert command[0] == "serve" and read_flags(command[1:])
        variables = {name: value or "secret" for name, value in service["environment"].items()}
        # Compose puts a default in place of what is not set.
        variables["MOED_DATA_PARALLEL_SIZE"] = "2"
        validate({}, read_variables(variables), {})
        grace_s = int(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= float(service["environment"]["MOED_SHUTDOWN_TIMEOUT"]) + 10
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["build"]["args"]["VARIANT"] == name.removeprefix("moed-")
        named = {volume.split(":")[0] for volume in service["volumes"]}
        assert named <= set(compose["volumes"]) and service["read_only"]
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DOCKER / source).exists()
