"""The command: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from peers import simulate as command
from peers.cli import app
from peers.simulate import stage_table, summary
from peers.simulation_plots import plot_simulation
from swarm.sim.fluid import simulate_fluid
from swarm.sim.world import Moved, Outcome, Rebalancing, Sample
from tests.sim.worlds import machines, world

RUNNER = CliRunner()

SMALL = """
name = "small"
mode = "fluid"
duration_s = 1800
[pipeline]
stages = 3
[step]
microbatches = 32
[[peers]]
count = 9
[churn]
kind = "random"
lifetime_s = 600
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = RUNNER.invoke(app, ["simulate", *map(str, arguments)], env={"COLUMNS": "120"})
    return result.exit_code, result.output


def test_a_scenario_gives_json_and_plots(scenario, tmp_path):
    out, document = tmp_path / "new" / "plots", tmp_path / "outcome.json"
    code, _ = run(scenario, "--out", out, "--json", document)
    assert code == 0
    tree = json.loads(document.read_text())
    assert (tree["name"], tree["mode"], tree["stages"]) == ("small", "fluid", 3)
    assert len(tree["timeline"]) == 30
    sizes = {}
    for path in out.iterdir():
        with Image.open(path) as image:
            assert image.format == "PNG"
            sizes[path.name] = image.size
    assert sizes == {"throughput.png": (1000, 900), "bytes.png": (1000, 450)}


@pytest.mark.parametrize("mode", ["fluid", "microbatch"])
def test_the_same_seed_gives_the_same_bytes(mode, scenario, tmp_path):
    def document(name: str, seed: int) -> bytes:
        path = tmp_path / name
        code, _ = run(scenario, "--mode", mode, "--duration", 300, "--seed", seed, "--json", path)
        assert code == 0
        return path.read_bytes()

    assert document("a", 1) == document("b", 1)
    assert document("a", 1) != document("c", 2)


def test_a_trace_is_scaled_to_the_peers_that_are_asked_for(tmp_path):
    trace, document = tmp_path / "alive.csv", tmp_path / "outcome.json"
    trace.write_text("0,4\n600,2\n1200,4\n1800,4\n")
    code, _ = run("--trace", trace, "--peers", 40, "--mode", "fluid", "--json", document)
    assert code == 0
    tree = json.loads(document.read_text())
    assert tree["duration_s"] == 1800
    assert tree["machines"] == 60
    assert sum(tree["timeline"][5]["peers"]) == 40
    assert sum(tree["timeline"][15]["peers"]) == 20


WRONG = {
    "mode": (["--mode", "slow"], "mode: got 'slow'"),
    "trace": (["--trace", "/nowhere.csv"], "/nowhere.csv"),
    "scenario": (["/nowhere.toml"], "/nowhere.toml"),
    "out": (["--out", "/dev/null/x"], "--out"),
    "json": (["--json", "/nowhere/x.json"], "--json"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(case, capfd):
    arguments, named = WRONG[case]
    result = RUNNER.invoke(app, ["simulate", *arguments])
    error = result.stderr + capfd.readouterr().err
    assert result.exit_code == 2
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert named in error


def test_an_interrupt_ends_it_with_one_word(scenario, monkeypatch, capfd):
    def interrupted(*_: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "simulator", lambda mode: interrupted)
    result = RUNNER.invoke(app, ["simulate", str(scenario)])
    assert result.exit_code == 130
    assert (result.stderr + capfd.readouterr().err).strip() == "stopped"


def test_no_torch_is_loaded_and_no_network(scenario):
    code = (
        "import sys\n"
        "from peers.simulate import run_simulate_command\n"
        "from pathlib import Path\n"
        f"run_simulate_command(Path({str(scenario)!r}), {{}}, out=None, json_file=None)\n"
        "heavy = {'torch', 'hivemind', 'libp2p', 'matplotlib'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "loaded []"


def outcome(moves: int = 2) -> Outcome:
    swarm = world(machines=machines([3, 2, 2]), duration_s=7200.0, name="mine")
    found = simulate_fluid(swarm)
    found.moves = [Moved(60.0 * i, "0.0", 0, 1 + i % 2, "why", 60.0 * i + 9) for i in range(moves)]
    return found


def test_the_table_has_a_line_for_each_stage():
    table = stage_table(outcome())
    assert table.row_count == 3
    assert list(table.columns[0].cells) == ["0", "1", "2"]
    assert list(table.columns[2].cells) == ["3.0", "2.0", "2.0"]
    assert list(table.columns[5].cells) == ["0", "1", "1"]
    assert list(table.columns[6].cells) == ["2", "0", "0"]


def test_the_summary_says_how_good_it_was():
    found = outcome()
    first, hours, rest = summary(found)
    assert f"{found.done:,.0f} samples in 2 h" in first
    assert "of the best assignment" in first
    assert hours.startswith("first hour ")
    assert "2 moves, 0 microbatches sent again" in rest
    assert "1 move," in summary(outcome(moves=1))[-1]


@pytest.mark.parametrize(
    "drawn",
    [
        Outcome(world(rebalancing=Rebalancing.NONE), "fluid"),
        Outcome(world(), "fluid", samples=[Sample(60.0, 0.0, 0.0, (0, 0, 0))]),
        outcome(moves=0),
        outcome(moves=100),
    ],
)
def test_there_is_a_picture_whatever_is_missing(drawn, tmp_path):
    paths = plot_simulation(drawn, tmp_path)
    for path in paths:
        with Image.open(path) as image:
            assert len(image.convert("RGB").getcolors(1 << 20)) > 10


def test_moves_are_in_the_picture(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    none, _ = plot_simulation(outcome(moves=0), tmp_path / "a")
    some, _ = plot_simulation(outcome(moves=3), tmp_path / "b")
    assert none.read_bytes() != some.read_bytes()
