"""Certificates for tests, signed by themselves."""

import pathlib
import subprocess

from moed.config.tls import TlsConfig


def tls_files(folder: pathlib.Path) -> TlsConfig:
    """For 127.0.0.1, with no client certificates."""
    key, certificate = folder / "server.key", folder / "server.pem"
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=moed".split()
    files = ["-keyout", str(key), "-out", str(certificate)]
    name = ["-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", *kind, *name, *files]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return TlsConfig(str(key), str(certificate), None, 0, None)
