"""A report says what a look has shown: where the run is, who does what, and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht.identity import Identity
from dht.records import PeerRecord, PeerState, TrainerRecord, TrainerState
from peers import messages as msg
from peers.lookout import Sight
from peers.report import Report, as_json
from peers.reporting import make_report
from swarm.manifest import Manifest
from swarm.types import FRESH, Mark, Replica, Term


def peer_id(number: int) -> str:
    return Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))).peer_id


A, B, C, D, E = (Replica(peer_id(n), f"{n:016x}") for n in range(1, 6))
TRAINER, OTHER = peer_id(11), peer_id(12)
TERM = Term(3, "ab" * 8)
MARK = Mark(TERM, 41)
NEXT = Mark(TERM, 42)
MANIFEST = Manifest.from_tree(
    {
        "name": "small",
        "trainers": [TRAINER, OTHER],
        "stages": {"count": 2},
        "batch": {"microbatch": 4, "microbatches": 8},
        "start": {"replicas": 2},
    }
)
TOTALS = {A.peer: 200, B.peer: 100, E.peer: 28}


def status(
    stage: int,
    mark: Mark | None = MARK,
    *,
    boot: str = "aa",
    totals: Mapping[str, int] | None = None,
    counts: Mapping[str, int] | None = None,
    **fields: object,
) -> msg.Status:
    detail = msg.Detail(
        last_work_s=fields.pop("last_work_s", 0.5),
        why=fields.pop("why", ""),
        loss=2.5,
        totals=dict(totals or {}),
        counts=dict(counts or {}),
        version="0.1.0",
    )
    common = {
        "boot": boot,
        "role": "node",
        "state": "ready",
        "term": TERM.number,
        "term_boot": TERM.boot,
        "trainer": TRAINER,
        "quiet_s": 1.0,
        "detail": detail,
    }
    return msg.Status.model_validate({**common, "stage": stage, "mark": mark, **fields})


def leading(mark: Mark = MARK, *, term: int = TERM.number, why: str = "") -> msg.Status:
    return msg.Status(
        boot="bb",
        role="trainer",
        mark=mark,
        term=term,
        state="training",
        detail=msg.Detail(why=why),
    )


def announced(peer: str, state: TrainerState, *, term: int = 3, step: int = 40) -> TrainerRecord:
    return TrainerRecord(
        peer=peer, run_id=MANIFEST.run_id, boot="ab" * 8, term=term, state=state, step=step
    )


def sight(
    statuses: Mapping[Replica, msg.Status],
    *,
    silent: Mapping[Replica, tuple[int, str]] | None = None,
    trainers: Mapping[str, tuple[TrainerRecord, msg.Status | None]] | None = None,
) -> Sight:
    """What a look shows: who answered, who did not, and the trainer, which answers by default."""
    found = Sight(statuses=dict(statuses))
    found.stages = {replica: each.stage or 0 for replica, each in statuses.items()}
    for replica, (stage, why) in (silent or {}).items():
        found.stages[replica], found.silent[replica] = stage, why
        found.announced[replica] = PeerRecord(
            peer=replica.peer,
            run_id=MANIFEST.run_id,
            boot=replica.boot,
            stage=stage,
            state=PeerState.READY,
            mark=MARK,
            version="0.1.0",
            sequence=1,
        )
    if trainers is None:
        trainers = {TRAINER: (announced(TRAINER, TrainerState.TRAINING), leading())}
    for peer, (record, answer) in trainers.items():
        found.trainers.append(record)
        if answer is not None:
            found.trainer_statuses[peer] = answer
    return found


HEALTHY = {
    A: status(0, totals=TOTALS, counts={A.peer: 6, B.peer: 2}),
    B: status(0, totals=TOTALS, counts={A.peer: 6, B.peer: 2}),
    C: status(1, totals={C.peer: 328}, counts={C.peer: 8}),
    D: status(1, totals={C.peer: 328}, counts={C.peer: 8}),
}


def report(*args, **options) -> Report:
    return make_report(sight(*args, **options), MANIFEST)


def test_a_healthy_run_has_a_step_shares_samples_and_no_warning() -> None:
    found = report(HEALTHY)
    assert found.mark == MARK
    assert (found.state, found.leader, found.term) == ("training", TRAINER, 3)
    assert (found.loss, found.batch, found.quiet_s) == (2.5, 32, 1.0)
    assert found.note == ""
    assert found.warnings == ()
    rows = {replica.peer: replica for replica in found.stages[0].replicas}
    assert rows[A.peer].share == 0.75
    assert rows[B.peer].share == 0.25
    assert rows[A.peer].samples == 800
    assert rows[A.peer].last_work_s == 0.5
    rows = {replica.peer: replica for replica in found.stages[1].replicas}
    assert rows[D.peer].share == 0.0
    assert rows[D.peer].samples == 0


def test_all_that_was_counted_is_listed_whoever_has_left() -> None:
    found = report(HEALTHY)
    for stage in found.stages:
        assert stage.samples == 41 * found.batch == sum(r.samples for r in stage.replicas)
    (gone,) = found.stages[0].of_state("gone")
    assert (gone.peer, gone.boot, gone.samples, gone.mark) == (E.peer, "", 112, None)


def test_one_who_moved_says_where_it_serves_now() -> None:
    moved = {**HEALTHY, E: status(1, totals={C.peer: 328}, counts={C.peer: 8})}
    (gone,) = report(moved).stages[0].of_state("gone")
    assert gone.why == "serves stage 1 now"


@pytest.mark.parametrize(
    ("marks", "step", "note"),
    [
        (
            (NEXT, MARK, MARK, MARK),
            41,
            "stage 0 is at step 42, stage 1 at step 41: applying a decision",
        ),
        ((NEXT, MARK, MARK, NEXT), 42, ""),
        (
            (Mark(TERM, 45), MARK, MARK, MARK),
            41,
            "stage 0 is at step 45, stage 1 at step 41: they have to be brought together",
        ),
        (
            (MARK, MARK, Mark(Term(4, "cd" * 8), 41), MARK),
            41,
            "stage 0 is at step 41 of term 3, stage 1 at step 41 of term 4: "
            "they have to be brought together",
        ),
    ],
)
def test_the_step_is_the_one_that_every_stage_has_reached(marks, step: int, note: str) -> None:
    pairs = zip(HEALTHY, (0, 0, 1, 1), marks, strict=True)
    found = report({replica: status(stage, mark) for replica, stage, mark in pairs})
    assert found.mark is not None
    assert found.mark.t == step
    assert found.note == note


def test_several_stages_at_one_mark_are_named_together() -> None:
    manifest = MANIFEST.changed({"stages.count": 4})
    look = sight({A: status(0), B: status(1, NEXT), C: status(2), D: status(3)})
    note = make_report(look, manifest).note
    assert note == "stage 1 is at step 42, the others at step 41: applying a decision"


def test_the_silent_are_told_with_the_reason_and_what_they_counted() -> None:
    look = {replica: each for replica, each in HEALTHY.items() if replica != B}
    found = report(look, silent={B: (0, "no stream: dial failed")})
    (silent,) = found.stages[0].of_state("silent")
    assert (silent.peer, silent.samples, silent.mark) == (B.peer, 400, None)
    assert found.mark == MARK
    one_left, why = found.warnings
    assert one_left == "stage 0 has one replica left"
    assert why == (
        f"stage 0: {B.peer[-6:]} is announced as ready at step 41, but does not answer: "
        "no stream: dial failed"
    )


def test_who_said_that_it_goes_is_gone_when_it_answers_no_more() -> None:
    """A node that moves builds its new stage before it announces that."""
    look = sight(
        {replica: each for replica, each in HEALTHY.items() if replica != B},
        silent={B: (0, "this peer has left the run")},
    )
    record = look.announced[B]
    look.announced[B] = record.model_copy(update={"state": PeerState.DRAINING})
    found = make_report(look, MANIFEST)
    gone = {replica.peer: replica.samples for replica in found.stages[0].of_state("gone")}
    assert gone == {B.peer: 400, E.peer: 112}
    assert found.stages[0].of_state("silent") == []
    assert found.warnings == ("stage 0 has one replica left",)


def test_a_stage_that_nobody_serves_leaves_the_run_without_a_step() -> None:
    look = {A: HEALTHY[A], B: HEALTHY[B], C: status(1, None, state="joining", why="at 40%")}
    found = report(look)
    assert found.mark is None
    assert found.stages[1].mark is None
    assert found.stages[1].replicas[0].why == "at 40%"
    (warning,) = found.warnings
    assert warning == (
        f"stage 1 has no replica with the run's weights ({C.peer[-6:]} joining): "
        "the run waits for one"
    )


def test_joiners_and_those_behind_do_not_set_the_step_but_are_told() -> None:
    behind = status(1, Mark(TERM, 38))
    found = report({**HEALTHY, D: behind, E: status(0, None, state="waiting")})
    assert found.mark == MARK
    assert found.warnings == (
        f"stage 0: no trainer has told {E.peer[-6:]} to join yet",
        f"stage 1: {D.peer[-6:]} is at step 38, 3 steps behind",
    )


def test_weights_of_another_timeline_are_told() -> None:
    other = Mark(Term(2, "cd" * 8), 77)
    found = report({**HEALTHY, D: status(1, other)})
    assert found.mark == MARK
    (warning,) = found.warnings
    assert "step 77 of term 2, others have those of step 41 of term 3" in warning


def test_one_step_behind_is_a_decision_on_its_way() -> None:
    assert report({**HEALTHY, A: status(0, NEXT), C: status(1, NEXT)}).warnings == ()


def test_a_swarm_that_has_not_begun_waits_for_what_the_trainer_lacks() -> None:
    why = "waits for ready replicas: stage 1 has 0 of 2"
    waiting = announced(TRAINER, TrainerState.WAITING, step=0)
    found = report(
        {A: status(0, None, state="waiting")},
        trainers={TRAINER: (waiting, leading(FRESH, why=why))},
    )
    assert (found.state, found.mark, found.loss) == ("waiting", None, None)
    assert found.warnings == (
        f"the trainer {TRAINER[-6:]}: {why}",
        "stage 1 has no replica yet",
    )


def test_a_run_whose_replicas_are_all_out_of_reach_has_begun_all_the_same() -> None:
    found = report({}, silent={A: (0, "dial failed")})
    assert found.begun
    assert found.mark is None
    assert found.warnings[0].startswith("stage 0 has no replica with the run's weights")
    assert found.warnings[-1] == (
        "stage 1 has no replica with the run's weights: the run waits for one"
    )


# -- trainers -----------------------------------------------------------------------------------

STANDBY = announced(OTHER, TrainerState.STANDBY, term=0, step=0)
LED = announced(TRAINER, TrainerState.TRAINING)


def quiet(seconds: float | None) -> dict[Replica, msg.Status]:
    return {
        replica: each.model_copy(update={"quiet_s": seconds}) for replica, each in HEALTHY.items()
    }


def test_standbys_are_named_and_do_not_lead() -> None:
    found = report(HEALTHY, trainers={TRAINER: (LED, leading()), OTHER: (STANDBY, None)})
    assert [(t.peer, t.state, t.leads) for t in found.trainers] == [
        *sorted([(TRAINER, "training", True), (OTHER, "standby", False)])
    ]
    assert found.leader == TRAINER
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("trainers", "words"),
    [
        ({}, "no standby is announced"),
        ({TRAINER: (LED, None)}, "no standby is announced"),
        ({TRAINER: (LED, None), OTHER: (STANDBY, None)}, "a standby is there to take over"),
    ],
)
def test_a_dead_trainer_is_told_by_the_nodes_that_are_left(trainers, words: str) -> None:
    found = report(quiet(34.2), trainers=trainers)
    assert (found.state, found.leader, found.quiet_s) == ("leaderless", "", 34.2)
    assert found.mark == MARK
    assert found.term == 3
    assert found.warnings == (f"no replica has heard a trainer for 34 s; {words}",)
    assert {t.peer: t.state for t in found.trainers}[TRAINER] == "silent"


def test_a_trainer_that_only_the_replicas_hear_leads() -> None:
    found = report(quiet(2.0), trainers={TRAINER: (LED, None)})
    assert (found.state, found.leader) == ("training", TRAINER)
    (warning,) = found.warnings
    assert warning == (f"the trainer {TRAINER[-6:]}: announced as training, but does not answer")


def test_a_peer_that_the_manifest_does_not_name_is_no_trainer() -> None:
    look = {
        replica: each.model_copy(update={"trainer": A.peer}) for replica, each in HEALTHY.items()
    }
    found = report(look, trainers={})
    assert found.trainers == ()
    assert found.state == "leaderless"


def test_of_two_that_lead_the_higher_term_counts() -> None:
    second = announced(OTHER, TrainerState.TRAINING, term=4)
    both = {TRAINER: (LED, leading()), OTHER: (second, leading(term=4))}
    found = report(HEALTHY, trainers=both)
    assert (found.leader, found.term) == (OTHER, 4)
    (warning,) = found.warnings
    assert warning.startswith("more than one trainer leads: ")


def test_a_trainer_that_answers_but_that_no_replica_hears_is_cut_off() -> None:
    found = report(quiet(40.0))
    assert found.leader == TRAINER
    assert found.warnings == ("no replica has heard a trainer for 40 s; no standby is announced",)


def test_a_run_that_is_done_has_nothing_wrong() -> None:
    over = announced(TRAINER, TrainerState.DONE, step=100)
    found = report({}, trainers={TRAINER: (over, None)})
    assert found.state == "done"
    assert found.warnings == ()


# -- JSON ---------------------------------------------------------------------------------------

KEYS = {
    "report": {
        *("run", "name", "state", "step", "steps", "mark", "note", "loss", "batch", "leader"),
        *("term", "quiet_s", "trainers", "stages", "warnings"),
    },
    "trainer": {"peer", "state", "term", "step", "leads", "why"},
    "stage": {"stage", "mark", "samples", "replicas"},
    "replica": {
        *("peer", "boot", "state", "mark", "share", "samples", "last_work_s", "why", "queued"),
        *("samples_per_s", "quiet_s", "version"),
    },
}


def test_the_keys_of_the_document_are_these_and_a_change_is_a_decision() -> None:
    document = json.loads(json.dumps(as_json(report(HEALTHY)), allow_nan=False))
    assert set(document) == KEYS["report"]
    assert set(document["trainers"][0]) == KEYS["trainer"]
    assert document["mark"] == {"term": 3, "boot": TERM.boot, "step": 41}
    for stage in document["stages"]:
        assert set(stage) == KEYS["stage"]
        for replica in stage["replicas"]:
            assert set(replica) == KEYS["replica"]
    assert document["step"] == 41
    assert document["leader"] == TRAINER


def test_what_a_replica_can_do_is_told_as_it_announces_it() -> None:
    found = sight({A: status(0), C: status(1)})
    for replica, speed in ((A, 12.5), (C, 0.0)):
        found.announced[replica] = PeerRecord(
            peer=replica.peer,
            run_id=MANIFEST.run_id,
            boot=replica.boot,
            stage=0,
            state=PeerState.READY,
            samples_per_s=speed,
            version="0.1.0",
        )
    first, second = make_report(found, MANIFEST).stages
    assert first.replicas[0].samples_per_s == 12.5
    assert second.replicas[0].samples_per_s is None, "it has measured nothing yet"


def test_what_is_not_known_is_null() -> None:
    document = as_json(report({A: status(0, None, quiet_s=None, last_work_s=None)}, trainers={}))
    for key in ("step", "mark", "loss", "leader", "quiet_s"):
        assert document[key] is None
    (replica,) = document["stages"][0]["replicas"]  # type: ignore[index]
    for key in ("mark", "share", "last_work_s", "quiet_s"):
        assert replica[key] is None
