"""TLS of the HTTP port: the files are read and held against each other before anything starts."""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from moed.config import names
from moed.config.errors import ConfigError
from moed.config.settings import ServeSettings


@dataclass(frozen=True)
class TlsConfig:
    """Files and manners of an https:// port."""

    keyfile: str
    certfile: str
    """The server's certificate, and those between it and the authority."""
    ca_certs: str | None
    """Of the authorities whose client certificates are taken."""
    cert_reqs: int
    """`ssl.CERT_NONE`, `CERT_OPTIONAL` or `CERT_REQUIRED`: whether clients show a certificate."""
    ciphers: str | None
    """In OpenSSL's syntax, for TLS 1.2; None: OpenSSL's own choice."""

    def context(self) -> ssl.SSLContext:
        """Reads all files. Raises `ConfigError`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        self._load_pair(context)
        self._load_authorities(context)
        if self.ciphers is not None:
            try:
                context.set_ciphers(self.ciphers)
            except ssl.SSLError:
                raise ConfigError(
                    f"ssl_ciphers is {self.ciphers!r}, in which OpenSSL finds no cipher that it "
                    "knows; `openssl ciphers` lists them"
                ) from None
        return context

    def _load_pair(self, context: ssl.SSLContext) -> None:
        key, certificate = self.keyfile, self.certfile
        _check_readable("ssl_keyfile", key)
        _check_readable("ssl_certfile", certificate)

        def refuse_password() -> NoReturn:
            # OpenSSL would ask on the terminal, and wait.
            raise ConfigError(
                f"ssl_keyfile {key} is encrypted, and nobody can be asked for its password; write "
                "it without one (`openssl pkey -in FILE -out PLAIN`)"
            )

        try:
            context.load_cert_chain(certificate, key, password=refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"ssl_keyfile {key} is not the key of the certificate in ssl_certfile "
                    f"{certificate}: give the two that belong together"
                ) from None
            raise ConfigError(
                f"ssl_keyfile {key} and ssl_certfile {certificate} cannot be used: one holds no "
                f"PEM key, or the other no PEM certificate ({_reason(error)})"
            ) from None

    def _load_authorities(self, context: ssl.SSLContext) -> None:
        if self.ca_certs is None:
            return
        _check_readable("ssl_ca_certs", self.ca_certs)
        try:
            context.load_verify_locations(self.ca_certs)
        except ssl.SSLError as error:
            raise ConfigError(
                f"ssl_ca_certs {self.ca_certs} holds no PEM certificate ({_reason(error)})"
            ) from None
        context.verify_mode = ssl.VerifyMode(self.cert_reqs)


def tls_config(settings: ServeSettings) -> TlsConfig | None:
    """None for plain http://. Raises `ConfigError` for files that are missing or do not fit."""
    key, certificate = settings.ssl_keyfile, settings.ssl_certfile
    if key is None and certificate is None:
        for name in ("ssl_ca_certs", "ssl_ciphers"):
            if getattr(settings, name) is not None:
                _refuse_alone(name)
        if settings.ssl_cert_reqs:
            _refuse_alone("ssl_cert_reqs")
        return None
    if key is None or certificate is None:
        given, missing = ("ssl_certfile", "ssl_keyfile")[:: 1 if key is None else -1]
        raise ConfigError(
            f"{given} is set and {missing} is not: TLS needs both; give "
            f"{names.settings()[missing].flag} FILE"
        )
    if settings.ssl_cert_reqs and settings.ssl_ca_certs is None:
        raise ConfigError(
            f"ssl_cert_reqs is {settings.ssl_cert_reqs}, so clients show certificates, and "
            "ssl_ca_certs does not say whose are good; give --ssl-ca-certs FILE"
        )
    if settings.ssl_ca_certs is not None and not settings.ssl_cert_reqs:
        raise ConfigError(
            "ssl_ca_certs is set and ssl_cert_reqs is 0, so no client is asked for a certificate; "
            "give --ssl-cert-reqs 2 to ask for one, or leave out --ssl-ca-certs"
        )
    found = TlsConfig(
        key, certificate, settings.ssl_ca_certs, settings.ssl_cert_reqs, settings.ssl_ciphers
    )
    found.context()
    return found


def _refuse_alone(name: str) -> NoReturn:
    raise ConfigError(
        f"{name} is set, and without ssl_keyfile and ssl_certfile there is no TLS; give both, or "
        f"leave out {names.settings()[name].flag}"
    )


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or "no PEM data").replace("_", " ").lower()


def _check_readable(name: str, path: str) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from None
