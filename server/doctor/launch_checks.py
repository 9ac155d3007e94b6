"""What this very launch needs: its port, its addresses, its model, folders to write to."""

import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from moed.config.errors import ConfigError, MoedError
from moed.config.sizes import format_bytes
from moed.server.doctor.asked import Asked
from moed.server.doctor.finding import Finding, ok, problem, warning
from moed.server.doctor.readings import Readings
from moed.server.socket_folder import socket_folder

ALL_ADDRESSES = ("0.0.0.0", "::", "")
INTERFACE_VARIABLES = (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
)
LARGEST_POINTER_BYTES = 1024
LEAST_FREE_BYTES = 2**30


def port(asked: Asked) -> Iterator[Finding]:
    name = "port"
    if asked.port == 0:
        yield ok(name, "any free one")
        return
    family = socket.AF_INET6 if ":" in asked.host else socket.AF_INET
    try:
        socket.create_server((asked.host, asked.port), family=family).close()
    except OSError as error:
        yield problem(
            name,
            f"cannot listen on {asked.host} port {asked.port}: {error.strerror or error}",
            f"see who has it with ss -ltnp 'sport = :{asked.port}', or take another --port; below "
            "1024 only root may listen",
        )
    else:
        yield ok(name, f"{asked.host} port {asked.port} is free")


def addresses(
    seen: Readings, asked: Asked, variables: Mapping[str, str], own_address: str | None
) -> Iterator[Finding]:
    """`own_address`: what this machine's name resolves to; None: nothing."""
    name = "addresses"
    known = {address for own in seen.addresses.values() for address in own}
    given = [
        (key, variables[key].lstrip("=^")) for key in INTERFACE_VARIABLES if variables.get(key)
    ]
    for key, value in given:
        # Each may name several, or a prefix of names.
        wanted = [each.partition(":")[0] for each in value.split(",")]
        missing = [
            each for each in wanted if not any(own.startswith(each) for own in seen.addresses)
        ]
        if missing:
            yield problem(
                name,
                f"{key} names {', '.join(missing)}, and there are {', '.join(seen.addresses)}",
                f"unset {key}, or give it one of these",
            )
            return
    if asked.host not in (*ALL_ADDRESSES, "localhost") and asked.host not in known:
        yield problem(
            name,
            f"host is {asked.host}, which is no address of this machine",
            f"--host with one of {', '.join(sorted(ip_addresses(known)))}, or 0.0.0.0 for all",
        )
    elif asked.num_nodes > 1 and (own_address is None or own_address.startswith("127.")):
        yield warning(
            name,
            f"this machine's name resolves to {own_address or 'nothing'}: other nodes may be told "
            "an address that they cannot reach",
            "give the name its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the network's interface",
        )
    else:
        yield ok(name, ", ".join(sorted(ip_addresses(known))))


def ip_addresses(known: set[str]) -> set[str]:
    """Without those of network cards, and those of one link only."""
    found = set()
    for address in known:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.inet_pton(family, address)
        except OSError:
            continue
        if not address.startswith("fe80:"):
            found.add(address)
    return found


def settings(refusal: MoedError | None) -> Iterator[Finding]:
    if refusal is None:
        yield ok("settings", "accepted")
    else:
        yield problem("settings", str(refusal), "change what the message names")


def model(asked: Asked) -> Iterator[Finding]:
    """Every file of the folder can be read, and none is a stand-in for one."""
    name, folder = "model", asked.model_folder
    if folder is None:
        return
    files = sorted(folder.glob("*.safetensors"))
    unreadable = [file.name for file in (folder, *files) if not os.access(file, os.R_OK)]
    if unreadable:
        yield problem(
            name,
            f"this user cannot read {', '.join(unreadable[:3])} in {folder}",
            f"chmod -R a+rX {folder}, or run as its owner",
        )
        return
    pointers = [file.name for file in files if is_pointer(file)]
    if pointers:
        yield problem(
            name,
            f"{pointers[0]} in {folder} is a pointer of Git LFS and not the weights",
            f"git -C {folder} lfs pull",
        )
    elif not files:
        yield warning(
            name,
            f"no *.safetensors in {folder}",
            "a model of the Hub is downloaded at the start; in a folder of your own they are "
            "missing",
        )
    else:
        size = sum(file.stat().st_size for file in files)
        yield ok(name, f"{len(files)} file(s) of weights, {format_bytes(size)}, in {folder}")


def is_pointer(file: Path) -> bool:
    """True for the few lines that Git keeps where LFS has not put the file."""
    if file.stat().st_size > LARGEST_POINTER_BYTES:
        return False
    return file.read_bytes().startswith(b"version https://git-lfs")


def temporary_folder() -> Iterator[Finding]:
    """Sockets between the processes lie there."""
    name = "temporary files"
    try:
        with socket_folder() as folder:
            free, parent = shutil.disk_usage(folder).free, folder.parent
    except ConfigError as error:
        found, _, fix = str(error).partition("; ")
        yield problem(name, found, f"docker run --tmpfs /tmp, an emptyDir on /tmp, or {fix}")
        return
    if free < LEAST_FREE_BYTES:
        yield warning(name, f"{format_bytes(free)} free in {parent}", f"make room in {parent}")
    else:
        yield ok(name, f"{format_bytes(free)} free in {parent}")
