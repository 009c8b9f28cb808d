"""The trainer dies, or all die: a standby, or a resumed coordinator, goes on with the same run."""

from __future__ import annotations

import json
import signal

import pytest
from safetensors.torch import load_file

from peers.export import export_model
from tests.multiprocess.support import metrics, wait_for_step
from tests.multiprocess.volunteers import (
    BRISK,
    assert_quiet,
    assert_same_losses,
    counted,
    doomed,
    kill,
    peer_of,
    reference_of,
    volunteers,
)

STEPS, EVERY = 16, 4
STAGES, MICROBATCHES = 2, 8


def swarm(replicas=1):
    start = f"[start]\nreplicas = {replicas}\n"
    return volunteers(stages=STAGES, steps=STEPS, more=start + BRISK, checkpoint_every=EVERY)


@pytest.fixture(scope="module")
def reference():
    """Of all runs here, since they train the same."""
    with swarm() as one:
        yield reference_of(one.folder, one.manifest, STEPS)


def of_both(first, second):
    """The steps of two trainers; the second may tell the last one of the first again."""
    overlap = [line for line in first if line["step"] >= second[0]["step"]]
    assert len(overlap) <= 1, (first, second)
    return [*first[: len(first) - len(overlap)], *second]


def assert_all_counted(directory, nodes):
    """Each microbatch of each step once in each stage; the nodes say the same of themselves."""
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["complete"]
    assert len(summary["microbatches_by_peer"]) == STAGES
    by_peer: dict[str, int] = {}
    for counts in summary["microbatches_by_peer"]:
        assert sum(counts.values()) == STEPS * MICROBATCHES
        by_peer |= counts
    for node in nodes:
        microbatches, samples = counted(node)
        assert microbatches == by_peer.get(peer_of(node), 0)
        assert samples == 4 * microbatches


MOMENTS = {
    "while microbatches fly": (1, "forward", 3 * MICROBATCHES + 4),
    "when one stage has prepared": (1, "prepare", 4 * STAGES + 1),
    "when one of four has heard the decision": (2, "decide", 5 * 2 * STAGES + 1),
}
"""Replicas of each stage, and the trainer's last message."""


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_standby_takes_over(moment, reference):
    replicas, kind, n = MOMENTS[moment]
    with swarm(replicas) as here:
        lead = here.coordinator("--trainer", here.peer_id("second"), program=doomed(kind, n))
        nodes = [here.node(f"node-{i}", i % STAGES) for i in range(replicas * STAGES)]
        out = here.folder / "standby"
        words = ("coordinator", "--standby", "--join", here.join, "--out", out)
        standby = here.start(*words, name="second")
        assert lead.wait() == -signal.SIGKILL
        assert 3 <= len(metrics(here.out)) <= 6
        standby.succeed()
        for node in nodes:
            node.succeed()
        assert "taking over (term 2)" in standby.out
        assert_same_losses(of_both(metrics(here.out), metrics(out)), reference)
        assert_all_counted(out, nodes)
        assert_quiet(standby, *nodes)
        export_model(out, here.folder / "model")
        whole = load_file(here.folder / "model" / "model.safetensors")
        for stage in range(STAGES):
            assert load_file(out / f"stage-{stage}.safetensors").keys() <= whole.keys()


def test_a_run_goes_on_when_all_have_died(reference):
    with swarm() as here:
        lead = here.coordinator()
        nodes = [here.node(f"node-{stage}", stage) for stage in range(STAGES)]
        wait_for_step(lead, here.out, EVERY + 1)
        lead.wait_until_says(f"checkpoint of step {EVERY} written")
        kill(*nodes, lead)
        before = len(metrics(here.out))
        assert before < STEPS
        again = here.coordinator("--resume", here.out, name="again")
        nodes = [here.node(f"fresh-{stage}", stage) for stage in range(STAGES)]
        again.succeed()
        for node in nodes:
            node.succeed()
        step = int(again.out.partition("goes back to the checkpoint of step ")[2].split()[0])
        assert EVERY <= step <= before
        assert f"the run goes on from step {step}" in again.out
        assert len(metrics(here.out)) == STEPS
        assert_same_losses(metrics(here.out), reference)
        assert_all_counted(here.out, nodes)
        assert_quiet(again, *nodes)


def test_a_stage_that_is_lost_comes_back_from_the_checkpoint(reference):
    with swarm() as here:
        lead = here.coordinator()
        nodes = [here.node("stays", 0), here.node("lost", 1)]
        wait_for_step(lead, here.out, EVERY + 1)
        lead.wait_until_says(f"checkpoint of step {EVERY} written")
        kill(nodes.pop())
        assert len(metrics(here.out)) < STEPS
        nodes.append(here.node("fresh", 1))
        lead.succeed()
        for node in nodes:
            node.succeed()
        assert "goes back to the checkpoint of step" in lead.out
        assert len(metrics(here.out)) == STEPS
        assert_same_losses(metrics(here.out), reference)
        assert_all_counted(here.out, nodes)
        assert_quiet(lead, *nodes)
