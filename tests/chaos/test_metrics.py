"""Metrics of a run and of a node, on virtual time: what was done is what they say."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from peers.metrics import NodeMetrics, RunMetrics
from peers.status import Monitor
from peers.steps import StepDone
from tests.chaos.harness import World, digits_manifest, run_world

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(metrics: RunMetrics | NodeMetrics) -> Samples:
    """Value by name and labels, as a scraper reads them."""
    text = generate_latest(metrics.registry).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_what_was_done_and_who_is_gone_has_no_line():
    found: list[Samples] = []
    monitor = Monitor()
    run, node = RunMetrics(monitor), NodeMetrics()
    peers: list[str] = []

    async def train(world: World, steps: int) -> None:
        await world.train(steps)
        for done in world.done[-steps:]:
            monitor.step_done(done)

    async def scenario(world: World) -> None:
        monitor.attach(world.trainer)
        world.trainer.on_step = monitor.step_done
        await world.start_all(2)
        node.watch(world.of_stage(0)[0].node)
        first = world.of_stage(1)[0]
        peers.append(first.node.me.peer)
        await train(world, 3)
        found.append(scraped(run))
        await world.kill(first)
        await train(world, 2)
        found.extend((scraped(run), scraped(node)))

    run_world(digits_manifest(), scenario)
    before, after, of_node = found
    batch = digits_manifest().batch
    assert before["swarm_samples_total", ()] == 3 * batch.microbatches * batch.microbatch
    assert (before["swarm_step", ()], after["swarm_step", ()]) == (3, 5)
    assert before["swarm_replicas", (("stage", "1"), ("state", "ready"))] == 2
    assert after["swarm_replicas", (("stage", "1"), ("state", "ready"))] == 1
    assert after["swarm_step_seconds_count", ()] == 5
    assert after["swarm_loss", ()] > 0
    assert after["swarm_microbatches_resent_total", ()] >= 0
    line = ("swarm_replica_samples_per_second", (("peer", peers[0]), ("stage", "1")))
    assert line in before
    assert line not in after
    assert of_node["swarm_node_stage", ()] == 0
    assert of_node["swarm_node_step", ()] == 5
    assert of_node["swarm_node_microbatches_total", ()] > 0
    passes = of_node["swarm_node_passes_total", ()]
    assert of_node["swarm_node_pass_seconds_count", ()] == passes > 0


def test_before_there_is_a_run_there_are_counters_at_zero():
    found = scraped(RunMetrics(Monitor()))
    assert found["swarm_samples_total", ()] == 0
    assert ("swarm_step", ()) not in found
    node = scraped(NodeMetrics())
    assert ("swarm_node_stage", ()) not in node
    assert node["process_open_fds", ()] > 0


def test_a_step_that_another_trainer_timed_is_counted_but_not_timed():
    metrics = RunMetrics(Monitor())
    done = StepDone(0, 5.0, 16, float("nan"), 0.1, 1.0, True, 2, (), {"sent_bytes": 7.0}, 4.5)
    metrics.step_done(done)
    found = scraped(metrics)
    assert found["swarm_samples_total", ()] == 16
    assert found["swarm_steps_skipped_total", ()] == 1
    assert found["swarm_microbatches_resent_total", ()] == 2
    assert found["swarm_activation_bytes_total", ()] == 7
    assert found["swarm_eval_loss", ()] == 4.5
    assert found["swarm_step_seconds_count", ()] == 0
