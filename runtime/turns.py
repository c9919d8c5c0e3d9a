"""Whose turn it is in colocated mode, where trainer ranks and engines have the same GPUs.

    to_trainer   engines sleep, their weights are gone; trainer ranks wake
    for_push     engines have memory for weights again, and trainer ranks still theirs
    to_engines   trainer ranks sleep; engines have all their memory, and those that are down are started, as all of
                 them are at first

Engines of other models than the policy keep their weights, in the host's memory, and wake in `to_engines` alone.

An engine that is lost while it sleeps stays down until engines have their turn: starting, it would need memory that
trainer ranks use. It comes back empty, and gets its weights in a turn of the trainer ranks between.
"""

from __future__ import annotations

import logging

from runtime.comm.messages import Reply, Restart, SleepEngines, WakeEngines
from runtime.fleet import Fleet
from runtime.learner import Learner

logger = logging.getLogger("turns")


class Turns:
    def __init__(self, fleet: Fleet, learner: Learner, *, start_s: float, order_s: float) -> None:
        """
        Args:
            start_s: for an engine that is being started, which is waited for before it sleeps.
            order_s: for anything else.
        """
        self._fleet, self._learner, self._start_s, self._order_s = fleet, learner, start_s, order_s
        self.is_trainers = True
        """Engines sleep, or were not started yet."""

    def to_trainer(self) -> None:
        """Nothing happens if it is their turn already."""
        if self.is_trainers:
            return
        requests = self._fleet.order(self._fleet.own(), lambda r, es: SleepEngines(request=r, engines=es))
        failures = self._failures(requests, "engines to sleep", self._start_s + self._order_s)
        if stuck := failures.keys() & self._fleet.answering():
            reason = next(failures[e] for e in sorted(stuck))
            self._fleet.tell(stuck, lambda es: Restart(engines=es, reason=reason))
            self._fleet.lost(stuck)
        self._fleet.emptied()
        self._learner.wake(self._order_s)
        self.is_trainers = True

    def for_push(self) -> None:
        self._wake(serve=False)

    def to_engines(self) -> None:
        self._learner.sleep(self._order_s)
        self.is_trainers = False
        self._wake(serve=True)

    def _wake(self, *, serve: bool) -> None:
        """An engine that does not wake fails at what it is told next, and is started again."""
        requests = self._fleet.order(self._fleet.own(), lambda r, es: WakeEngines(request=r, engines=es, serve=serve))
        for engine, reason in self._failures(requests, "engines to wake", self._order_s).items():
            logger.warning("engine %d does not wake: %s", engine, reason)

    def _failures(self, requests: list[int], what: str, limit_s: float) -> dict[int, str]:
        failures: dict[int, str] = {}
        for reply in self._fleet.answers(requests, what, limit_s):
            assert isinstance(reply, Reply)
            failures |= reply.failures
        return failures
