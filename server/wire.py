"""Where the front end and the engines talk, and the keys that let in nobody else.

On one node it is a socket in a folder that only this user can enter. Between nodes it is TCP with
ZeroMQ's CURVE: both ends prove that they have this launch's keys, and all is encrypted. The keys
follow from a secret of the launch, which reaches the other nodes through the store:

- without `--transport-key-file` the secret itself is there, so it keeps out whoever cannot reach
  the store, and nobody else;
- with it only a random number is there, which is of no use without the key.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from moed.config.nodes import NodesConfig

SECRET_BYTES = 32


@dataclass(frozen=True)
class Wire:
    """One launch's address and secret."""

    address: str
    """`ipc://…` or `tcp://…`, for ZeroMQ."""
    secret: bytes | None = field(default=None, repr=False)
    """None: the folder of the socket keeps others out."""


@dataclass(frozen=True)
class Keys:
    """A pair for CURVE, as ZeroMQ writes them (Z85)."""

    public: bytes
    private: bytes = field(repr=False)


def frontend_keys(secret: bytes) -> Keys:
    return _keys(secret, b"front end")


def engine_keys(secret: bytes) -> Keys:
    """One pair for all engines of a launch."""
    return _keys(secret, b"engines")


def _keys(secret: bytes, owner: bytes) -> Keys:
    import zmq
    from zmq.utils import z85

    private = z85.encode(hmac.digest(secret, b"moed curve key of the " + owner, hashlib.sha256))
    return Keys(public=zmq.curve_public(private), private=private)


def make_wire(address: str, nodes: NodesConfig | None) -> tuple[Wire, dict[str, str]]:
    """On the first node: the wire, and what all ranks are told of it through the store."""
    if nodes is None:
        return Wire(address), {"address": address}
    number = secrets.token_bytes(SECRET_BYTES)
    return Wire(address, _secret(number, nodes)), {"address": address, "number": number.hex()}


def wire_from(told: Mapping[str, str], nodes: NodesConfig | None) -> Wire:
    """On every rank: the wire of which the first node has told."""
    if nodes is None:
        return Wire(told["address"])
    return Wire(told["address"], _secret(bytes.fromhex(told["number"]), nodes))


def _secret(number: bytes, nodes: NodesConfig) -> bytes:
    if nodes.transport_key is None:
        return number
    return hmac.digest(nodes.transport_key.encode(), number, hashlib.sha256)


def key_fingerprint(nodes: NodesConfig | None) -> str:
    """Tells different keys apart, and nothing of them."""
    if nodes is None or nodes.transport_key is None:
        return "none"
    key = nodes.transport_key.encode()
    return hmac.digest(key, b"moed fingerprint of the key", hashlib.sha256).hex()[:16]
