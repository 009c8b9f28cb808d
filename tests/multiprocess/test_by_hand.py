"""A swarm put together by hand: a coordinator, and nodes that choose their stage and leave."""

import os
import signal

import pytest

from tests.multiprocess.support import (
    Command,
    assert_equals_reference,
    command_line,
    metrics,
    running,
    scratch,
    wait_for_step,
    write_manifest,
)

LIMIT_S = 10.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@pytest.fixture
def folder():
    with scratch() as path:
        yield path


def coordinator(folder, manifest):
    out = folder / "out"
    return running(
        folder, "coordinator", manifest, "--out", out, "--listen", LOOPBACK, name="coordinator"
    )


def join_line(command: Command) -> list[str]:
    """What a volunteer pastes, less the word ``swarm``."""
    line = next(line for line in command.wait_until_says("--join").splitlines() if "--join" in line)
    words = line.split()
    assert words[:2] == ["swarm", "node"]
    return words[1:]


def node(folder, join, name):
    """A volunteer with a key of its own and no wish for a stage."""
    key = folder / f"{name}.key"
    return running(folder, *join, "--listen", LOOPBACK, "--identity", key, name=name)


def test_two_volunteers_train_two_stages(folder):
    manifest = write_manifest(folder, stages=2, steps=3)
    with coordinator(folder, manifest) as lead:
        join = join_line(lead)
        with node(folder, join, "first") as first:
            stage = int(first.wait_until_says("waits for a trainer").partition("stage ")[2][0])
            with node(folder, join, "second") as second:
                other = 1 - stage
                second.wait_until_says(f"stage {other}:")
                lead.succeed()
                first.succeed()
                second.succeed()
                assert "finished: the run is complete" in first.out
                assert f"serves stage {other} from the initial weights" in second.out
        for command in (lead, first, second):
            assert command.living() == []
            assert command.socket_folders() == []
    assert_equals_reference(folder, folder / "out")


def test_one_who_is_late_joins_and_one_who_leaves_is_not_missed(folder):
    steps = 100_000
    manifest = write_manifest(folder, stages=1, steps=steps, more="[start]\nreplicas = 2\n")
    out = folder / "out"
    with coordinator(folder, manifest) as lead:
        join = join_line(lead)
        with node(folder, join, "one") as one, node(folder, join, "two"):
            wait_for_step(lead, out, 1)
            with node(folder, join, "late") as late:
                late.wait_until_says("it copies the state of stage 0")
                late.wait_until_says("serves stage 0 from step")
                lead.wait_until(
                    lambda: any(line["replicas"] == [3] for line in metrics(out)),
                    "a step counts in all three replicas",
                )
                one.signal_group(signal.SIGINT)
                one.succeed()
                assert "left after step" in one.out
                assert one.living() == []
                done = len(metrics(out))
                wait_for_step(lead, out, done + 3)
                lead.signal_group(signal.SIGINT)
                assert lead.wait(LIMIT_S) == 130, lead.said
                assert lead.living() == []
                assert "--resume" in lead.out
    assert metrics(out)[-1]["replicas"] == [2]
    assert sum(line["resent"] for line in metrics(out)) == 0


def test_a_node_without_its_network_daemon_ends_and_one_without_coordinator_may_leave(folder):
    manifest = write_manifest(folder, stages=1, steps=100_000, more="[start]\nreplicas = 2\n")
    out = folder / "out"
    with coordinator(folder, manifest) as lead:
        join = join_line(lead)
        with node(folder, join, "one") as one, node(folder, join, "two") as two:
            wait_for_step(lead, out, 1)
            (daemon,) = [pid for pid in one.living() if "p2pd" in command_line(pid)[0]]
            os.kill(daemon, signal.SIGKILL)
            assert one.wait(LIMIT_S) == 1
            assert "no peer can be reached any more" in one.err, one.err
            assert "Traceback" not in one.err
            lead.process.send_signal(signal.SIGINT)
            assert lead.wait(LIMIT_S) == 130
            assert two.process.poll() is None, "it waits for a trainer"
            two.signal_group(signal.SIGINT)
            two.succeed(LIMIT_S)
            assert "the trainer cannot be asked" in two.out
