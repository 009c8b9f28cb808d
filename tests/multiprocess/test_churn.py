"""Volunteers join, leave, die, freeze and come back in the middle of one run, and nothing shows.

The tests share a living swarm of one replica a stage; each brings a volunteer of its own. The
last looks at the losses and the counts of all of it.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field

import pytest

from tests.multiprocess.support import Command, metrics, run
from tests.multiprocess.volunteers import (
    Volunteers,
    assert_quiet,
    assert_same_losses,
    counted,
    doomed,
    peer_of,
    reference_of,
    volunteers,
    wait_until_admitted,
    wait_until_left,
)

STAGES, MICROBATCHES, MICROBATCH = 2, 8, 4
FOR_EVER = 100_000
PERIODS = """
[periods]
announce_s = 0.5
record_ttl_s = 6
watch_s = 0.3
call_s = 2
attempt_s = 3
silence_s = 2
lease_s = 5
"""
"""A frozen node is removed soon. That a slow one is too, at times, is part of the game."""


@dataclass
class Living:
    """A run that goes on, and what has left it: peer id -> microbatches it says it has counted."""

    here: Volunteers
    lead: Command
    stay: list[Command]
    left: dict[str, int] = field(default_factory=dict)

    def volunteer(self, name: str, stage: int, **options) -> tuple[Command, str]:
        """One that has joined and counts; and its peer id."""
        node = self.here.node(name, stage, **options)
        peer = wait_until_admitted(self.lead, node, stage)
        self.here.wait_until_shared(self.lead, stage, 2)
        return node, peer

    def leaves(self, node: Command, peer: str, stage: int) -> None:
        """After one Ctrl-C it goes in good order."""
        node.signal_group(signal.SIGINT)
        node.succeed()
        assert "finished: left after step" in node.out
        assert node.living() == []
        microbatches, samples = counted(node)
        assert samples == MICROBATCH * microbatches
        assert microbatches > 0
        self.left[peer] = microbatches
        wait_until_left(self.lead, peer, stage)
        self.here.wait_for_steps(self.lead, 1)


@pytest.fixture(scope="module")
def living():
    with volunteers(stages=STAGES, steps=FOR_EVER, more=PERIODS) as here:
        lead = here.coordinator()
        stay = [here.node(f"stays-{stage}", stage) for stage in range(STAGES)]
        here.wait_for_steps(lead, 1)
        yield Living(here, lead, stay)


def test_a_volunteer_joins_says_what_it_does_and_leaves(living):
    node = living.here.start("node", "--join", living.here.join, name="late")
    words = node.wait_until_says("chose stage ").partition("chose stage ")[2]
    stage = int(words.partition(":")[0])
    peer = wait_until_admitted(living.lead, node, stage)
    living.here.wait_until_shared(living.lead, stage, 2)
    copies = f"this replica has no weights yet: it copies the state of stage {stage} from 1 replica"
    assert copies in node.out
    assert node.out.index(copies) < node.out.index(f"serves stage {stage} from step")
    living.leaves(node, peer, stage)


def test_one_that_left_at_once_is_accepted_again(living):
    node, peer = living.volunteer("hasty", 0)
    living.lead.process.send_signal(signal.SIGSTOP)  # so that nobody lets it go
    node.signal_group(signal.SIGINT)
    node.wait_until_says("leaving: the step under way is finished first")
    node.signal_group(signal.SIGINT)
    assert node.wait() == 130
    living.lead.process.send_signal(signal.SIGCONT)
    assert node.living() == []
    again = living.here.node("hasty-again", 0, key="hasty")
    again.wait_until_says(peer)
    again.wait_until_says("serves stage 0 from step")
    living.here.wait_until_shared(living.lead, 0, 2)
    living.leaves(again, peer, 0)


def test_one_killed_between_forward_and_backward(living):
    """That it has computed the forward is all that is known of it, and not even told."""
    node = living.here.node("doomed", 0, program=doomed("computed", 12))
    assert node.wait() == -signal.SIGKILL
    assert "serves stage 0 from step" in node.out
    living.here.wait_for_steps(living.lead, 2)


def test_one_that_was_frozen_counts_again(living):
    node, peer = living.volunteer("frozen", 1)
    node.process.send_signal(signal.SIGSTOP)
    living.lead.wait_until_says(f"{peer[-6:]} (stage 1) was removed: ")
    living.here.wait_for_steps(living.lead, 2)
    node.process.send_signal(signal.SIGCONT)
    living.here.wait_until_shared(living.lead, 1, 2)
    living.leaves(node, peer, 1)


def test_all_of_it_counted_once_and_equals_one_process(living):
    """Last: it ends the run."""
    here, lead = living.here, living.lead
    lead.signal_group(signal.SIGINT)
    assert lead.wait() == 130
    lines = metrics(here.out)
    summary = json.loads((here.out / "summary.json").read_text())
    by_stage = summary["microbatches_by_peer"]
    assert [sum(counts.values()) for counts in by_stage] == STAGES * [MICROBATCHES * len(lines)]

    node = peer_of(living.stay[0])
    known = json.loads((here.out / "peers.json").read_text())
    (address,) = [address for address in known if address.endswith(node)]
    ended = run(here.folder, "status", "--json", "--join", address, name="status")
    assert ended.code == 0, ended
    status = json.loads(ended.out)
    samples: dict[str, int] = {}
    for stage in status["stages"]:
        for replica in stage["replicas"]:
            peer = replica["peer"]
            samples[peer] = samples.get(peer, 0) + replica["samples"]
        assert stage["samples"] == MICROBATCH * MICROBATCHES * stage["mark"]["step"]
        assert sum(r["samples"] for r in stage["replicas"]) == stage["samples"]
    for peer, microbatches in living.left.items():
        assert sum(counts.get(peer, 0) for counts in by_stage) == microbatches
        assert samples[peer] == MICROBATCH * microbatches

    assert_quiet(lead, *living.stay)
    assert_same_losses(lines, reference_of(here.folder, here.manifest, len(lines)))
