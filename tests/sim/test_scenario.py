"""Scenarios: what an empty one is, what each field becomes, and errors of one line."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from swarm.errors import ConfigError, DataError
from swarm.sim.models import MODELS
from swarm.sim.scenario import Scenario
from swarm.sim.scenario_sections import Peers
from swarm.sim.world import Rebalancing, WiringRule

EXAMPLE = Path(__file__).resolve().parents[2] / "scripts" / "scenario.toml"


def test_an_empty_scenario_is_a_swarm_of_equals_for_an_hour():
    world = Scenario.from_tree({}).world()
    assert len(world.machines) == 16
    assert len({machine.tflops for machine in world.machines}) == 1
    assert len({machine.peer for machine in world.machines}) == 16
    assert len(world.stages) == 4
    assert len(set(world.stages)) == 1
    assert world.duration_s == 3600
    assert world.rebalancing is Rebalancing.OURS


@pytest.mark.parametrize(
    ("model", "forward_tflop", "boundary_mb"),
    [("base", 0.008, 0.39), ("xxlarge", 0.21, 2.1), ("gpt3", 7.6, 25), ("ours", 14.3, 8.4)],
)
def test_models_are_those_of_the_paper(model, forward_tflop, boundary_mb):
    tree = {"pipeline": {"model": model, "codec": "int8"}}
    stage = Scenario.from_tree(tree).world().stages[0]
    assert stage.forward_tflop == pytest.approx(forward_tflop, rel=0.01)
    assert stage.backward_tflop == 2 * stage.forward_tflop
    assert stage.output_bytes == pytest.approx(boundary_mb * 1e6, rel=0.02)
    tree["pipeline"]["codec"] = "fp16"
    assert Scenario.from_tree(tree).world().stages[0].output_bytes == 2 * stage.output_bytes


def test_layers_that_share_weights_have_one_set_to_average_and_to_download():
    one, many = MODELS["xxlarge"], MODELS["ours"]
    assert many.parameters == one.parameters
    assert many.stage(1, "int8", "fp32").vector_bytes == 4 * one.parameters


def test_larger_microbatches_are_more_work_and_more_bytes_but_no_more_state():
    one = Scenario.from_tree({}).world().stages[0]
    four = Scenario.from_tree({"step": {"microbatch": 4}}).world().stages[0]
    assert four.forward_tflop == 4 * one.forward_tflop
    assert four.output_bytes == 4 * one.output_bytes
    assert four.state_bytes == one.state_bytes


def test_the_units_of_people_become_bytes_and_seconds():
    tree = {
        "peers": [{"count": 1, "up_mbps": 8, "down_mbps": 80, "memory_gib": 2, "region": "eu"}],
        "latency": {"default_ms": 10, "between": [["eu", "us", 50]]},
        "wiring": {"trainer_mbps": 16, "rule": "uniform"},
        "stage": [{"forward_tflop": 3, "output_mb": 2, "state_mb": 5, "memory_gib": 1}],
    }
    world = Scenario.from_tree(tree).world()
    [machine], [stage] = world.machines, world.stages
    assert (machine.up_bytes_per_s, machine.down_bytes_per_s) == (1e6, 1e7)
    assert machine.memory_bytes == 2 << 30
    assert world.latency.one_way_s("us", "eu") == 0.05
    assert world.latency.one_way_s("eu", "eu") == 0.01
    assert world.trainer_bytes_per_s == 2e6
    assert world.wiring is WiringRule.UNIFORM
    assert (stage.backward_tflop, stage.gradient_bytes) == (6, 2_000_000)
    assert (stage.state_bytes, stage.memory_bytes) == (5_000_000, 1 << 30)


def test_speeds_differ_by_the_spread_and_the_seed():
    def speeds(seed: int) -> list[float]:
        tree = {"seed": seed, "peers": [{"count": 200, "tflops": 10, "spread": 0.3}]}
        return [machine.tflops for machine in Scenario.from_tree(tree).world().machines]

    assert min(speeds(1)) == pytest.approx(7, rel=0.05)
    assert max(speeds(1)) == pytest.approx(13, rel=0.05)
    assert speeds(1) == speeds(1)
    assert speeds(1) != speeds(2)


def test_groups_keep_their_stages_and_counts():
    tree = {"peers": [{"count": 2, "stage": 1}, {"count": 3}], "pipeline": {"stages": 2}}
    machines = Scenario.from_tree(tree).world().machines
    assert [machine.stage for machine in machines] == [1, 1, None, None, None]


def test_random_churn_draws_machines_of_all_groups():
    tree = {
        "duration_s": 1000,
        "peers": [{"count": 30, "tflops": 1}, {"count": 10, "tflops": 2}],
        "churn": {"kind": "random", "lifetime_s": 100, "drains": True},
    }
    machines = Scenario.from_tree(tree).world().machines
    # Ten lifetimes: the 40 at the start, and about 400 more.
    assert len(machines) == pytest.approx(440, rel=0.15)
    fast = sum(machine.tflops == 2 for machine in machines)
    assert fast / len(machines) == pytest.approx(0.25, abs=0.06)
    assert all(machine.drains == (machine.leaves_s < inf) for machine in machines)


def test_a_trace_is_found_beside_the_scenario_and_gives_its_length(tmp_path):
    (tmp_path / "alive.csv").write_text("0,4\n100,2\n300,4\n500,4\n")
    path = tmp_path / "scenario.toml"
    path.write_text('[churn]\nkind = "trace"\nfile = "alive.csv"\npeers = 8\n')
    world = Scenario.load(path).world()
    assert world.duration_s == 500
    assert len(world.machines) == 8 + 4
    assert sum(machine.leaves_s == 100 for machine in world.machines) == 4
    assert Scenario.load(path, {"duration_s": 50.0}).world().duration_s == 50


def test_flags_change_single_fields(tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text('name = "mine"\n[churn]\nkind = "random"\nlifetime_s = 77\n')
    scenario = Scenario.load(path, {"seed": 5, "churn.peers": 3})
    assert (scenario.name, scenario.seed) == ("mine", 5)
    assert (scenario.churn.lifetime_s, scenario.churn.peers) == (77, 3)


def test_peers_alone_say_how_many_there_are():
    tree = {"peers": [{"count": 1, "tflops": 1}, {"count": 3, "tflops": 2}]}
    machines = Scenario.from_tree(tree, {"churn.peers": 400}).world().machines
    assert len(machines) == 400
    assert sum(machine.tflops == 2 for machine in machines) == pytest.approx(300, rel=0.15)


def test_samples_are_no_longer_than_the_run():
    assert Scenario.from_tree({"duration_s": 20}).world().sample_every_s == 20


WRONG = {
    "unknown field": ({"modus": 1}, "modus", "did you mean 'mode'?"),
    "unknown field in a list": ({"peers": [{}, {"cout": 3}]}, "peers.1.cout", "'count'"),
    "no number": ({"duration_s": "long"}, "duration_s", "a number from 0"),
    "not finite": ({"duration_s": inf}, "duration_s", "a number from 0"),
    "too small": ({"peers": [{"count": -1}]}, "peers.0.count", "a whole number from 0"),
    "no table": ({"peers": [3]}, "peers.0", "a table with count"),
    "no list": ({"peers": 3}, "peers", "[[peers]] tables"),
    "nobody": ({"peers": []}, "peers", "at least one peer"),
    "no such stage": ({"peers": [{"stage": 4}]}, "peers.0.stage", "from 0 to 3"),
    "model": ({"pipeline": {"model": "big"}}, "pipeline.model", "'gpt3'"),
    "rule": ({"rebalancing": {"rule": "often"}}, "rebalancing.rule", "'paper'"),
    "static wiring": ({"wiring": {"rule": "static"}}, "wiring.rule", "'least-loaded'"),
    "trace without file": ({"churn": {"kind": "trace"}}, "churn.file", "the file of a trace"),
    "file without trace": ({"churn": {"file": "x"}}, "churn.file", "kind = 'trace'"),
    "pair": ({"latency": {"between": [["a", "b"]]}}, "latency.between.0", "milliseconds"),
    "negative": ({"latency": {"between": [["a", "b", -1]]}}, "latency.between", "0 to 60000"),
    "not a table": ({"churn": 3}, "churn", "a table with kind"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_with_what_is_allowed(case):
    tree, field, allowed = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        Scenario.from_tree(tree, {"churn.peers": 3} if case == "not a table" else None)
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        Scenario.load(tmp_path / "none.toml")
    path = tmp_path / "bad.toml"
    path.write_text("[peers\n")
    with pytest.raises(ConfigError, match=r"bad\.toml.*TOML"):
        Scenario.load(path)
    path.write_text('[churn]\nkind = "trace"\nfile = "none.csv"\n')
    with pytest.raises(DataError, match=r"none\.csv"):
        Scenario.load(path).world()


def test_the_example_has_every_field():
    text = EXAMPLE.read_text(encoding="utf-8")
    scenario = Scenario.load(EXAMPLE)
    assert scenario.world().machines
    for name, field in Scenario.model_fields.items():
        if name not in ("stage", "peers"):
            inner = getattr(field.annotation, "model_fields", {})
            assert all(f"{part} = " in text for part in inner), f"[{name}]"
            assert inner or f"{name} = " in text
    assert all(f"{name} = " in text for name in Peers.model_fields)
