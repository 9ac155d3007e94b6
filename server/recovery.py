"""What the launcher decides when a rank is lost or does not get on: to form the group anew, or that
it is of no use.
"""

import logging
import time
from collections.abc import Callable, Sequence

from moed.config.engine_config import EngineConfig
from moed.config.errors import ConfigError, ModelError, UsageError
from moed.server.endings import log_traceback
from moed.server.messages import RankSlow, Regrouping, ToFrontend
from moed.server.rank_group import RankGroup
from moed.server.rank_process import AnyRank
from moed.server.restarts import WINDOW_S, RestartBudget
from moed.server.watchdog import Stall, describe

logger = logging.getLogger(__name__)

# What no new process mends: settings, a checkpoint, ranks that differ.
FOR_GOOD = frozenset({UsageError.exit_code, ModelError.exit_code, ConfigError.exit_code})


class Recovery:
    """The first node's launcher asks it again and again."""

    def __init__(
        self, config: EngineConfig, group: RankGroup, tell_frontend: Callable[[ToFrontend], None]
    ) -> None:
        self._config = config
        self._group = group
        self._tell_frontend = tell_frontend
        self._budget = RestartBudget(config.server.recovery.max_restarts, time.monotonic)
        self.has_been_ready = False
        """Before that, no request is open and any fault ends the launch."""
        self._is_stalled = False

    def on_ready(self, epoch: int) -> None:
        """All ranks of `epoch` are."""
        self.has_been_ready = True
        self._group.on_formed(epoch)

    def may_replace_frontend(self) -> bool:
        """Whether that is wanted, may help, and has not happened too often; takes one of those."""
        return self._is_possible and self._budget.take()

    @property
    def _is_possible(self) -> bool:
        return self.has_been_ready and self._config.server.recovery.on_rank_failure == "recover"

    def look_after(self, ended: Sequence[AnyRank]) -> Sequence[AnyRank]:
        """Form the group anew where that is due, after the end of some ranks or of none. Returns
        those with which the launch ends; none: it goes on.
        """
        if not ended:
            return self._look_at_progress()
        if not self._can_recover(ended):
            return ended
        for rank in ended:
            log_traceback(rank)
        self._form_anew(ended, ended[0].rank, "; ".join(rank.report() for rank in ended))
        return ()

    def _look_at_progress(self) -> Sequence[AnyRank]:
        """All processes are there: do they get on?"""
        reason = self._group.advance()
        stall = self._group.look()
        self._tell_of(stall)
        if stall is not None and self._group.watchdog.is_late(stall):
            if stall.rank is not None:
                rank = self._group.ranks[stall.rank]
                rank.end(describe(stall, rank.name))
                return self.look_after(self._group.ended)
            reason = describe(stall, None)
        if reason is None:
            return ()
        if not self._can_recover(()):
            self._group.ranks[0].end(reason)
            return self._group.ended
        self._form_anew((), None, reason)
        return ()

    def _tell_of(self, stall: Stall | None) -> None:
        was_stalled, self._is_stalled = self._is_stalled, stall is not None
        if stall is None and was_stalled:
            self._tell_all_of_stall("")
        elif stall is not None and not was_stalled:
            name = None if stall.rank is None else self._group.ranks[stall.rank].name
            text = describe(stall, name)
            limit_s = self._config.server.recovery.step_timeout_s
            logger.warning("%s; at %g s it is ended (step_timeout)", text, limit_s)
            self._tell_all_of_stall(text)
            self._group.ask_for_stacks(stall.rank)

    def _tell_all_of_stall(self, text: str) -> None:
        self._tell_frontend(RankSlow(text))
        self._group.tell_trouble(text)

    def _form_anew(self, lost: Sequence[AnyRank], rank: int | None, reason: str) -> None:
        epoch = self._group.epoch + 1
        logger.error(
            "%s. Forming the group anew, as epoch %d (recovery %d of at most %d in %d minutes)",
            *(reason, epoch, self._budget.num_taken, self._budget.most, WINDOW_S // 60),
        )
        # First of all, so that nothing of the new epoch comes to a front end that knows nothing.
        self._tell_frontend(Regrouping(epoch=epoch, rank=rank, error=reason))
        self._group.tell_trouble(f"the ranks recover: {reason}")
        self._is_stalled = False
        self._group.form_anew(lost)

    def _can_recover(self, ended: Sequence[AnyRank]) -> bool:
        """Whether it is wanted, may help, and has not happened too often; takes one of those."""
        codes = {rank.failure.exit_code for rank in ended if rank.failure is not None}
        if not self._is_possible or codes & FOR_GOOD:
            return False
        if self._budget.take():
            return True
        logger.error(
            "%d recoveries in %d minutes are too many: giving up (max_restarts)",
            *(self._budget.most, WINDOW_S // 60),
        )
        return False
