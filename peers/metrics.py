"""Metrics for Prometheus: of a run where it is led, and of a node. Read when they are scraped.

A run's (``swarm coordinator --metrics``):

    swarm_step, swarm_run_steps                   steps done, and how many the run has
    swarm_loss, swarm_eval_loss                   of the last step; of the last evaluation
    swarm_samples_per_second                      over the last steps
    swarm_samples_total, swarm_steps_skipped_total, swarm_microbatches_resent_total
    swarm_activation_bytes_total                  sent on between stages, both directions
    swarm_step_seconds                            histogram
    swarm_replicas{stage,state}                   how many
    swarm_replica_queue{stage,peer}               microbatches that wait there
    swarm_replica_samples_per_second{stage,peer}  what it does when it never waits
    swarm_warnings                                what a person should look at, how many

A node's (``swarm node --metrics``):

    swarm_node_stage, swarm_node_step             what it serves, and the step of its weights
    swarm_node_state{state}                       1 for the present one
    swarm_node_passes_total, swarm_node_microbatches_total
                                                  computed; and of these, counted in a step
    swarm_node_busy_seconds_total                 computing what was counted
    swarm_node_wait_seconds_total                 that passes waited to be computed, summed
    swarm_node_queue                              passes that wait now
    swarm_node_pass_seconds                       histogram

Counters of a node begin anew when it moves to another stage. Both have ``process_*`` too.
``peer`` is a whole peer id; a peer that is gone has no line any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from peers.steps import StepDone

if TYPE_CHECKING:
    from peers.node import Node
    from peers.status import Monitor

STEP_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
PASS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """One without labels; without a value, if that is not known."""
    family = GaugeMetricFamily(name, text)
    if value is not None and isfinite(value):
        family.add_metric([], value)
    return family


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


class RunMetrics:
    """Of the run that ``monitor`` watches."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._samples = self._skipped = self._resent = 0
        self._bytes = 0.0
        self._eval_loss: float | None = None
        self.registry = _registry()
        self._seconds = Histogram(
            "swarm_step_seconds", "Time of a step.", buckets=STEP_S, registry=self.registry
        )
        self.registry.register(self)
        monitor.listeners.append(self.step_done)

    def step_done(self, done: StepDone) -> None:
        self._samples += done.samples
        self._skipped += done.skipped
        self._resent += done.resent
        self._bytes += done.phases.get("sent_bytes", 0.0)
        if done.eval_loss is not None:
            self._eval_loss = done.eval_loss
        if isfinite(done.seconds):
            self._seconds.observe(done.seconds)

    def collect(self) -> Iterator[Metric]:
        yield counter("swarm_samples", "Samples that were counted.", self._samples)
        yield counter("swarm_steps_skipped", "Steps without an update.", self._skipped)
        yield counter("swarm_microbatches_resent", "Sent again.", self._resent)
        yield counter("swarm_activation_bytes", "Sent on between stages.", self._bytes)
        yield gauge("swarm_eval_loss", "Of the last evaluation.", self._eval_loss)
        if self._monitor.training:
            yield from self._of_now()

    def _of_now(self) -> Iterator[Metric]:
        view = self._monitor.look()
        yield gauge("swarm_step", "Steps done.", view.step)
        yield gauge("swarm_run_steps", "Steps of the run.", view.steps)
        yield gauge("swarm_loss", "Of the last step.", view.loss)
        yield gauge("swarm_samples_per_second", "Over the last steps.", view.samples_per_s)
        yield gauge("swarm_warnings", "What a person should look at.", len(view.warnings))
        replicas = GaugeMetricFamily("swarm_replicas", "Replicas.", labels=["stage", "state"])
        labels = ["stage", "peer"]
        queue = GaugeMetricFamily("swarm_replica_queue", "Microbatches that wait.", labels=labels)
        speed = GaugeMetricFamily(
            "swarm_replica_samples_per_second", "Without waiting.", labels=labels
        )
        for stage in view.stages:
            at = str(stage.stage)
            for state, count in Counter(r.state for r in stage.replicas).items():
                replicas.add_metric([at, state], count)
            for replica in stage.replicas:
                queue.add_metric([at, replica.peer], replica.queue)
                if replica.samples_per_s is not None:
                    speed.add_metric([at, replica.peer], replica.samples_per_s)
        yield from (replicas, queue, speed)


class NodeMetrics:
    """Of the node that ``watch`` was last called with: another one after a move."""

    def __init__(self) -> None:
        self._node: Node | None = None
        self.registry = _registry()
        self._seconds = Histogram(
            "swarm_node_pass_seconds", "Time of a pass.", buckets=PASS_S, registry=self.registry
        )
        self.registry.register(self)

    def watch(self, node: Node) -> None:
        self._node = node
        node.on_pass = self._seconds.observe

    def collect(self) -> Iterator[Metric]:
        node = self._node
        server = None if node is None else node.server
        if node is None or server is None:
            return
        counters, mark = server.passes.counters, server.mark
        yield gauge("swarm_node_stage", "The stage that it serves.", node.stage)
        yield gauge("swarm_node_step", "Of its weights.", None if mark is None else mark.t)
        state = GaugeMetricFamily("swarm_node_state", "1: it is in this one.", labels=["state"])
        state.add_metric([str(server.state)], 1)
        yield state
        yield counter("swarm_node_passes", "Computed.", counters.passes)
        yield counter("swarm_node_microbatches", "Counted in a step.", counters.counted)
        yield counter("swarm_node_busy_seconds", "Computing what counted.", counters.busy_s)
        yield counter("swarm_node_wait_seconds", "That passes waited.", counters.queue_s)
        yield gauge("swarm_node_queue", "Passes that wait.", server.passes.intake.queued)


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def application(metrics: RunMetrics | NodeMetrics) -> Any:
    """The ASGI application: the metrics at every path."""
    from prometheus_client import make_asgi_app

    return make_asgi_app(metrics.registry)
