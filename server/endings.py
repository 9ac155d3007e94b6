"""How long a launch may take to end, and how its cause is told."""

import logging
from collections.abc import Sequence

from moed.server.rank_process import AnyRank, is_consequence

logger = logging.getLogger(__name__)

# After a rank's failure the others fail too, within moments, in their collectives; waiting for
# their words lets the report name the cause and not a consequence.
FAILURE_GATHERING_S = 1.0
# What the front end gets to send error events, and processes to leave by themselves, before
# SIGKILL.
FLUSH_S = 3.0
LEAVE_S = 5.0
# Beyond the front end's own drain timeout: it answers at the timeout, not after it.
DRAIN_SLACK_S = 2.0

EXIT_PROCESS_DIED = 70


def log_traceback(rank: AnyRank) -> None:
    """Where its own node has one: of a fault of ours."""
    if rank.failure is not None and rank.failure.details:
        logger.error("%s", rank.failure.details.rstrip())


def report_end(ended: Sequence[AnyRank], first: AnyRank) -> int:
    """Log the last words of those that have ended; `first` was seen first. Returns the exit code of
    the cause.
    """
    # Consequences first, causes last: the last lines of the log are what a person reads.
    told = sorted(ended, key=lambda rank: (not is_consequence(rank), rank is first))
    for rank in told:
        log_traceback(rank)
        logger.error("%s", rank.report())
    cause = told[-1]
    return EXIT_PROCESS_DIED if cause.failure is None else cause.failure.exit_code
