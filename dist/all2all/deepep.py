"""What all backends over DeepEP share: which library serves, and how its faults are told.

On a GPU it is the package `deep_ep`. On a CPU it is a stand-in with the same calls, so that the
code which drives DeepEP runs everywhere.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch

from moed.config import deep_ep_limits as limits
from moed.config.environ import set_default
from moed.config.errors import ConfigError, MoedError
from moed.config.machine import QP_DEPTH_VARIABLE
from moed.dist.deep_ep.loading import Unavailable, find_deep_ep
from moed.dist.deep_ep.rules import ContractViolation, Mode
from moed.dist.groups import Groups, collective_errors

logger = logging.getLogger(__name__)

CPU_MODE = Mode.RELAXED
CLOSE_S = 5.0
WITHOUT_LIBRARY = "all2allv, allgather_reducescatter"


def library_of(name: str, groups: Groups, device: torch.device) -> Any:
    """The module `deep_ep`, or what stands in for it on a CPU.

    Raises `ConfigError` when the backend `name` cannot have it, with the package's own reason.
    """
    if device.type == "cpu":
        from moed.dist.deep_ep.stand_in import make_stand_in

        if groups.rank == 0:
            logger.info(
                "%s: DeepEP is emulated on the CPU, for trying and testing; its limits on hidden "
                "size, dtype, number of ranks and of rows are lifted",
                name,
            )
        return make_stand_in(CPU_MODE)
    found = find_deep_ep()
    if isinstance(found, Unavailable):
        reason = found.reason
    elif name == "deepep_v2" and not found.has_elastic_buffer:
        reason = "the installed deep_ep is older than version 2, and has no ElasticBuffer"
    else:
        return found.module
    raise ConfigError(
        f"all2all_backend {name!r} is unavailable: {reason}; available are {WITHOUT_LIBRARY}"
    )


def set_queue_depth(num_tokens: int) -> None:
    """Before a buffer is made: room in NVSHMEM's queues for N tokens, unless the user set it."""
    set_default(QP_DEPTH_VARIABLE, str(limits.needed_qp_depth(num_tokens)))


@contextlib.contextmanager
def deep_ep_errors(what: str) -> Iterator[None]:
    """A call that breaks DeepEP's rules is our own fault; everything else is a lost peer's."""
    with collective_errors(what):
        try:
            yield
        except ContractViolation as error:
            raise MoedError(f"{what} broke a rule of DeepEP: {error}") from error


def destroy(buffer: Any) -> None:
    """Collective, within `CLOSE_S`: a peer that is gone must not hold this rank."""

    def run() -> None:
        try:
            buffer.destroy()
        except (RuntimeError, AssertionError) as error:
            logger.warning("DeepEP's buffer did not close cleanly: %s", error)

    closing = threading.Thread(target=run, daemon=True)
    closing.start()
    closing.join(CLOSE_S)
    if closing.is_alive():
        logger.warning("DeepEP's buffer did not close within %g s", CLOSE_S)
