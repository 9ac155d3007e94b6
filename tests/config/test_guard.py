"""Keys, TLS files and origins: what is refused before anything starts."""

import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moed.config.cors import CorsConfig, cors_config
from moed.config.errors import ConfigError
from moed.config.keys import all_keys
from moed.config.plan_settings import PlanSettings
from moed.config.planning import plan_settings
from moed.config.settings import ServeSettings
from moed.config.tls import tls_config
from moed.config.validation import validate
from moed.dist.registry import capabilities

Pair = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("tls")

    def make(name: str, *options: str) -> tuple[str, str]:
        """Files of a key and of its certificate."""
        key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
        if not key.exists():
            kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256".split()
            files = ["-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
            command = ["openssl", "req", *kind, *files, *(options or ("-nodes",))]
            subprocess.run(command, check=True, capture_output=True, timeout=30)
        return str(key), str(certificate)

    return make


def tls(**given: Any) -> Any:
    return tls_config(ServeSettings(**given))


def test_no_tls_unless_asked() -> None:
    assert tls() is None


def test_a_pair_with_client_certificates(pair: Pair) -> None:
    key, certificate = pair("server")
    _, authority = pair("authority")
    found = tls(ssl_keyfile=key, ssl_certfile=certificate, ssl_ca_certs=authority, ssl_cert_reqs=2)
    assert found.context().verify_mode is ssl.CERT_REQUIRED
    plain = tls(ssl_keyfile=key, ssl_certfile=certificate)
    assert plain.context().verify_mode is ssl.CERT_NONE


def test_what_is_wrong_with_tls_files_is_one_sentence(pair: Pair, tmp_path: Path) -> None:
    key, certificate = pair("server")
    other_key, _ = pair("other")
    locked, locked_certificate = pair("locked", "-passout", "pass:secret")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no PEM at all")
    gone = str(tmp_path / "gone.pem")
    both = {"ssl_keyfile": key, "ssl_certfile": certificate}
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"ssl_keyfile": key}, ["ssl_keyfile is set and ssl_certfile is not", "--ssl-certfile"]),
        ({"ssl_certfile": key}, ["ssl_certfile is set and ssl_keyfile is not", "--ssl-keyfile"]),
        ({**both, "ssl_keyfile": gone}, ["ssl_keyfile", gone, "No such file"]),
        ({**both, "ssl_certfile": gone}, ["ssl_certfile", gone, "No such file"]),
        ({**both, "ssl_certfile": str(tmp_path)}, ["ssl_certfile", "Is a directory"]),
        ({**both, "ssl_keyfile": other_key}, [other_key, "is not the key of", certificate]),
        ({**both, "ssl_certfile": str(rubbish)}, [str(rubbish), "no PEM"]),
        (
            {"ssl_keyfile": locked, "ssl_certfile": locked_certificate},
            [locked, "encrypted", "openssl pkey"],
        ),
        ({**both, "ssl_ciphers": "NO-SUCH"}, ["ssl_ciphers", "'NO-SUCH'"]),
        ({**both, "ssl_cert_reqs": 2}, ["ssl_cert_reqs is 2", "--ssl-ca-certs"]),
        ({**both, "ssl_ca_certs": certificate}, ["ssl_cert_reqs is 0", "--ssl-cert-reqs 2"]),
        (
            {**both, "ssl_ca_certs": str(rubbish), "ssl_cert_reqs": 1},
            ["ssl_ca_certs", str(rubbish), "no PEM certificate"],
        ),
        ({"ssl_ca_certs": certificate}, ["ssl_ca_certs is set", "no TLS"]),
        ({"ssl_cert_reqs": 1}, ["ssl_cert_reqs is set", "no TLS"]),
        ({"ssl_ciphers": "HIGH"}, ["ssl_ciphers is set", "no TLS"]),
    ]
    for given, words in cases:
        with pytest.raises(ConfigError) as caught:
            tls(**given)
        for word in words:
            assert word in str(caught.value), (given, str(caught.value))


def test_keys_of_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n  two  \n  # theirs\none\n")
    assert all_keys(("three",), str(file)) == ("three", "one", "two")
    assert all_keys((), None) == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allow_credentials": True}, ["allowed_origins is empty"]),
        ({"allowed_origins": ("*",), "allow_credentials": True}, ["every page of the web"]),
        ({"allowed_origins": ("chat.example",)}, ["'chat.example'", "https://host"]),
        ({"allowed_origins": ("https://chat.example/app",)}, ["no path"]),
    ],
)
def test_origins_that_are_refused(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        cors_config(ServeSettings(**given))
    assert all(word in str(caught.value) for word in words)


def test_origins() -> None:
    assert cors_config(ServeSettings()) is None
    origins = ("https://a.example", "http://localhost:3000")
    found = cors_config(ServeSettings(allowed_origins=origins, allow_credentials=True))
    assert found == CorsConfig(origins, True, ("*",), ("*",))


def test_lists_as_vllm_writes_them() -> None:
    raw = {"allowed_origins": (('["https://a.example", "*"]',), "flag --allowed-origins")}
    settings, _ = validate(raw, {}, {})
    assert settings.allowed_origins == ("https://a.example", "*")
    with pytest.raises(ConfigError, match="must be a list of names"):
        validate({"allowed_origins": (("[oops",), "flag --allowed-origins")}, {}, {})


def test_a_plan_names_a_missing_tls_file_once(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.pem")
    settings = ServeSettings(device="cpu", ssl_keyfile=gone, ssl_certfile=gone)
    refusals = plan_settings(settings, PlanSettings(), capabilities()).plan.refusals
    assert [gone in refusal for refusal in refusals] == [True]
