"""A model of a swarm in which ``Step`` is driven: virtual time, counting sums, faults by seed.

Gradients are counted, not computed: microbatch ``m`` adds 1 in slot ``m`` of every piece of the
vector, so a sum is right iff each slot of each piece is exactly 1. Ledgers alone would not show
a part that was read too late, or one that was taken from another round.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm.core.backoff import Backoff
from swarm.core.closing import Closing, Fetch, Mismatch, Prepare, Vote
from swarm.core.flight import Flight, Launch, Pace, Receipt, Stamps
from swarm.core.intake import Kind
from swarm.core.journey import Ask, Journey, Route
from swarm.core.ledger import Ledger, Verdict
from swarm.core.rounds import AddUp, Complete, Round, SendPart, SendSum
from swarm.core.step import Decide, Decision, Instruction, Probe, Remove, Reset, Step
from swarm.core.update import Update
from swarm.core.wiring import Window, Wiring
from swarm.types import FRESH, Attempt, Mark, Replica, Stamp, Term

TERM = Term(1, "trainer")
CALL_S, ANSWER_S, ROUND_S, FLOOR_S = 0.6, 3.0, 2.0, 0.5
SUM = dict[int, Counter[int]]


@dataclass(frozen=True)
class Plan:
    """What happens in one run. ``lose``: the numbers of messages that never arrive.

    ``off`` switches rules of the protocol off, to see that the audit notices.
    """

    stages: int
    replicas: int
    microbatches: int
    steps: int = 2
    faults: int = 0
    chance: float = 0.04
    kinds: tuple[str, ...] = (
        "lose",
        "late",
        "early",
        "kill",
        "suspect",
        "explode",
        "unsure",
        "replay",
        "straggler",
        "slow",
        "deaf",
    )
    lose: frozenset[int] = frozenset()
    off: frozenset[str] = frozenset()
    bad: frozenset[str] = frozenset()
    nan: frozenset[int] = frozenset()


class Violation(AssertionError):
    """The swarm did what the protocol rules out."""


class Peer:
    """A replica: its ledger, what it has counted, and its side of a round."""

    def __init__(self, stage: int, index: int) -> None:
        self.me = Replica(f"stage{stage}-{index}", "boot")
        self.stage, self.alive = stage, True
        self.ledger = Ledger(stage, FRESH)
        self.counts: Counter[int] = Counter()
        self.history: list[tuple[Mark, str]] = []
        self.end_round()

    def end_round(self) -> None:
        self.round: Round | None = None
        self.parts: dict[tuple[int, Replica], Counter[int]] = {}
        self.total: SUM = {}
        self.vote: Vote | None = None

    def drop(self) -> None:
        self.end_round()
        self.counts.clear()
        self.ledger.drop()


class World:
    """One run of ``plan``: ``run`` raises ``Violation`` if a rule was broken."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.rng, self.plan, self.now = random.Random(seed), plan, 0.0
        self.peers = {
            peer.me: peer
            for stage in range(plan.stages)
            for peer in (Peer(stage, index) for index in range(plan.replicas))
        }
        self.ready = set(self.peers)
        self.mark = FRESH
        self.budget = plan.faults
        self.counted = self.removals = self.messages = 0
        self.attempts: list[Attempt] = []
        self.sent: dict[Replica, list[Callable[[], Any]]] = defaultdict(list)
        self.sealed: dict[Stamp, dict[Replica, frozenset[int]]] = defaultdict(dict)
        self.decisions: list[Decision] = []
        self.wiring = Wiring(plan.stages, ban=Backoff(0.1))
        self.pace, self.stamps = Pace(FLOOR_S), Stamps(lambda n: Stamp(TERM, n))
        self.window = Window(4, least=1, most=8)
        self._heap: list[tuple[float, int, Callable[[], Any]]] = []
        self._ticket = itertools.count()

    # -- time, messages, faults -------------------------------------------------------------

    def later(self, delay: float, do: Callable[[], Any]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._ticket), do))

    def fault(self, kind: str) -> bool:
        if self.budget > 0 and kind in self.plan.kinds and self.rng.random() < self.plan.chance:
            self.budget -= 1
            return True
        return False

    def message(self, do: Callable[[], Any]) -> bool:
        """``do`` happens at the other end, in a while, or never (False)."""
        self.messages += 1
        if self.messages in self.plan.lose or self.fault("lose"):
            return False
        late = self.rng.choice((0.1, 0.5, 2.0, 7.0)) if self.fault("late") else 0.0
        self.later(late + self.rng.uniform(0.005, 0.05), do)
        return True

    def call(self, to: Replica, handle: Callable[[Peer], Any], done: Callable[[Any], None]) -> None:
        """Ask, and once more; who does not answer is removed. ``handle`` may happen twice."""
        peer, answers = self.peers[to], []

        def answer(value: Any) -> None:
            if not answers:
                answers.append(value)
                done(value)

        def ask() -> None:
            if peer.alive:
                value = handle(peer)
                self.message(lambda: answer(value))

        def once_more() -> None:
            if not answers:
                self.message(ask)
                self.later(CALL_S, give_up)

        def give_up() -> None:
            if not answers:
                self.step.remove(to, "no answer", self.now)

        if self.fault("deaf"):
            self.later(2 * CALL_S, give_up)
            return
        self.message(ask)
        self.later(CALL_S, once_more)

    def strike(self) -> None:
        """Faults that are not a message's: a death, a suspicion."""
        living = [peer for peer in self.peers.values() if peer.alive]
        victim = self.rng.choice(living)
        if self.replaceable(victim) and self.fault("kill"):
            victim.alive = False
        if self.fault("suspect"):
            self.step.remove(self.rng.choice(living).me, "suspected", self.now)

    def replaceable(self, peer: Peer) -> bool:
        """Whether a mate has all that ``peer`` has; the loss of a whole stage is no topic here."""
        mates = [self.peers[r] for r in self.members(peer.stage) if self.peers[r].alive]
        return any(mate is not peer and (mate.vote or not peer.vote) for mate in mates)

    # -- the trainer ------------------------------------------------------------------------

    def run(self) -> None:
        for t in range(self.plan.steps):
            self.one_step(t)
        at_rest = [self.peers[replica] for replica in self.ready]
        if any(peer.ledger.mark != self.mark for peer in at_rest):
            raise Violation("READY at another mark than the run's")
        for stage in range(self.plan.stages):
            if len({tuple(p.history) for p in at_rest if p.stage == stage}) != 1:
                raise Violation(f"stage {stage}: other bits at the same mark")

    def members(self, stage: int) -> list[Replica]:
        return sorted(r for r in self.ready if self.peers[r].stage == stage)

    def one_step(self, t: int) -> None:
        plan = self.plan
        journeys = [Journey(m, plan.stages, answer_s=ANSWER_S) for m in range(plan.microbatches)]
        flight = Flight(
            journeys,
            self.mark,
            wiring=self.wiring,
            window=self.window,
            pace=self.pace,
            stamps=self.stamps,
            rng=self.rng,
        )
        closings = [Closing(s, limit_s=ROUND_S, answer_s=ANSWER_S) for s in range(plan.stages)]
        to = Mark(TERM, t + 1)
        update = Update(0.1, 1.0, 1.0, 1.0, False)
        skip = Update(0.1, 1.0, 1.0, 1.0, True)
        self.step = step = Step(
            flight,
            closings,
            ready=self.members,
            stamps=self.stamps,
            to=to,
            decider=lambda norms, finite: (update if finite else skip, sum(norms)),
            applied=t,
        )
        events, audited = 0, False
        while not step.finished:
            for do in step.advance(self.now):
                self.carry_out(do)
            if step.decision is not None and not audited:
                self.audit(step.decision)
                audited = True
            self.next_event(step.deadline())
            events += 1
            if events > 20_000:
                raise Violation("it does not end")
        for do in step.advance(self.now):
            if isinstance(do, Remove):
                self.carry_out(do)
        self.mark = to
        for replica in [r for r in self.ready if self.peers[r].ledger.mark != to]:
            self.ready.discard(replica)  # it has not heard the decision yet
            self.later(0.2, lambda r=replica: self.readmit(r))

    def next_event(self, deadline: float) -> None:
        if self._heap and self._heap[0][0] <= deadline:
            self.now, _, do = heapq.heappop(self._heap)
            do()
            self.strike()
        elif deadline < float("inf"):
            self.now = max(self.now, deadline)
        else:
            raise Violation("nothing will ever happen")

    def carry_out(self, do: Instruction) -> None:
        match do:
            case Launch():
                self.launch(do)
            case Ask():
                self.call(do.replica, lambda p: self.cancel(p, do), lambda a: self.hear(do, a))
            case Prepare():
                self.call(do.replica, lambda p: self.prepare(p, do), lambda a: self.prepared(do, a))
            case Fetch():
                self.call(do.replica, lambda p: self.fetch(p, do), lambda _: None)
            case Reset():
                self.call(do.replica, lambda p: self.reset(p, do.stamp), lambda _: None)
            case Decide():
                self.tell(do.replica, do.decision)
            case Remove():
                self.removals += 1
                self.ready.discard(do.replica)
                self.later(self.rng.choice((0.05, 0.3, 3.0)), lambda: self.readmit(do.replica))
            case Probe():
                self.call(do.replica, lambda _: True, lambda _: None)

    def hear(self, ask: Ask, answer: tuple[bool, float | None]) -> None:
        self.step.answered(ask, self.peers[ask.replica].stage, *answer)

    def prepared(self, do: Prepare, answer: tuple[str, Any]) -> None:
        what, value = answer
        if what == "vote":
            self.step.vote(do.replica, value, stage=do.stage)
        elif what == "agreed":
            self.step.prepared(do.replica, do.round, value, self.now, stage=do.stage)
        elif what == "holds":
            self.step.mismatched(Mismatch(do.replica, value), do.round, stage=do.stage)
        elif what == "at" and self.step.decision is None:
            self.step.remove(do.replica, "at another mark", self.now)

    def tell(self, replica: Replica, decision: Decision) -> None:
        def answered(mark: Mark) -> None:
            if mark == decision.to and self.step.decision is decision:
                self.ready.add(replica)
                self.step.applied(replica, stage=self.peers[replica].stage)
            elif mark != decision.to:
                self.step.remove(replica, "cannot apply", self.now)

        self.call(replica, lambda p: self.apply(p, decision), answered)

    def readmit(self, replica: Replica) -> None:
        """It is heard again: told the decision if there is one, else reset and READY."""
        step, peer = self.step, self.peers[replica]
        if replica in self.ready or not peer.alive:
            return
        self.later(2.5, lambda: self.readmit(replica))  # if this does not come to anything
        if step.decision is not None:
            if peer.ledger.mark in (step.decision.mark, step.decision.to):
                self.tell(replica, step.decision)
            return
        if peer.ledger.mark != self.mark:
            return
        mark = self.reset(peer, self.stamps.take())

        def answered() -> None:
            current = self.step is step and step.decision is None
            if mark == self.mark and current and replica not in self.ready:
                self.ready.add(replica)
                step.admitted(replica, stage=peer.stage)

        self.message(answered)

    # -- microbatches -----------------------------------------------------------------------

    def launch(self, do: Launch) -> None:
        if self.fault("early"):
            self.later(self.rng.uniform(0, 0.6), lambda: self.fail(do.attempt, "early"))
        self.attempts.append(do.attempt)
        self.hop(do.attempt, do.route, 0, [])

    def fail(self, attempt: Attempt, reason: str) -> None:
        self.step.failed(attempt.m, attempt.stamp, reason, self.now)

    def hop(self, attempt: Attempt, route: Route, stage: int, path: list[Peer]) -> None:
        short_list = [self.peers[replica] for replica in route[stage]]
        living = [peer for peer in short_list if peer.alive and self.takes(peer, attempt)]
        if not living:
            self.message(lambda: self.fail(attempt, "nobody takes it"))
            return
        peer = living[0] if self.rng.random() < 0.8 else self.rng.choice(living)  # some are busy
        arrived = self.message(
            lambda: self.later(
                self.rng.uniform(0.01, 0.1), lambda: self.forward(peer, attempt, route, path)
            )
        )
        told = not arrived and self.rng.random() < 0.5  # else only time tells
        if told or self.fault("unsure"):
            self.message(lambda: self.fail(attempt, "the hop heard nothing"))

    def takes(self, peer: Peer, attempt: Attempt) -> bool:
        bar = peer.ledger.bar
        return peer.ledger.mark == attempt.mark and (bar is None or attempt.stamp > bar)

    def forward(self, peer: Peer, attempt: Attempt, route: Route, path: list[Peer]) -> None:
        if not peer.alive or not self.takes(peer, attempt):
            return
        last = peer.stage == self.plan.stages - 1
        if not last:
            self.receipt(peer, attempt, Kind.FORWARD, "", None)
            self.hop(attempt, route, peer.stage + 1, [*path, peer])
        elif attempt.evaluation:
            self.receipt(peer, attempt, Kind.FORWARD, "not asked", float(attempt.m))
        else:
            self.backward(peer, attempt, path)

    def backward(self, peer: Peer, attempt: Attempt, path: list[Peer]) -> None:
        if not peer.alive or peer.ledger.mark != attempt.mark:
            return
        if attempt.m in self.plan.nan or {p.me.peer for p in [*path, peer]} & self.plan.bad:
            self.receipt(peer, attempt, Kind.BACKWARD, "not finite", None)
            return
        verdict = self.count(peer, attempt)
        last = peer.stage == self.plan.stages - 1
        loss = float(attempt.m) if last and verdict != "dropped" else None
        self.receipt(peer, attempt, Kind.BACKWARD, verdict, loss)
        if path and peer.stage > attempt.lowest:
            pause = self.rng.uniform(0.5, 5) if self.fault("slow") else self.rng.uniform(0.01, 0.1)
            below, rest = path[-1], path[:-1]
            self.message(lambda: self.later(pause, lambda: self.backward(below, attempt, rest)))

    def count(self, peer: Peer, attempt: Attempt) -> str:
        verdict = peer.ledger.verdict(attempt)
        if verdict is not Verdict.COUNT:
            return str(verdict)
        if self.fault("explode"):
            if "atomic add" in self.plan.off:
                peer.counts[attempt.m] += 1  # some layers have it
                return "failed"
            peer.drop()
            return "dropped"
        peer.ledger.count(attempt)
        peer.counts[attempt.m] += 1
        self.counted += 1
        if "seal" not in self.plan.off:
            peer.end_round()
        return "counted"

    def receipt(
        self, peer: Peer, attempt: Attempt, kind: Kind, verdict: str, loss: float | None
    ) -> None:
        told = Receipt(
            attempt.stamp, attempt.m, peer.stage, peer.me, kind, verdict, 0.0, 0.05, 0.01, loss
        )
        self.message(lambda: self.step.receipt(told, self.now))

    def cancel(self, peer: Peer, ask: Ask) -> tuple[bool, float | None]:
        holds = peer.ledger.cancel(ask.stamp, ask.m)
        holds = holds and peer.ledger.mark == self.mark
        last = peer.stage == self.plan.stages - 1
        return holds, float(ask.m) if holds and last else None

    # -- the end of a step, as a replica sees it --------------------------------------------

    def raise_bar(self, peer: Peer, stamp: Stamp) -> None:
        if "bar" not in self.plan.off:
            peer.ledger.raise_bar(stamp)

    def reset(self, peer: Peer, stamp: Stamp) -> Mark:
        if peer.ledger.bar is None or stamp > peer.ledger.bar:
            self.raise_bar(peer, stamp)
            peer.drop()
        return peer.ledger.mark

    def prepare(self, peer: Peer, do: Prepare) -> tuple[str, Any]:
        bar, held = peer.ledger.bar, frozenset(peer.ledger.held)
        if peer.ledger.mark != self.mark:
            return "at", peer.ledger.mark
        if bar is not None and do.round < bar:
            return "refused", None
        alive = peer.round is not None and peer.round.stamp == do.round
        if not alive:
            self.raise_bar(peer, do.round)
            peer.end_round()
            if bar == do.round or held != do.expected:
                return "holds", held
            self.sealed[do.round][peer.me] = held
            pieces = len(do.members) + 1
            owners = [do.members[piece % len(do.members)] for piece in range(pieces)]
            peer.round = Round(do.round, peer.me, do.members, do.contributors, owners)
            if self.fault("straggler"):  # an attempt of this step gets to its end only now
                late = self.rng.choice([a for a in self.attempts if a.mark == self.mark])
                self.later(self.rng.uniform(0, 0.05), lambda: self.backward(peer, late, []))
            if self.fault("replay"):  # all that its mates ever sent in older rounds comes again
                for old in self.sent[peer.me]:
                    old()
            if peer.round is not None:
                self.go_on(peer, peer.round, peer.round.begin())
        if peer.vote is not None:
            return "vote", peer.vote
        return "agreed", tuple(peer.round.missing_members()) if peer.round else ()

    def go_on(self, peer: Peer, round_: Round, todo: Iterable[object]) -> None:
        for do in todo:
            match do:
                case SendPart(piece=piece, to=to):
                    self.deliver(peer, round_, to, "part", piece, Counter(peer.counts))
                case AddUp(piece=piece, order=order):
                    # In a while, so that something may come in between.
                    pause = self.rng.choice((0.01, 0.02, 0.5))
                    self.later(pause, lambda p=piece, o=order: self.add_up(peer, round_, p, o))
                case SendSum(piece=piece, to=to_all):
                    for to in to_all:
                        self.deliver(peer, round_, to, "sum", piece, peer.total[piece])
                case Complete():
                    digest = repr([sorted(peer.total[p].items()) for p in sorted(peer.total)])
                    peer.vote = Vote(round_.stamp, digest, 1.0, True)
                    self.message(lambda v=peer.vote: self.step.vote(peer.me, v, stage=peer.stage))

    def add_up(self, peer: Peer, round_: Round, piece: int, order: tuple[Replica, ...]) -> None:
        if peer.round is round_ and peer.alive:
            own = {peer.me: peer.counts}
            total: Counter[int] = Counter()
            for member in order:
                total.update(own.get(member) or peer.parts[piece, member])
            peer.total[piece] = total
            self.go_on(peer, round_, round_.added(piece))

    def deliver(
        self, peer: Peer, round_: Round, to: Replica, what: str, piece: int, values: Counter[int]
    ) -> None:
        """Until it is taken or the round is over."""
        other, heard = self.peers[to], []

        def arrive() -> None:
            if other.alive:
                taken = self.take(other, peer.me, round_, what, piece, values)
                self.later(0.02, lambda: answer(taken))

        def answer(taken: bool) -> None:
            if not heard and not taken:  # not yet in that round
                self.later(0.05, lambda: send_again(trouble=False))
            heard.append(taken)

        def send_again(*, trouble: bool) -> None:
            if peer.round is round_ and peer.alive:
                if trouble:
                    trouble_told = partial(self.step.trouble, round_.stamp, stage=peer.stage)
                    self.message(lambda: trouble_told(self.now))
                self.deliver(peer, round_, to, what, piece, values)

        self.sent[to].append(arrive)
        self.message(arrive)
        self.later(1.0, lambda: heard or send_again(trouble=True))

    def take(
        self, peer: Peer, sender: Replica, of: Round, what: str, piece: int, values: Counter[int]
    ) -> bool:
        round_ = peer.round
        named = round_ is not None and (round_.stamp == of.stamp or "round name" in self.plan.off)
        if round_ is None or not named:
            return False
        if what == "part" and round_.wants_part(piece, sender):
            peer.parts[piece, sender] = values
            self.go_on(peer, round_, round_.part(piece, sender))
        elif what == "sum" and round_.wants_sum(piece):
            peer.total[piece] = values
            self.go_on(peer, round_, round_.sum_piece(piece))
        return True

    def fetch(self, peer: Peer, do: Fetch) -> bool:
        round_, source = peer.round, self.peers[do.source]
        held = source.vote is not None and source.vote.round == do.round and source.alive
        if round_ is not None and round_.stamp == do.round and held:
            for piece in round_.missing_pieces():
                peer.total[piece] = source.total[piece]
                self.go_on(peer, round_, round_.sum_piece(piece))
        return True

    def apply(self, peer: Peer, decision: Decision) -> Mark:
        skip = decision.update.skip
        name = None if skip else decision.rounds[peer.stage]
        mine = None if peer.vote is None else (peer.vote.round, peer.vote.digest)
        if peer.ledger.mark == decision.mark and (skip or mine == name):
            peer.history.append((decision.to, "" if name is None else name[1]))
            peer.drop()
            peer.ledger.advance(decision.to)
        return peer.ledger.mark

    # -- the audit --------------------------------------------------------------------------

    def audit(self, decision: Decision) -> None:
        """Into the ledgers as sealed, and into the sums: every microbatch exactly once."""
        self.decisions.append(decision)
        if decision.update.skip:
            return
        once = Counter(range(self.plan.microbatches))
        for stage, (stamp, digest) in enumerate(decision.rounds):
            sealed = Counter(itertools.chain.from_iterable(self.sealed[stamp].values()))
            if sealed != once:
                raise Violation(f"stage {stage}: sealed ledgers hold {dict(sealed)}")
            votes = [p for p in self.peers.values() if p.stage == stage and p.vote]
            holders = [p for p in votes if p.vote and p.vote.round == stamp]
            for peer in holders:
                if peer.vote and peer.vote.digest == digest:
                    for piece, total in peer.total.items():
                        if total != once:
                            raise Violation(f"stage {stage}, piece {piece}: {dict(total)}")
            if not any(peer.alive for peer in holders):
                raise Violation(f"stage {stage}: nobody alive holds the sum")
        if decision.loss != sum(range(self.plan.microbatches)):
            raise Violation(f"the loss is {decision.loss}")
