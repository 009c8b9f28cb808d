"""A payload on its way along a short list of replicas, as ``peers.passes`` pushes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarm.core import hop
from swarm.core.flight import Receipt
from swarm.core.hop import Hop, Outcome
from swarm.core.intake import Kind
from swarm.sim.network import Host
from swarm.types import Attempt, Replica

if TYPE_CHECKING:
    from swarm.core.journey import Route
    from swarm.sim.server import Pass, Server
    from swarm.sim.simulation import Simulation

RECEIPT_WAIT_S = 1.0
"""A receipt waits this long for the push's outcome, so that it can tell the link time."""


class Push:
    """One hop of ``attempt``; ``start`` sets it going.

    Args:
        route: who may take it, best first; then the lists of the stages after that.
        origin: the server whose output this is; None: there was none before.
        done: the pass that it ends, whose receipt waits for it; None: the trainer pushes.
    """

    __slots__ = (
        "attempt",
        "began",
        "called",
        "done",
        "expires_at",
        "hop",
        "host",
        "kind",
        "link_s",
        "nbytes",
        "origin",
        "rest",
        "sim",
        "told",
    )

    def __init__(
        self,
        sim: Simulation,
        kind: Kind,
        attempt: Attempt,
        route: Route,
        *,
        nbytes: float,
        expires_at: float,
        origin: Server | None,
        done: Pass | None,
    ) -> None:
        self.sim, self.kind, self.attempt = sim, kind, attempt
        self.rest, self.nbytes, self.expires_at = route[1:], nbytes, expires_at
        self.origin, self.done = origin, done
        self.host = sim.trainer.host if done is None else done.server.host
        self.hop = Hop(route[0], expires_at, sim.busy_pause, sim.rng)
        self.began = self.called = sim.clock.now
        self.link_s = 0.0
        self.told = done is None

    def try_until(self, deadline: float) -> Push:
        """It is given up before the attempt ends."""
        self.hop.deadline = deadline
        return self

    def start(self) -> None:
        self._carry_out(self.hop.start(self.sim.clock.now))

    def _carry_out(self, move: hop.Move) -> None:
        match move:
            case hop.Push(replica=replica, tries=tries):
                self._send(self.sim.servers[replica], tries)
            case hop.Pause(until=until):
                self._next_news(until)
                self.sim.clock.at(until, self._resume)
            case hop.Tell():
                self._give_up(move)

    def _send(self, target: Server, tries: int) -> None:
        sim = self.sim
        now = self.called = sim.clock.now
        left = self.host.send(now, self.nbytes)
        delay = sim.delays.between(self.host, target.host)
        self._next_news(left + 2 * delay)
        sim.clock.at(left + delay, self._arrive, target, tries, left, delay)

    def _arrive(self, target: Server, tries: int, left: float, delay: float) -> None:
        """The last byte is there, unless the sender died before it had left."""
        if self.host.dead_at < left:
            return
        now, there = self.sim.clock.now, target.host
        if there.dead_at <= now:
            self._fail(there, delay)
            return
        taken = there.receive(now, self.host.upload_s(self.nbytes), self.nbytes)
        if taken > now:
            self._next_news(taken + delay)
            self.sim.clock.at(taken, self._offer, target, tries, delay)
        else:
            self._offer(target, tries, delay)

    def _offer(self, target: Server, tries: int, delay: float) -> None:
        clock = self.sim.clock
        if target.host.dead_at <= clock.now:
            self._fail(target.host, delay)
            return
        reply = target.offer(self, tries)
        back = clock.now + delay
        if reply.outcome is Outcome.ACCEPTED:
            self._delivered(back)
        else:
            self._next_news(back)
            clock.at(back, self._answered, reply.outcome, reply.reason)

    def _delivered(self, at: float) -> None:
        """It will be known here ``at`` that the payload was accepted."""
        self.link_s = at - self.called
        if self.done is not None:
            self._receipt(at)
        elif self.hop.busy_answers or self.hop.unreachable:
            self.sim.clock.at(at, self.sim.trainer.pushed, self.hop)

    def _fail(self, there: Host, delay: float) -> None:
        clock = self.sim.clock
        at = self.sim.noticed_at(there, delay)
        self._next_news(at)
        broke = self.sim.broke(there, self.called)
        outcome = Outcome.LOST if broke else Outcome.UNREACHABLE
        clock.at(at, self._answered, outcome, "no connection")

    def _answered(self, outcome: Outcome, reason: str) -> None:
        now = self.sim.clock.now
        if self.host.dead_at > now:
            self.link_s = now - self.called
            self._carry_out(self.hop.answered(outcome, reason, now))

    def _resume(self) -> None:
        now = self.sim.clock.now
        if self.host.dead_at > now:
            self._carry_out(self.hop.resume(now))

    def _give_up(self, tell: hop.Tell) -> None:
        trainer, now = self.sim.trainer, self.sim.clock.now
        if self.done is None:
            trainer.push_failed(self.attempt, self.hop, tell.reason)
            return
        at = now + self.sim.delays.between(self.host, trainer.host)
        skipped = tuple(self.hop.unreachable[:16])
        self.sim.clock.at(at, trainer.hears_of_failure, self.attempt, tell.reason, skipped)
        self._receipt(now)

    # -- the receipt ------------------------------------------------------------------------

    def _next_news(self, at: float) -> None:
        """Nothing will be heard before ``at``: a receipt does not wait so long for it."""
        if not self.told and at > self.began + RECEIPT_WAIT_S:
            self._receipt(self.began + RECEIPT_WAIT_S)

    def _receipt(self, at: float) -> None:
        """Sent at ``at``, unless it has been."""
        if self.told or self.done is None:
            return
        self.told = True
        busy, skipped = self.hop.busy_answers, tuple(self.hop.unreachable[:16])
        self.done.tell(at, self.link_s, busy, skipped)


def receipt_of(
    done: Pass, link_s: float, busy: int = 0, skipped: tuple[Replica, ...] = ()
) -> Receipt:
    """What the trainer is told of a pass."""
    server, attempt = done.server, done.job.attempt
    return Receipt(
        attempt.stamp,
        attempt.m,
        server.stage,
        server.me,
        done.told_kind,
        done.verdict,
        done.queue_s,
        done.compute_s,
        link_s,
        done.loss,
        busy,
        skipped,
    )
