"""A stage as a replica holds it: the model's tensors, the ledger, graphs, and the round's sum.

Sole owner of the device. Every method runs on the compute lane, one at a time, in the order of
the queue: so a prepare finds a gradient either whole in the accumulators and in the ledger, or
not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from torch import Tensor

from peers.mirror import Mirror
from peers.residual import Residual
from swarm.core import flight
from swarm.core.books import Book, book_of, step_of
from swarm.core.ledger import Ledger, Verdict
from swarm.core.step import Decision
from swarm.core.totals import Totals, fold
from swarm.manifest import Manifest
from swarm.model.device import CPU, Device
from swarm.model.look import Look, look_at, together
from swarm.model.memory import Plan
from swarm.model.probe import look_for
from swarm.model.spec import ModelSpec
from swarm.model.stage import Graph, StageModel
from swarm.types import FRESH, Attempt, Mark, Stamp

log = logging.getLogger("swarm.stage")

PIECE = 1 << 20
"""Values in one piece of the vector: what one message of averaging carries (4 MiB of fp32)."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What came of a pass: the tensor to send on, if any, and what the receipt says."""

    output: Tensor | None
    verdict: str
    loss: float | None = None
    blame_sender: bool = False


@dataclass(frozen=True, slots=True)
class Sealed:
    """The whole sum of a round, as this replica holds it."""

    round: Stamp
    digest: str
    squared_norm: float
    finite: bool


class StageOwner:
    """Computes passes and keeps the books.

    ``mark`` is None while the weights are of no version: at the start, and while they are copied
    from others. ``applied`` counts the updates up to ``mark`` that were not skipped, ``totals``
    the microbatches of each peer. ``decision`` is the last that was heard of, applied or not;
    ``decided`` the last one applied, whose sum is kept for those who follow. ``residual`` is what
    lossy averaging has lost here.

    With delayed updates there are two books: ``ledger`` and ``ahead`` (else None), see
    ``swarm.core.books``. ``before`` is the mark that a decision led here from, if it did.
    """

    def __init__(
        self,
        manifest: Manifest,
        spec: ModelSpec,
        stage: int,
        *,
        device: Device = CPU,
        plan: Plan | None = None,
    ) -> None:
        """``plan``: how it keeps within its memory; None: as the manifest's limits allow."""
        plan = plan or Plan(manifest.limits.graphs)
        self.model = StageModel(
            manifest, spec, stage, device=device, checkpointing=plan.checkpointing
        )
        self._kept_graphs = plan.graphs
        self.device, self.spec = device, spec
        self.stage = stage
        self.ledger = Ledger(stage, FRESH)
        delay = manifest.step.delay > 0
        self.ahead = Ledger(stage, FRESH, Book.AHEAD) if delay else None
        self.mark: Mark | None = None
        self.before: Mark | None = None
        self.applied = 0
        self.totals: Totals = tuple({} for _ in range(manifest.stages.count))
        self.decision: Decision | None = None
        self.decided: Decision | None = None
        self.losses: dict[int, float] = {}
        self._losses_ahead: dict[int, float] = {}
        self.round: Stamp | None = None
        self.sealed: Sealed | None = None
        self.residual = Residual()
        self._mirror = Mirror(self.model)
        self._manifest = manifest
        exact = manifest.reproducible
        self._scale = float(exact.scale) if exact.enabled else None
        self._graphs: dict[Stamp, Graph] = {}
        self._inputs: dict[Stamp, Tensor] = {}
        self._total: Tensor | None = None
        self._spare: Tensor | None = None
        self._decided_sum: Tensor | None = None
        self._initial = True

    # -- passes -----------------------------------------------------------------------------

    # What a pass wants to know of its numbers is asked for once, at its end: on a GPU each answer
    # is waited for until all that was computed is done.

    def forward(self, attempt: Attempt, inputs: Tensor, *, keep: bool) -> Passed:
        """The stage's output. ``keep``: the graph (or the input) waits for the backward."""
        output, graph = self.model.forward(inputs, older=self._is_older(attempt))
        refused = self._refused(look_for(self.device, {"given": inputs, "output": output}))
        if refused is not None:
            return refused
        if keep and len(self._graphs) < self._kept_graphs:
            self._graphs[attempt.stamp] = graph
        elif keep:
            self._inputs[attempt.stamp] = inputs
        return Passed(output, str(Verdict.NOT_ASKED))

    def forward_backward(self, attempt: Attempt, inputs: Tensor, targets: Tensor) -> Passed:
        """The last stage: the loss, and at once the backward pass unless it is an evaluation."""
        graph = self.model.forward_to_loss(inputs, targets, older=self._is_older(attempt))
        loss = graph.output.detach()
        if attempt.evaluation:
            found = look_for(self.device, {"given": inputs, "loss": loss})
            return self._refused(found) or Passed(None, str(Verdict.NOT_ASKED), found["loss"])
        gradient = self.model.backward(graph, None)
        passed = self._counted(gradient, attempt, {"given": inputs, "loss": loss})
        if passed.verdict == flight.COUNTED and passed.loss is not None:
            self._losses(attempt)[attempt.m] = passed.loss
        return passed

    def backward(self, attempt: Attempt, gradient: Tensor) -> Passed:
        """The gradient of the stage's input, after counting this microbatch's own."""
        graph = self._graphs.pop(attempt.stamp, None)
        inputs = self._inputs.pop(attempt.stamp, None)
        if graph is None:
            if inputs is None:
                return Passed(None, "no context")
            _, graph = self.model.forward(inputs, older=self._is_older(attempt))
        output = self.model.backward(graph, gradient)
        return self._counted(output, attempt, {"given": gradient})

    def forget(self, stamp: Stamp) -> None:
        """The context of ``stamp`` has ended."""
        self._graphs.pop(stamp, None)
        self._inputs.pop(stamp, None)

    def _counted(
        self, output: Tensor | None, attempt: Attempt, others: dict[str, Tensor]
    ) -> Passed:
        """Count what the model's last ``backward`` has found, if all is finite."""
        verdict = self._ledger(attempt).verdict(attempt)
        probe = self.model.gradient_probe() if verdict is Verdict.COUNT else None
        found = look_for(self.device, {**others, "output": output, "gradient": probe})
        refused = self._refused(found)
        if refused is not None:
            return refused
        if verdict is Verdict.COUNT:
            if probe is not None and not self.model.gradient_fits(found["gradient"]):
                return Passed(None, flight.NOT_FINITE)
            return Passed(output, self._count(attempt), found.get("loss"))
        return Passed(output, str(verdict), found.get("loss"))

    def _refused(self, found: dict[str, float]) -> Passed | None:
        """If something other than the gradient itself is not finite."""
        if not isfinite(found["given"]):
            return Passed(None, flight.NOT_FINITE, blame_sender=True)
        if not (isfinite(found.get("output", 0.0)) and isfinite(found.get("loss", 0.0))):
            return Passed(None, flight.NOT_FINITE)
        return None

    def _count(self, attempt: Attempt) -> str:
        ledger = self._ledger(attempt)
        if ledger.book is Book.OWN:
            self.end_round()
        try:
            self._add(ledger.book)
        except Exception as error:
            # Part of it may be in the accumulators: nothing there can be trusted any more.
            log.error("adding a gradient failed (%s); what was held is dropped", error)
            log.debug("where it came from", exc_info=error)
            self.drop(ledger.book)
            return flight.DROPPED
        ledger.count(attempt)
        return flight.COUNTED

    def _add(self, book: Book) -> None:
        self.model.accumulate(ahead=book is Book.AHEAD)

    # -- the books --------------------------------------------------------------------------

    def book(self, mark: Mark, ahead: bool) -> Book | None:
        """The book of work that is so named; None: of another step."""
        return book_of(mark, ahead, self.mark, self.before)

    def _ledger(self, attempt: Attempt) -> Ledger:
        ahead = self.ahead
        if ahead is not None and self.book(attempt.mark, attempt.ahead) is Book.AHEAD:
            return ahead
        return self.ledger

    def _losses(self, attempt: Attempt) -> dict[int, float]:
        ahead = self._ledger(attempt).book is Book.AHEAD
        return self._losses_ahead if ahead else self.losses

    def _is_older(self, attempt: Attempt) -> bool:
        """Whether ``attempt`` is computed on the weights before those of the mark."""
        own = self._ledger(attempt).book is Book.OWN
        return own and self._manifest.step.delays(step_of(attempt))

    @property
    def _ledgers(self) -> list[Ledger]:
        return [self.ledger] if self.ahead is None else [self.ledger, self.ahead]

    @property
    def holds_any(self) -> bool:
        """Whether anything was counted that no decision has taken in yet."""
        return any(ledger.held for ledger in self._ledgers)

    def cancel(self, stamp: Stamp, m: int, book: Book = Book.OWN) -> tuple[bool, float | None]:
        """Never count ``stamp``; whether ``book`` holds ``m``, and its loss in the last stage."""
        self.forget(stamp)
        held = {ledger.book: ledger.cancel(stamp, m) for ledger in self._ledgers}
        losses = self._losses_ahead if book is Book.AHEAD else self.losses
        return held[book], losses.get(m)

    def raise_bar(self, stamp: Stamp) -> None:
        """A poll or reset: what was sent before it counts in no book."""
        for ledger in self._ledgers:
            ledger.raise_bar(stamp)

    def begin(self) -> None:
        """The trainer of a fresh run says so: the initial weights are the run's."""
        if self.mark is None:
            if not self._initial:
                self.initialise()
            self.arrive(FRESH, 0, tuple({} for _ in self.totals))

    def reset(self, stamp: Stamp) -> None:
        """Ledgers and accumulators are dropped; what was sent before ``stamp`` never counts.

        A reset that comes late, or again, must not drop what was counted since.
        """
        if self.ledger.bar is not None and stamp <= self.ledger.bar:
            return
        self.raise_bar(stamp)
        self.drop()

    def drop(self, *books: Book) -> None:
        """Ledgers and accumulators of ``books`` (none: of all) are emptied."""
        if Book.OWN in (books or Book):
            self.end_round()
            self.model.clear_accumulators()
            self.ledger.drop()
            self.losses.clear()
        if self.ahead is not None and Book.AHEAD in (books or Book):
            self.model.clear_ahead()
            self.ahead.drop()
            self._losses_ahead.clear()

    # -- a round ----------------------------------------------------------------------------

    def prepare(self, stamp: Stamp, expected: frozenset[int]) -> bool:
        """Raise the bar; begin round ``stamp`` if what is held is what is expected.

        A round below the bar is dead: nothing opens it again.
        """
        if self.ledger.bar is not None and stamp < self.ledger.bar:
            return False
        self.ledger.raise_bar(stamp)
        if self.round == stamp:
            return True
        self.end_round()
        if self.ledger.held != expected:
            return False
        self._mirror.take()
        self.round = stamp
        return True

    def end_round(self) -> None:
        """Something new is counted, or a newer round begins: the old one is dead here."""
        self.round, self.sealed = None, None
        self.residual.end()
        if self._total is not None and self._total is not self._mirror.vector:
            self._spare = self._total
        self._total = None

    def gradient(self, piece: slice) -> Tensor:
        """A piece of the accumulators, on the host. They stay untouched while the round lives."""
        return self._mirror.vector[piece]

    def total(self, *, alone: bool) -> Tensor:
        """Where the round's sum is put together; ``alone``: the accumulators are the sum."""
        if self._total is None:
            if alone:
                self._total = self._mirror.vector
            else:
                spare, self._spare = self._spare, None
                self._total = self._mirror.room() if spare is None else spare
        return self._total

    def look(self, sums: Tensor) -> Look:
        """Digest and squares of a piece of a sum. Safe to call from any thread."""
        return look_at(sums, self._scale)

    def seal(self, round_: Stamp, looks: Sequence[Look] | None = None) -> Sealed | None:
        """The sum is whole: digest and norm, for the vote. None if the round has ended here.

        ``looks``: at its pieces, in order; None: it is looked at now, as one piece.
        """
        if self.round != round_ or self._total is None:
            return None
        digest, norm, finite = together([self.look(self._total)] if looks is None else looks)
        self.sealed = Sealed(round_, digest, norm, finite)
        return self.sealed

    def decide(self, decision: Decision) -> Mark | None:
        """Apply the decision if it can be applied here; the mark afterwards, whichever it is."""
        if self.decision is None or decision.to > self.decision.to:
            self.decision = decision
        if self.mark == decision.to or self.mark != decision.mark:
            return self.mark
        total, sealed = self._total, self.sealed
        if not decision.update.skip:
            if sealed is None or total is None:
                return self.mark
            if decision.rounds[self.stage : self.stage + 1] != ((sealed.round, sealed.digest),):
                return self.mark
        try:
            self.model.apply(None if decision.update.skip else total, decision.update)
        except Exception:
            # Part of the weights may have moved: they are of no version any more.
            self.leave_mark()
            raise
        if not decision.update.skip:
            self.residual.apply()
        self._keep_sum(decision)
        totals = fold(self.totals, decision.counts)
        self.arrive(decision.to, decision.applied, totals, before=decision.mark)
        return self.mark

    def _keep_sum(self, decision: Decision) -> None:
        """The sum that was applied stays, for those who follow, until the next one is."""
        total, self._total = self._total, None
        self.end_round()
        old, self._decided_sum = self._decided_sum, None
        self.decided = decision
        if decision.update.skip:
            self._spare = old if old is not None else self._spare
        elif total is self._mirror.vector:
            self._decided_sum = self._mirror.give(old)
        else:
            self._decided_sum, self._spare = total, old

    def decided_sum(self, mark: Mark, place: slice) -> Tensor | None:
        """A copy of a piece of the sum that led on from ``mark``; None if it is not kept here."""
        if self.decided is None or self.decided.mark != mark or self._decided_sum is None:
            return None
        return self._decided_sum[place].clone()

    # -- from one version to another --------------------------------------------------------

    def leave_mark(self) -> None:
        """The weights are of no version from now on: they are about to be copied over."""
        self.mark, self.before, self._initial = None, None, False
        self.drop()
        self.residual.forget()

    def arrive(
        self, mark: Mark, applied: int, totals: Totals, *, before: Mark | None = None
    ) -> None:
        """The weights are those of ``mark``; what belonged to the version before is over.

        With delayed updates, what was counted ahead of ``before`` is the new mark's own now.
        """
        self.end_round()
        if self.ahead is not None and before is not None:
            self._promote(mark, self.ahead)
        else:
            self.drop()
            for ledger in self._ledgers:
                ledger.advance(mark)
            self._graphs.clear()
            self._inputs.clear()
            before = None
        self.mark, self.before = mark, before
        self.applied, self.totals, self._initial = applied, totals, False

    def _promote(self, mark: Mark, ahead: Ledger) -> None:
        """Graphs of passes ahead live on: they are of the weights that are now those before."""
        self.model.turn()
        ahead.promote(mark)
        self.ledger.retire(mark)
        self.ledger, self.ahead = ahead, self.ledger
        self.losses, self._losses_ahead = self._losses_ahead, self.losses
        self._losses_ahead.clear()

    def initialise(self) -> None:
        """Back to the initial weights, which follow from the manifest alone."""
        self.leave_mark()
        fresh = StageModel(self._manifest, self.spec, self.stage).state()
        for name, vector in self.model.state().items():
            vector.copy_(fresh[name])
