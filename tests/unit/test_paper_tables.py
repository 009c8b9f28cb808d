"""The paper's tables: limits, populations, the min-cost flow, and how a table looks."""

import io
import random
from math import inf

import pytest
from rich.console import Console

from scripts import _paper_rebalancing as rebalancing
from scripts import _paper_utilisation as utilisation
from scripts._paper_flow import best_flow, shares, transitions
from scripts._paper_layers import (
    LATENCIES_MS,
    LAYERS,
    MEGABIT,
    PAPER_UTILISATION,
    RELAYED,
    compute_s,
    link_s,
    utilisation_limit,
)
from scripts._paper_regions import REGIONS, Churn, latencies, one_way_s, peers, present, with_churn
from scripts._paper_view import Table, draw, percent, show, spread
from scripts._scale_worlds import world
from scripts.bench_simulator import is_linear
from scripts.paper_tables import parse
from swarm.sim.world import Outcome, Sample, World

BASE, XXLARGE, GPT3, OURS = LAYERS


def seconds(costs):
    return lambda a, b: costs.get((a, b), 0.0)


# -- limits -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "tflop", "megabytes"),
    [(BASE, 0.008, 0.79), (XXLARGE, 0.21, 4.2), (GPT3, 7.6, 50.3), (OURS, 14.3, 8.4)],
)
def test_work_and_boundary_of_each_layer(layer, tflop, megabytes):
    assert layer.forward_tflop == pytest.approx(tflop, rel=0.02)
    assert layer.boundary_bytes == pytest.approx(megabytes * 1e6, rel=0.01)


def test_limit_is_one_where_computing_takes_longer_than_sending():
    assert utilisation_limit(OURS, 20.0, 500 * MEGABIT) == 1.0


def test_limit_is_that_of_the_link_where_sending_takes_longer():
    limit = utilisation_limit(BASE, 20.0, 500 * MEGABIT)
    assert limit == pytest.approx(compute_s(BASE, 20.0) / (2 * BASE.boundary_bytes / 62.5e6))
    assert 0 < limit < 0.1


def test_relaying_takes_half_as_much_again_of_the_link():
    one, other = (utilisation_limit(BASE, 20.0, 500 * MEGABIT, a) for a in ((2, 2), RELAYED))
    assert one == pytest.approx(1.5 * other)
    assert link_s(BASE, 1e6, (2, 3)) == link_s(BASE, 1e6, RELAYED)


def test_paper_has_a_figure_for_every_cell():
    assert set(PAPER_UTILISATION) == {layer.name for layer in LAYERS}
    assert {len(row) for row in PAPER_UTILISATION.values()} == {len(LATENCIES_MS)}


# -- worlds -----------------------------------------------------------------------------------


def test_ours_gets_the_latency_one_way_and_the_relayed_pipeline_both_ways():
    tasks = [utilisation.Task(BASE, 200, relayed, 20.0, 64) for relayed in (False, True)]
    ours, relayed = map(utilisation.world_of, tasks)
    assert (ours.latency.default_s, relayed.latency.default_s) == (0.2, 0.1)
    assert (ours.window, relayed.window) == (0, utilisation.STAGES)
    assert relayed.relayed
    assert not ours.relayed


def test_steady_throughput_leaves_the_first_step_out():
    world = World(stages=(BASE.work(),), machines=(), duration_s=30.0, microbatches=40)
    outcome = Outcome(world, "microbatch", steps=[20.0, 24.0, 28.0])
    assert utilisation.steady_throughput(outcome) == 10.0


def test_steady_throughput_needs_two_steps():
    world = World(stages=(BASE.work(),), machines=(), duration_s=30.0)
    with pytest.raises(ValueError, match="1 steps were done, at least 2"):
        utilisation.steady_throughput(Outcome(world, "microbatch", steps=[20.0]))


def test_shares_of_the_first_and_the_last_hour():
    world = World(stages=(BASE.work(),), machines=(), duration_s=3 * 3600.0)
    samples = [Sample(1800.0 * n, done, 10.0, (1,)) for n, done in enumerate((9, 9, 5, 5, 6, 8), 1)]
    found = rebalancing.kept(Outcome(world, "fluid", samples=samples))
    assert (found.first_hour, found.last_hour) == (0.9, 0.7)
    assert found.overall == pytest.approx(0.7)


def test_share_where_nobody_is_there_is_whole():
    assert rebalancing.share([Sample(60.0, 0.0, 0.0, ())]) == 1.0


def test_a_curve_takes_samples_together_and_leaves_out_where_nobody_is_there():
    rows = [(4.0, 10.0), (8.0, 10.0), (0.0, 0.0), (0.0, 0.0), (5.0, 10.0)]
    samples = [Sample(3600.0 * n, done, best, (1,)) for n, (done, best) in enumerate(rows, 1)]
    assert rebalancing.curve_of(samples, 2) == ([2.0, 5.0], [0.6, 0.5])


def test_made_up_trace_is_the_same_each_time_and_within_bounds():
    one, other, third = (rebalancing.made_up(seed) for seed in (1, 1, 2))
    assert one == other
    assert one != third
    assert 0 <= min(one.alive) < max(one.alive) <= rebalancing.ON


def test_a_folder_without_traces_gives_a_made_up_one(tmp_path):
    (tmp_path / "README.md").write_text("nothing here")
    for folder in (None, tmp_path, tmp_path / "missing"):
        assert [t.name for t in rebalancing.traces_in(folder)] == ["made up"]


def test_the_t4_trace_comes_first(tmp_path):
    (tmp_path / "a.json").write_text('{"metadata": {"gap_seconds": 60}, "data": [1, 2]}')
    (tmp_path / "g4dn.csv").write_text("0,1\n60,2\n")
    names = [t.name for t in rebalancing.traces_in(tmp_path)]
    assert names == ["g4dn.csv", "a.json"]


def test_preempted_peers_of_one_seed_are_the_same_for_all_rules():
    trace = rebalancing.made_up(0, hours=6)
    worlds = [
        rebalancing.world_of(rebalancing.Task(trace, policy, 24, 6, 3))
        for policy in rebalancing.POLICIES
    ]
    spans = {tuple((m.arrives_s, m.leaves_s) for m in world.machines) for world in worlds}
    assert len(spans) == 1
    by_lot, by_rule = worlds[0].machines, worlds[1].machines
    assert all((m.stage is None) == (m.arrives_s == 0) for m in by_lot)
    assert all(m.stage is None for m in by_rule)


# -- regions ----------------------------------------------------------------------------------


def test_latency_grows_with_distance_and_is_symmetric():
    assert one_way_s("Ireland", "Frankfurt") < one_way_s("Ireland", "Virginia")
    assert one_way_s("Tokyo", "Iowa") == pytest.approx(one_way_s("Iowa", "Tokyo"))
    table = latencies()
    assert table.one_way_s("Sydney", "Ireland") == one_way_s("Sydney", "Ireland")
    # What is measured between these is about 75 and 250 ms there and back.
    assert 2 * one_way_s("Ireland", "Virginia") == pytest.approx(0.08, abs=0.025)
    assert 2 * one_way_s("Ireland", "Sydney") == pytest.approx(0.26, abs=0.05)


def test_peers_are_dealt_out_to_stages_and_regions():
    found = peers(18, 3, random.Random(0))
    assert [sum(p.stage == stage for p in found) for stage in range(3)] == [6, 6, 6]
    assert {p.region for p in found} == set(REGIONS)
    assert found == peers(18, 3, random.Random(0))


def test_churn_replaces_whom_it_takes_at_the_same_stage():
    first = peers(18, 3, random.Random(0))
    churn = Churn(0.2, 100.0)
    machines = with_churn(first, churn, 1000.0, random.Random(1))
    for at_s in (0.0, 333.3, 999.0):
        there = present(machines, at_s)
        assert [sum(p.stage == stage for p in there) for stage in range(3)] == [6, 6, 6]
    deaths = sum(p.leaves_s < inf for p in machines)
    assert deaths == pytest.approx(0.2 * 18 * 10, abs=6)
    assert len({p.peer for p in machines}) == len(machines) == 18 + deaths


def test_churn_never_takes_the_last_of_a_stage():
    first = peers(3, 3, random.Random(0))
    assert with_churn(first, Churn(1.0, 10.0), 100.0, random.Random(1)) == first


def test_without_churn_all_stay():
    first = peers(18, 3, random.Random(0))
    assert with_churn(first, Churn(0.0, 10.0), 100.0, random.Random(1)) == first


# -- the min-cost flow ------------------------------------------------------------------------


def test_flow_does_as_much_as_the_slowest_stage():
    flow = best_flow([{"a": 1.0, "b": 2.0}, {"c": 1.5}], seconds({}))
    assert sum(flow.values()) == pytest.approx(1.5, rel=1e-3)


def test_flow_bounds_each_replica_by_its_rate():
    flow = best_flow([{"a": 1.0, "b": 3.0}, {"c": 1.0, "d": 3.0}], seconds({("b", "d"): 9.0}))
    assert sum(rate for (here, _), rate in flow.items() if here == "a") == pytest.approx(
        1, rel=1e-3
    )
    assert sum(rate for (_, to), rate in flow.items() if to == "d") == pytest.approx(3, rel=1e-3)
    # Dear as it is, it must be used: a and c do no more than one each.
    assert flow["b", "d"] == pytest.approx(2.0, rel=1e-3)


def test_flow_takes_the_nearest_where_all_can_do_all():
    far = {("a", "d"): 1.0, ("b", "c"): 1.0}
    flow = best_flow([{"a": 1.0, "b": 1.0}, {"c": 1.0, "d": 1.0}], seconds(far))
    assert flow == pytest.approx({("a", "c"): 1.0, ("b", "d"): 1.0}, rel=1e-3)


def test_spare_replicas_of_a_fast_stage_that_are_far_off_get_nothing():
    stages = [{"a": 1.0}, {"near": 1.0, "far": 5.0}, {"z": 1.0}]
    flow = best_flow(stages, seconds({("a", "far"): 1.0}))
    parts = shares(stages, flow)
    assert parts[1] == pytest.approx({"near": 1.0, "far": 0.0}, abs=2e-4)
    assert parts[0] == {"a": 1.0}


def test_shares_and_transitions_add_up():
    stages = [{"a": 1.0, "b": 2.0}, {"c": 1.0, "d": 2.0}, {"e": 3.0}]
    flow = best_flow(stages, seconds({}))
    for part in [*shares(stages, flow), *transitions(flow).values()]:
        assert sum(part.values()) == pytest.approx(1.0)
    assert shares(stages, flow)[0]["b"] == pytest.approx(2 / 3, rel=1e-3)
    assert set(transitions(flow)) <= {"a", "b", "c", "d"}


def test_shares_of_a_single_stage_follow_the_rates():
    stages = [{"a": 1.0, "b": 3.0}]
    assert shares(stages, best_flow(stages, seconds({}))) == [{"a": 0.25, "b": 0.75}]


def test_flow_through_an_empty_stage_is_refused():
    with pytest.raises(ValueError, match="stage 1 has no replica that does anything"):
        best_flow([{"a": 1.0}, {"b": 0.0}], seconds({}))


# -- how it looks -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.9921, "99.2 %"), (0.0488, "4.88 %"), (1.0, "100.0 %"), (0.09996, "10.0 %")],
)
def test_percent(share, text):
    assert percent(share) == text


def test_spread():
    assert spread([1.0, 3.0]) == "2.0 ± 1.4"
    assert spread([1.0], 2, " s") == "1.00 s"
    assert spread([]) == "-"


def test_a_table_shows_all_that_it_has(tmp_path):
    table = Table("Title", ("who", "what"), [("one", "1 %"), ("", ""), ("two", "2 %")], ["a note"])
    table.pictures.append(tmp_path / "p.png")
    console = Console(file=io.StringIO(), width=100)
    show(table, console)
    text = console.file.getvalue()
    for expected in ("Title", "who", "one", "1 %", "two", "a note", "p.png"):
        assert expected in text


def test_a_picture_is_a_png(tmp_path):
    path = tmp_path / "p.png"
    curves = {"ours": ([0, 1], [0.5, 0.6]), "limit*": ([0, 1], [0.9, 0.9])}
    panels = {"left": curves, "right": curves}
    draw(path, "title", panels, x="x", y="y", top=1.0)
    assert path.read_bytes().startswith(b"\x89PNG")


# -- the benchmark of the simulator ------------------------------------------------------------


@pytest.mark.parametrize(
    ("above", "linear"),
    [((10.0, 20.0, 40.0), True), ((10.0, 15.0, 20.0), True), ((10.0, 40.0, 160.0), False)],
)
def test_memory_may_double_with_the_peers_but_not_more(above, linear):
    assert is_linear(above) is linear


@pytest.mark.parametrize("mode", ["microbatch", "fluid"])
def test_benchmark_worlds_are_the_same_each_time(mode):
    made = world(mode, 40, 21_600.0)
    assert made == world(mode, 40, 21_600.0)
    assert sum(m.arrives_s == 0 for m in made.machines) == 40
    assert any(m.leaves_s < 21_600.0 for m in made.machines) is (mode == "fluid")


# -- the command ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--only", "4"], "invalid choice"),
        (["--peers", "3"], "3: allowed are whole numbers from 4 to 20000"),
        (["--tflops", "much"], "'much': allowed are numbers from 0.1 to 10000"),
        (["--traces", "/nowhere/at/all"], "not a folder"),
    ],
)
def test_bad_flags_are_refused_with_what_is_allowed(flags, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(flags)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err
