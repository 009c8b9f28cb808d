"""One optimizer step as the trainer drives it: reconcile, decide once, finish."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from swarm.core.backoff import Backoff
from swarm.core.closing import Closing, Mismatch, Phase, Prepare, Vote
from swarm.core.flight import COUNTED, DROPPED, NOT_FINITE, Flight, Launch, Pace, Receipt, Stamps
from swarm.core.intake import Kind
from swarm.core.journey import Ask, Journey
from swarm.core.step import Decide, Decision, Instruction, Probe, Remove, Reset, Step
from swarm.core.update import Update
from swarm.core.wiring import Window, Wiring
from swarm.types import FRESH, Mark, Replica, Stamp, Term

TERM = Term(1, "trainer")
TO = Mark(TERM, 1)
A, B, C, D = (Replica(name, "boot") for name in "abcd")
FOREVER = float("inf")


class Bench:
    """A step of ``count`` microbatches; ``stages`` says who is READY where."""

    def __init__(
        self,
        count: int = 3,
        stages: Sequence[Sequence[Replica]] = ((A, B, C),),
        kind: type[Journey] = Journey,
    ) -> None:
        self.ready = [list(stage) for stage in stages]
        self.stamps = Stamps(lambda n: Stamp(TERM, n))
        self.decided: list[tuple[list[float], bool]] = []
        self.serving: Callable[[int], list[Replica]] = lambda stage: list(self.ready[stage])
        self.wiring = Wiring(len(stages), ban=Backoff(1.0))
        flight = Flight(
            [kind(m, len(stages), answer_s=3.0) for m in range(count)],
            FRESH,
            wiring=self.wiring,
            window=Window(8, least=1, most=8),
            pace=Pace(1.0),
            stamps=self.stamps,
            rng=random.Random(0),
        )
        self.step = Step(
            flight,
            [Closing(stage, limit_s=10.0, answer_s=2.0) for stage in range(len(stages))],
            ready=lambda stage: list(self.ready[stage]) if 0 <= stage < len(self.ready) else [],
            stamps=self.stamps,
            to=TO,
            decider=self.decide,
            applied=0,
            serving=lambda stage: self.serving(stage),
        )
        self.launched: dict[int, Launch] = {}

    def decide(self, norms: Sequence[float], finite: bool) -> tuple[Update, float]:
        self.decided.append((list(norms), finite))
        return Update(0.1, 1.0, 1.0, 1.0, not finite), sum(norms)

    def advance(self, now: float = 0.0) -> list[Instruction]:
        found = self.step.advance(now)
        self.launched |= {do.attempt.m: do for do in found if isinstance(do, Launch)}
        return found

    def told(self, m: int, replica: Replica, verdict: str = COUNTED, stage: int = 0) -> Receipt:
        stamp = self.launched[m].attempt.stamp
        return Receipt(
            stamp, m, stage, replica, Kind.BACKWARD, verdict, 0.0, 0.1, 0.1, loss=float(m)
        )

    def counts(self, holders: Sequence[Replica], stage: int = 0, now: float = 0.0) -> None:
        for m, replica in enumerate(holders):
            self.step.receipt(self.told(m, replica, stage=stage), now)

    def prepared(self, holders: Sequence[Replica] = (A, A, B)) -> Stamp:
        """All microbatches counted at ``holders``, and the round that this opened."""
        self.advance()
        self.counts(holders)
        found = [do for do in self.advance() if isinstance(do, Prepare)]
        assert {do.replica: set(do.expected) for do in found} == {
            replica: {m for m, holder in enumerate(holders) if holder == replica}
            for replica in self.ready[0]
        }
        return found[0].round

    def votes(self, round_: Stamp, members: Sequence[Replica] = (A, B, C), stage: int = 0) -> None:
        for member in members:
            self.step.vote(member, Vote(round_, "digest", 4.0, True), stage=stage)

    def decision(self, holders: Sequence[Replica] = (A, A, B)) -> Decision:
        self.votes(self.prepared(holders))
        (decision,) = {id(do.decision): do.decision for do in only(Decide, self.advance())}.values()
        return decision

    def holders(self) -> dict[int, Replica | None]:
        return {m: trip.holders.get(0) for m, trip in self.step.flight.journeys.items()}


def only(kind: type, found: list[Instruction]) -> list:
    return [do for do in found if isinstance(do, kind)]


def found(holds: set[int], replica: Replica) -> Mismatch:
    return Mismatch(replica, frozenset(holds))


# -- deciding -------------------------------------------------------------------------------


def test_a_step_is_decided_once_every_stage_is_ready() -> None:
    bench = Bench(count=2, stages=((A,), (B, C)))
    assert len(only(Launch, bench.advance())) == 2
    bench.counts((B, C), stage=1)
    (first, second) = only(Prepare, bench.advance())
    assert (first.stage, {first.replica, second.replica}) == (1, {B, C})
    bench.votes(first.round, (B, C), stage=1)
    assert bench.advance() == [], "stage 0 has not counted yet"
    bench.counts((A, A))
    (below,) = only(Prepare, bench.advance())
    bench.votes(below.round, (A,))
    decides = bench.advance()
    assert [do.replica for do in only(Decide, decides)] == [A, B, C]
    decision = bench.step.decision
    assert decision is not None
    assert (decision.mark, decision.to) == (FRESH, TO)
    assert decision.rounds == ((below.round, "digest"), (first.round, "digest"))
    assert decision.counts == ({"a": 2}, {"b": 1, "c": 1})
    assert (decision.loss, decision.norm) == (1.0, 8.0)
    assert bench.decided == [([4.0, 4.0], True)]


def test_a_sum_that_is_not_finite_is_for_the_decider_to_skip() -> None:
    bench = Bench(stages=((A,),))
    round_ = bench.prepared((A, A, A))
    bench.step.vote(A, Vote(round_, "digest", 4.0, False), stage=0)
    bench.advance()
    assert bench.decided == [([4.0], False)]


def test_nothing_is_decided_twice_or_done_after_the_decision() -> None:
    bench = Bench()
    decision = bench.decision()
    assert bench.advance(1000.0) == []
    assert bench.step.deadline() == FOREVER
    late = (
        lambda: bench.step.receipt(bench.told(0, A, DROPPED), 5.0),
        lambda: bench.step.mismatched(found(set(), A), decision.rounds[0][0], stage=0),
        lambda: bench.step.failed(0, bench.launched[0].attempt.stamp, "late", 5.0),
    )
    for event in late:
        event()
        assert bench.advance(5.0) == []
    assert bench.step.decision is decision
    assert bench.step.closings[0].phase is Phase.READY


def test_a_gradient_found_not_finite_by_two_skips_the_step_without_rounds() -> None:
    bench = Bench(count=1, stages=((A, B),))
    for now in (1.0, 2.0):
        bench.advance(now)
        first = bench.launched[0].route[0][0]
        bench.step.receipt(bench.told(0, first, NOT_FINITE), now)
        for ask in only(Ask, bench.advance(now)):
            bench.step.answered(ask, 0, False)
    assert bench.step.decision is not None
    assert bench.step.decision.rounds == ()
    assert bench.step.decision.update.skip
    assert bench.step.decision.counts == ({},)


def test_it_is_finished_when_each_stage_has_a_replica_at_the_new_mark() -> None:
    bench = Bench(count=1, stages=((A,), (B, C)))
    bench.advance()
    bench.counts((B,), stage=1)
    bench.counts((A,))
    for prepare in only(Prepare, bench.advance()):
        bench.votes(prepare.round, (prepare.replica,), stage=prepare.stage)
    assert not bench.step.finished
    bench.advance()
    bench.step.applied(C, stage=1)
    assert not bench.step.finished
    bench.step.applied(A, stage=0)
    assert bench.step.finished
    bench.step.remove(C, "silent", 5.0)
    assert not bench.step.finished, "the only one at the new mark is gone"
    bench.step.applied(C, stage=1)
    assert bench.step.finished, "it was only slow to say so"


def test_one_admitted_after_the_decision_is_told_it() -> None:
    bench = Bench()
    decision = bench.decision()
    bench.step.remove(B, "silent", 5.0)
    assert bench.advance(5.0) == [Remove(B, "silent")]
    bench.step.admitted(B, stage=0)
    assert bench.advance(6.0) == [Decide(B, decision)]


def test_a_skip_ends_what_is_in_flight_and_a_later_removal_asks_nobody() -> None:
    bench = Bench(count=2, stages=((A, B),))
    for now in (1.0, 2.0):
        bench.advance(now)
        first = bench.launched[0].route[0][0]
        bench.step.receipt(bench.told(0, first, NOT_FINITE), now)
        for ask in only(Ask, bench.advance(now)):
            bench.step.answered(ask, 0, False)
    assert bench.step.decision is not None
    assert bench.step.flight.in_flight == 1
    assert [load.outstanding for load in bench.wiring.loads(0)] == [0, 0]
    has_it = bench.launched[1].route[0][0]
    bench.step.remove(has_it, "silent", 3.0)
    assert bench.advance(3.0) == [Remove(has_it, "silent")]


# -- reconciling ----------------------------------------------------------------------------


def test_what_a_member_turns_out_not_to_hold_goes_again() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found({0}, A), round_, stage=0)
    (launch,) = bench.advance()
    assert (launch.attempt.m, launch.attempt.mask) == (1, {0})
    bench.step.receipt(bench.told(1, C), 1.0)
    prepares = only(Prepare, bench.advance())
    assert {do.replica: set(do.expected) for do in prepares} == {A: {0}, B: {2}, C: {1}}
    assert prepares[0].round > round_


def test_of_two_that_hold_the_same_the_one_with_less_is_reset() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found({0, 2}, B), round_, stage=0)
    found_now = bench.advance()
    (reset,) = only(Reset, found_now)
    assert (reset.replica, reset.stage) == (B, 0)
    assert reset.stamp > round_
    assert [do.attempt.m for do in only(Launch, found_now)] == [2], "what only B held"

    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found({0, 1, 2}, B), round_, stage=0)
    found_now = bench.advance()
    assert [do.replica for do in only(Reset, found_now)] == [A]
    assert bench.holders() == {0: B, 1: B, 2: B}
    assert {do.replica: set(do.expected) for do in only(Prepare, found_now)} == {
        A: set(),
        B: {0, 1, 2},
        C: set(),
    }


def test_against_several_rivals_the_side_with_less_work_is_reset() -> None:
    bench = Bench()
    round_ = bench.prepared((A, B, C))
    bench.step.mismatched(found({0, 1, 2}, C), round_, stage=0)
    assert {do.replica for do in only(Reset, bench.advance())} == {A, B}

    bench = Bench(count=4)
    round_ = bench.prepared((A, A, B, C))
    bench.step.mismatched(found({1, 2, 3}, C), round_, stage=0)
    assert {do.replica for do in only(Reset, bench.advance())} == {C}


def test_one_that_holds_what_does_not_exist_is_reset() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found({2, 77}, B), round_, stage=0)
    assert [do.replica for do in only(Reset, bench.advance())] == [B]


def test_what_two_members_say_of_the_same_round_is_heard() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found({0}, A), round_, stage=0)
    bench.step.mismatched(found({2, 1}, B), round_, stage=0)
    assert bench.holders() == {0: A, 1: B, 2: B}


def test_what_is_said_of_another_round_or_by_no_member_is_ignored() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found(set(), A), bench.stamps.take(), stage=0)
    bench.step.mismatched(found(set(), D), round_, stage=0)
    bench.votes(round_, (A,))
    bench.step.remove(B, "silent", 1.0)
    bench.step.mismatched(found(set(), B), round_, stage=0)
    assert bench.step.closings[0].round == round_
    assert bench.holders() == {0: A, 1: A, 2: B}


def test_the_work_of_one_that_is_no_member_any_more_wins_no_conflict() -> None:
    bench = Bench()
    round_ = bench.prepared((A, B, B))
    bench.votes(round_, (A,))
    bench.step.remove(B, "silent", 1.0)
    assert bench.holders() == {0: A, 1: B, 2: B}, "its work is in the sum"
    bench.step.mismatched(found({1}, C), round_, stage=0)
    assert bench.holders() == {0: A, 1: C, 2: None}
    assert only(Reset, bench.advance()) == []


def test_receipts_and_answers_of_what_a_reset_has_undone_are_not_believed() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.mismatched(found({0, 2}, B), round_, stage=0)
    assert bench.holders() == {0: A, 1: A, 2: None}
    bench.step.receipt(bench.told(2, B), 1.0)
    bench.step.answered(Ask(2, bench.launched[2].attempt.stamp, B), 0, True)
    bench.step.mismatched(found({2}, B), round_, stage=0)
    assert bench.holders() == {0: A, 1: A, 2: None}
    bench.advance(2.0)
    bench.step.receipt(bench.told(2, B), 3.0)
    assert bench.holders() == {0: A, 1: A, 2: B}


def test_a_replica_that_failed_while_adding_ends_the_round_and_its_work_goes_again() -> None:
    bench = Bench()
    bench.prepared((A, A, B))
    bench.step.receipt(bench.told(1, A, DROPPED), 1.0)
    assert [do.attempt.m for do in only(Launch, bench.advance(1.0))] == [0, 1]
    assert only(Prepare, bench.advance(1.0)) == []


# -- members that come and go ---------------------------------------------------------------


def test_what_a_removed_member_held_goes_again_and_the_round_is_dead() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.remove(A, "silent", 1.0)
    found_now = bench.advance(1.0)
    assert found_now[0] == Remove(A, "silent")
    assert [do.attempt.m for do in only(Launch, found_now)] == [0, 1]
    assert all(A not in do.route[0] for do in only(Launch, found_now))
    bench.votes(round_, (B, C))
    assert bench.step.closings[0].phase is Phase.OPEN
    bench.step.remove(A, "silent again", 2.0)
    assert bench.advance(2.0) == []


def test_nothing_is_done_again_once_anyone_holds_the_sum() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.votes(round_, (B,))
    bench.step.remove(A, "silent", 1.0)
    assert only(Launch, bench.advance(1.0)) == []
    bench.step.admitted(A, stage=0)
    bench.step.remove(A, "silent again", 2.0)
    assert only(Launch, bench.advance(2.0)) == []
    bench.votes(round_, (C,))
    assert {do.replica for do in only(Decide, bench.advance(3.0))} == {B, C}


def test_one_that_comes_back_takes_part_in_the_round() -> None:
    bench = Bench()
    bench.prepared((A, A, B))
    bench.ready[0].append(D)
    bench.step.admitted(D, stage=0)
    assert [do.replica for do in only(Prepare, bench.advance(1.0))] == [A, B, C, D]


def test_who_was_admitted_holds_nothing_whatever_was_believed() -> None:
    bench = Bench()
    bench.prepared((A, A, B))
    bench.step.admitted(B, stage=0)
    assert bench.holders() == {0: A, 1: A, 2: None}


def test_a_stage_that_lost_everybody_waits_and_goes_on() -> None:
    bench = Bench(count=1, stages=((A,),))
    bench.advance()
    bench.step.remove(A, "silent", 1.0)
    assert bench.advance(1.0) == [Remove(A, "silent")]
    assert bench.advance(50.0) == []
    bench.step.admitted(A, stage=0)
    (launch,) = bench.advance(60.0)
    assert launch.attempt.m == 0


def test_the_silent_in_a_round_are_removed() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, A))
    asked = bench.advance(10.0)
    assert [do.replica for do in only(Prepare, asked)] == [A, B, C]
    assert bench.step.deadline() == 12.0
    for member in (A, B):
        bench.step.prepared(member, round_, (C,), 11.0, stage=0)
    assert [do.replica for do in only(Remove, bench.advance(12.0))] == [C]


def test_trouble_in_a_round_brings_the_question_forward() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    bench.step.trouble(round_, 1.0, stage=0)
    assert len(only(Prepare, bench.advance(1.0))) == 3


def test_who_does_not_answer_a_cancel_is_removed() -> None:
    bench = Bench(count=1, stages=((A,),))
    bench.advance()
    bench.step.failed(0, bench.launched[0].attempt.stamp, "gave up", 1.0)
    (ask,) = bench.advance(1.0)
    assert isinstance(ask, Ask)
    assert bench.step.deadline() == 4.0
    assert [do.replica for do in only(Remove, bench.advance(4.0))] == [A]


def test_an_answer_that_it_holds_is_believed_unless_it_was_removed() -> None:
    bench = Bench(count=1, stages=((A, B),))
    bench.advance()
    bench.step.failed(0, bench.launched[0].attempt.stamp, "gave up", 1.0)
    to_a, to_b = (do for do in bench.advance(1.0) if isinstance(do, Ask))
    bench.step.remove(A, "silent", 1.0)
    bench.step.answered(to_a, 0, True, 0.5)
    assert bench.holders() == {0: None}
    bench.step.answered(to_b, 0, True, 0.5)
    assert bench.holders() == {0: B}


@pytest.mark.parametrize(("replica", "stage"), [(D, 0), (A, 1), (A, 9), (A, -1)])
def test_receipts_of_strangers_and_for_other_stages_are_ignored(
    replica: Replica, stage: int
) -> None:
    bench = Bench(count=1, stages=((A, B), (C,)))
    bench.advance()
    bench.step.receipt(bench.told(0, replica, stage=stage), 1.0)
    assert bench.step.flight.journeys[0].holders == {}


def test_a_failure_told_of_another_step_does_not_end_the_round() -> None:
    bench = Bench()
    round_ = bench.prepared((A, A, B))
    told = bench.told(0, A, DROPPED)
    old = Receipt(Stamp(TERM, 0), 0, 0, A, Kind.BACKWARD, DROPPED, 0.0, 0.1, 0.1)
    bench.step.receipt(old, 1.0)
    assert bench.step.closings[0].round == round_
    bench.step.receipt(told, 1.0)
    assert bench.step.closings[0].round is None


def test_members_that_another_could_not_reach_are_looked_at() -> None:
    bench = Bench(stages=((A, B), (C,)))
    bench.step.remove(B, "silent", 0.0)
    bench.step.unreachable([B, C, D])
    assert only(Probe, bench.advance()) == [Probe(C)]


def test_work_of_one_that_is_no_member_when_the_round_is_to_open_goes_again() -> None:
    bench = Bench(count=2, stages=((A, B),))
    bench.advance()
    bench.step.receipt(bench.told(0, A), 0.0)
    bench.step.receipt(bench.told(1, B), 0.0)
    bench.ready[0] = [B]  # the roster lost A without a word to the step
    again = bench.advance()
    assert only(Prepare, again) == []
    assert [launch.attempt.m for launch in only(Launch, again)] == [0]
    bench.step.receipt(bench.told(0, B), 1.0)
    assert {do.expected for do in only(Prepare, bench.advance(1.0))} == {frozenset({0, 1})}


# -- replicas that leave --------------------------------------------------------------------


def leaving(replica: Replica, stages: Sequence[Sequence[Replica]] = ((A, B),)) -> Bench:
    """``replica`` gets no new work."""
    bench = Bench(count=2, stages=stages)
    bench.serving = lambda stage: [r for r in bench.ready[stage] if r != replica]
    return bench


def test_one_that_leaves_gets_no_new_work_and_takes_part_in_the_round() -> None:
    bench = leaving(A)
    sent = only(Launch, bench.advance())
    assert [launch.route for launch in sent] == [((B,),), ((B,),)]
    bench.counts((B, B))
    assert {do.replica: set(do.expected) for do in only(Prepare, bench.advance())} == {
        A: set(),
        B: {0, 1},
    }


def test_one_that_leaves_works_again_if_all_that_stay_are_gone() -> None:
    bench = leaving(A)
    bench.advance()
    bench.step.remove(B, "silent", 1.0)
    again = only(Launch, bench.advance(1.0))
    assert [launch.route for launch in again] == [((A,),), ((A,),)]


# -- what was there before this trainer -----------------------------------------------------


def test_what_a_member_holds_from_before_need_not_go_again() -> None:
    bench = Bench(stages=((A, B),))
    bench.step.inherit(A, frozenset({0, 2}), {0: 0.5, 2: 0.25, 9: 7.0}, stage=0)
    assert bench.holders() == {0: A, 1: None, 2: A}
    (launch,) = only(Launch, bench.advance())
    assert launch.attempt.m == 1
    bench.step.receipt(bench.told(1, B), 1.0)
    prepares = only(Prepare, bench.advance(1.0))
    assert {do.replica: set(do.expected) for do in prepares} == {A: {0, 2}, B: {1}}
    assert bench.step.flight.loss() == 1.75


def test_what_is_held_without_its_loss_goes_once_more_to_be_measured() -> None:
    bench = Bench(count=1, stages=((A, B),))
    bench.step.inherit(A, frozenset({0}), {}, stage=0)
    (launch,) = only(Launch, bench.advance())
    assert launch.attempt.evaluation


def test_a_loss_of_what_the_ledger_lacks_is_not_taken() -> None:
    bench = Bench(count=2, stages=((A, B),))
    bench.step.inherit(A, frozenset({0}), {0: 0.5, 1: 99.0}, stage=0)
    assert bench.step.flight.journeys[1].loss is None


def test_of_two_that_held_the_same_before_the_one_with_less_is_reset() -> None:
    bench = Bench(stages=((A, B),))
    bench.step.inherit(A, frozenset({0}), {0: 0.5}, stage=0)
    bench.step.inherit(B, frozenset({0, 1}), {0: 0.5, 1: 0.5}, stage=0)
    assert bench.holders() == {0: B, 1: B, 2: None}
    assert [do.replica for do in only(Reset, bench.advance())] == [A]


def test_of_two_that_held_as_much_the_one_heard_later_is_reset_and_its_own_goes_again() -> None:
    bench = Bench(stages=((A, B),))
    bench.step.inherit(A, frozenset({0, 1}), {0: 0.5, 1: 0.5}, stage=0)
    bench.step.inherit(B, frozenset({1, 2}), {1: 0.5, 2: 0.5}, stage=0)
    assert bench.holders() == {0: A, 1: A, 2: None}
    todo = bench.advance()
    assert [do.replica for do in only(Reset, todo)] == [B]
    assert [do.attempt.m for do in only(Launch, todo)] == [2]


def test_one_that_held_microbatches_that_do_not_exist_is_reset() -> None:
    bench = Bench(stages=((A, B),))
    bench.step.inherit(B, frozenset({1, 77}), {1: 0.5, 77: 0.5}, stage=0)
    assert bench.holders() == {0: None, 1: None, 2: None}
    assert [do.replica for do in only(Reset, bench.advance())] == [B]


def test_no_round_is_opened_while_nobody_is_a_member() -> None:
    bench = Bench()
    bench.advance()
    bench.counts((A, A, B))
    bench.ready[0], there = [], bench.ready[0]
    assert bench.advance() == []
    bench.ready[0] = there
    assert len(only(Prepare, bench.advance())) == 3, "what they hold still counts"


def test_whom_a_replica_could_not_reach_is_probed_if_it_is_a_member() -> None:
    bench = Bench()
    bench.advance()
    bench.step.receipt(replace(bench.told(0, A), skipped=(B, D)), 1.0)
    assert only(Probe, bench.advance(1.0)) == [Probe(B)]


class Touched(Journey):
    """Counts how often anybody looks at a microbatch, or has it do something."""

    count = 0

    def __getattribute__(self, name: str) -> object:
        Touched.count += 1
        return super().__getattribute__(name)


def test_an_event_touches_its_own_microbatch_and_no_other() -> None:
    bench = Bench(count=2000, kind=Touched)
    bench.advance()
    Touched.count = 0
    for m in range(8):
        bench.step.receipt(bench.told(m, A), 1.0)
        bench.advance(1.0)
        bench.step.deadline()
    assert 0 < Touched.count < 8 * 200, "going over all would be 16,000 for each question"
