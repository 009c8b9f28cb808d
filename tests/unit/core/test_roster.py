"""Who serves which stage at which mark, and whom to ask when."""

from __future__ import annotations

import random

import pytest

from swarm.core.backoff import Backoff
from swarm.core.roster import GIVEN_UP, OLD_NEWS_S, Admission, Roster, State
from swarm.types import FRESH, Mark, Replica, Term

TERM = Term(1, "trainer")
LATER = Mark(TERM, 3)
A, A_AGAIN, B = Replica("a", "1"), Replica("a", "2"), Replica("b", "1")
RNG = random.Random(0)
FOREVER = float("inf")


def roster_with(*replicas: Replica, stage: int = 0) -> Roster:
    roster = Roster(Backoff(1.0, cap_s=64.0))
    for replica in replicas:
        assert roster.announced(replica, stage, 0.0) == []
    return roster


def ready(mark: Mark = LATER) -> Roster:
    """A is READY at ``mark``."""
    roster = roster_with(A)
    roster.admitted(A, mark)
    return roster


def state(roster: Roster, replica: Replica = A) -> State:
    member = roster.get(replica)
    assert member is not None
    return member.state


def note(roster: Roster) -> str:
    member = roster.get(A)
    assert member is not None
    return member.note


def test_the_announced_are_asked_once_until_they_have_answered() -> None:
    roster = roster_with(A, B)
    assert roster.next_ask(FRESH) == 0.0
    assert [member.replica for member in roster.to_ask(0.0, FRESH)] == [A, B]
    assert roster.to_ask(100.0, FRESH) == []
    assert roster.next_ask(FRESH) == FOREVER


def test_a_repeated_announcement_is_no_news() -> None:
    roster = ready()
    assert roster.announced(A, 0, 1.0) == []
    assert state(roster) is State.READY


def test_another_boot_of_a_peer_proves_the_first_dead() -> None:
    roster = roster_with(A, B)
    assert roster.announced(A_AGAIN, 0, 1.0) == [A]


def test_an_old_copy_of_an_announcement_does_not_prove_the_new_boot_dead() -> None:
    roster = roster_with(A)
    roster.announced(A_AGAIN, 0, 1.0)
    roster.forget(A)
    assert roster.announced(A, 0, 2.0) == []
    assert roster.get(A) is None
    assert roster.announced(A, 0, 1.0 + OLD_NEWS_S) == [A_AGAIN], "old news are forgotten in time"


def test_of_two_stages_that_show_a_peer_the_later_announcement_counts() -> None:
    roster = Roster(Backoff(1.0))
    assert roster.announced(A, 0, 0.0, 5) == []
    assert roster.announced(A, 0, 1.0, 8) == []
    assert roster.announced(A_AGAIN, 1, 1.0, 7) == []
    assert roster.get(A_AGAIN) is None, "it was there before that"
    assert roster.announced(A_AGAIN, 1, 2.0, 9) == [A]
    assert roster.announced(A, 0, 2.0, 8) == []


def test_of_two_stages_without_known_order_none_is_taken_for_old() -> None:
    """A trainer that has just come may have found a peer without its announcement."""
    roster = Roster(Backoff(1.0))
    roster.announced(A_AGAIN, 1, 0.0)
    assert roster.announced(A, 0, 1.0, 8) == []
    assert [m.replica for m in roster.to_ask(1.0, FRESH)] == [A_AGAIN, A]
    roster.forget(A, 1.0)  # the peer has said that it is not that boot any more
    assert roster.announced(A, 0, 2.0, 8) == []
    assert [m.replica for m in roster.all()] == [A_AGAIN]


def test_a_peer_that_begins_again_at_its_stage_may_have_a_clock_that_was_set_back() -> None:
    roster = Roster(Backoff(1.0))
    roster.announced(A, 0, 0.0, 8)
    assert roster.announced(A_AGAIN, 0, 1.0, 3) == [A]


def test_only_a_fresh_run_tells_one_without_weights_to_begin() -> None:
    roster = roster_with(A)
    assert roster.answered(A, None, FRESH, 0.0, RNG) is Admission.BEGIN
    assert roster.answered(A, None, LATER, 0.0, RNG) is Admission.JOIN
    assert note(roster) == "has no weights, the run is at step 3"


def test_who_is_at_the_mark_is_admitted_by_a_reset() -> None:
    roster = roster_with(A)
    roster.to_ask(0.0, LATER)
    assert roster.answered(A, LATER, LATER, 0.0, RNG) is Admission.RESET
    assert roster.to_ask(100.0, LATER) == [], "its admission is under way"
    roster.admitted(A, LATER)
    assert roster.ready(0, LATER) == [A]


def test_who_is_at_another_mark_of_the_same_step_is_behind() -> None:
    roster = roster_with(A)
    roster.to_ask(0.0, LATER)
    other = Mark(Term(0, "abandoned"), 3)
    assert roster.answered(A, other, LATER, 10.0, RNG) is Admission.JOIN
    assert state(roster) is State.BEHIND
    assert 10.0 < roster.next_ask(LATER) <= 11.0


def test_an_answer_that_a_decision_has_overtaken_changes_nothing() -> None:
    roster = ready()
    roster.admitted(A, LATER)
    assert roster.answered(A, FRESH, LATER, 0.0, RNG) is Admission.WAIT
    assert roster.ready(0, LATER) == [A]


def test_the_ready_are_those_of_the_stage_at_exactly_the_mark_in_a_fixed_order() -> None:
    roster = roster_with(B, A)
    roster.announced(Replica("c", "1"), 1, 0.0)
    for replica in (B, A, Replica("c", "1")):
        roster.admitted(replica, LATER)
    assert roster.ready(0, LATER) == [A, B]
    assert roster.ready(1, LATER) == [Replica("c", "1")]
    assert roster.ready(0, Mark(Term(2, "trainer"), 3)) == []
    assert [member.replica.peer for member in roster.all()] == ["a", "b", "c"]


def test_the_ready_are_asked_only_when_a_decision_may_have_passed_them_by() -> None:
    roster = ready(FRESH)
    assert roster.to_ask(0.0, FRESH) == []
    assert [member.replica for member in roster.to_ask(0.0, LATER)] == [A]


def test_a_decision_on_its_way_is_question_enough() -> None:
    roster = ready(FRESH)
    roster.asking(A, True)
    assert roster.to_ask(0.0, LATER) == []
    roster.asking(A, False)
    assert [member.replica for member in roster.to_ask(0.0, LATER)] == [A]


def test_the_removed_are_asked_after_a_pause_that_grows() -> None:
    roster = ready()
    pauses = []
    for _ in range(5):
        roster.removed(A, "silent", 100.0, RNG)
        roster.removed(A, "silent", 100.0, RNG)
        assert roster.ready(0, LATER) == []
        pauses.append(roster.next_ask(LATER) - 100.0)
        roster.admitted(A, LATER)
    assert pauses == sorted(pauses)
    assert pauses[-1] > 8 * pauses[0] / 2


def test_a_step_forward_makes_up_for_past_failures() -> None:
    roster = ready()
    for _ in range(5):
        roster.removed(A, "silent", 100.0, RNG)
        roster.admitted(A, LATER)
    roster.admitted(A, Mark(TERM, 4))
    roster.removed(A, "silent", 100.0, RNG)
    assert roster.next_ask(LATER) <= 101.0


def test_who_never_answers_is_forgotten_until_announced_again() -> None:
    roster = roster_with(A)
    for _ in range(GIVEN_UP):
        roster.to_ask(FOREVER, FRESH)
        roster.unanswered(A, "cannot be reached", 0.0, RNG)
        assert note(roster) == "cannot be reached"
    roster.unanswered(A, "cannot be reached", 0.0, RNG)
    assert roster.get(A) is None
    assert roster.announced(A, 0, 1.0) == []
    assert state(roster) is State.ANNOUNCED


def test_a_failed_admission_is_tried_again_after_a_pause() -> None:
    roster = roster_with(A)
    roster.to_ask(0.0, FRESH)
    roster.answered(A, None, FRESH, 0.0, RNG)
    roster.unanswered(A, "the run went on meanwhile", 0.0, RNG)
    assert roster.to_ask(0.0, FRESH) == []
    assert [member.replica for member in roster.to_ask(1.0, FRESH)] == [A]


def test_who_cannot_apply_a_decision_is_behind_and_asked_at_once() -> None:
    roster = ready()
    roster.behind(A, FRESH, 5.0)
    assert state(roster) is State.BEHIND
    assert roster.next_ask(LATER) == 5.0


# -- joining and leaving --------------------------------------------------------------------


def test_one_that_joins_stays_so_with_its_note_until_it_is_at_the_mark() -> None:
    roster = roster_with(A)
    roster.to_ask(0.0, LATER)
    assert roster.answered(A, None, LATER, 0.0, RNG) is Admission.JOIN
    roster.joining(A, "downloading: 40%")
    assert roster.answered(A, FRESH, LATER, 10.0, RNG) is Admission.JOIN
    assert (state(roster), note(roster)) == (State.JOINING, "downloading: 40%")
    assert roster.ready(0, LATER) == []
    assert roster.answered(A, LATER, LATER, 20.0, RNG) is Admission.RESET
    roster.admitted(A, LATER)
    assert (state(roster), note(roster)) == (State.READY, "")


def test_one_that_has_news_is_asked_at_once() -> None:
    roster = roster_with(A)
    roster.answered(A, None, LATER, 0.0, RNG)
    assert roster.to_ask(0.1, LATER) == []
    roster.ask_soon(A, 0.1)
    assert [member.replica for member in roster.to_ask(0.1, LATER)] == [A]


def test_one_replica_of_a_stage_leaves_at_a_time() -> None:
    c = Replica("c", "1")
    roster = roster_with(A, B, c)
    for replica in (A, B, c):
        roster.admitted(replica, LATER)
    assert roster.leave(A, LATER) == ""
    assert roster.leave(A, LATER) == "", "the same answer to who asks again"
    assert roster.leave(B, LATER) == "another replica of its stage is leaving"
    assert roster.ready(0, LATER) == [A, B, c]
    assert roster.serving(0, LATER) == [B, c]
    roster.forget(A)
    assert roster.leave(B, LATER) == ""
    assert roster.leave(c, LATER) == "another replica of its stage is leaving"


def test_the_last_of_a_stage_does_not_leave_however_many_others_are_not_ready() -> None:
    roster = roster_with(A, B)
    roster.announced(Replica("c", "1"), 1, 0.0)
    roster.admitted(A, LATER)
    roster.admitted(B, FRESH)
    roster.admitted(Replica("c", "1"), LATER)
    assert roster.leave(A, LATER) == "no other replica of its stage is there"
    assert roster.serving(0, LATER) == [A]
    roster.admitted(B, LATER)
    assert roster.leave(A, LATER) == ""


def test_if_all_others_are_lost_meanwhile_the_one_that_leaves_gets_work_again() -> None:
    roster = roster_with(A, B)
    roster.admitted(A, LATER)
    roster.admitted(B, LATER)
    assert roster.leave(A, LATER) == ""
    roster.removed(B, "silent", 1.0, RNG)
    assert roster.serving(0, LATER) == [A]


LAST = Mark(TERM, 4)


def test_the_first_to_apply_the_step_gets_no_work_while_its_mates_apply_it_too() -> None:
    roster = roster_with(A, B)
    roster.admitted(A, LATER)
    roster.admitted(B, LATER)
    assert roster.leave(A, LATER) == ""
    roster.admitted(A, LAST)
    for marks in ((LATER, LAST), (LAST,)):  # other stages have not applied it yet; they have
        assert roster.leave(A, *marks, done=True) == "its mates have not applied the step yet"
    roster.admitted(B, LAST)
    assert roster.serving(0, LAST) == [B]
    assert roster.leave(A, LAST, done=True) == ""


def test_no_other_leaves_either_while_they_apply_the_step() -> None:
    c = Replica("c", "1")
    roster = roster_with(A, B, c)
    for replica in (A, B, c):
        roster.admitted(replica, LATER)
    assert roster.leave(A, LATER) == ""
    for replica in (B, c):
        roster.admitted(replica, LAST)
    assert roster.leave(B, LAST) == "another replica of its stage is leaving"


def test_one_that_stays_after_all_gets_work_again() -> None:
    roster = roster_with(A, B)
    roster.admitted(A, LATER)
    roster.admitted(B, LATER)
    assert roster.leave(A, LATER) == ""
    roster.stays(A)
    assert roster.serving(0, LATER) == [A, B]
    assert roster.leave(B, LATER) == ""


def test_who_has_no_part_in_the_step_may_go_at_once() -> None:
    roster = roster_with(A, B)
    roster.admitted(A, LATER)
    assert roster.leave(B, LATER) == ""
    assert roster.leave(Replica("x", "1"), LATER) == ""
    assert roster.leave(A, LATER) == "no other replica of its stage is there"


@pytest.mark.parametrize(
    "event",
    [
        "unanswered",
        "admitted",
        "behind",
        "removed",
        "asking",
        "joining",
        "ask soon",
        "leave",
        "stays",
    ],
)
def test_what_is_told_of_one_that_was_forgotten_is_ignored(event: str) -> None:
    roster = ready()
    roster.forget(A)
    match event:
        case "unanswered":
            roster.unanswered(A, "late", 0.0, RNG)
        case "admitted":
            roster.admitted(A, LATER)
        case "behind":
            roster.behind(A, FRESH, 0.0)
        case "removed":
            roster.removed(A, "late", 0.0, RNG)
        case "asking":
            roster.asking(A, True)
        case "joining":
            roster.joining(A, "late")
        case "ask soon":
            roster.ask_soon(A, 0.0)
        case "leave":
            assert roster.leave(A, LATER) == ""
        case "stays":
            roster.stays(A)
    assert roster.answered(A, LATER, LATER, 0.0, RNG) is Admission.WAIT
    assert roster.all() == []


def test_what_the_directory_still_shows_of_one_that_has_left_is_old_news() -> None:
    roster = Roster(Backoff(1.0))
    roster.announced(A, 0, 0.0)
    roster.forget(A, 1.0)
    assert roster.announced(A, 0, 2.0) == []
    assert roster.all() == []
    roster.announced(A, 0, 1.0 + OLD_NEWS_S)
    assert [member.replica for member in roster.all()] == [A]


def test_who_was_asked_is_not_asked_again_before_a_pause_whatever_came_of_it() -> None:
    roster = Roster(Backoff(1.0))
    roster.announced(A, 0, 0.0)
    assert [member.replica for member in roster.to_ask(0.0, FRESH)] == [A]
    roster.asking(A, False)  # the answer was of no use
    assert roster.to_ask(0.5, FRESH) == []
    assert roster.next_ask(FRESH) == 1.0
    assert [member.replica for member in roster.to_ask(1.0, FRESH)] == [A]
