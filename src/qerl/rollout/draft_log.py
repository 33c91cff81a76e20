"""Tells now and then what drafts have brought: totals of the engine, each time after four times as many drafts."""

import logging

from qerl.rollout.config import EngineStats

_log = logging.getLogger(__name__)

# The first call may be a warm-up of a few tokens, so its share is not the last word; and a call each would be too many.
_GROWTH = 4


class DraftLog:
    """Drafts of all calls of an engine."""

    def __init__(self) -> None:
        self._drafted = self._accepted = self._drafting_steps = self._steps = 0
        self._next = 1

    def count(self, stats: EngineStats) -> None:
        """A call, or a session, has ended with ``stats``."""
        self._drafted += stats.drafted_tokens
        self._accepted += stats.accepted_tokens
        self._drafting_steps += stats.speculative_steps
        self._steps += stats.decode_steps
        if self._drafted >= self._next:
            self._next = _GROWTH * self._drafted
            _log.info(
                "speculative decoding so far: %d of %d drafted tokens accepted in %d of %d decode steps",
                self._accepted,
                self._drafted,
                self._drafting_steps,
                self._steps,
            )
