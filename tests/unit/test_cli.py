"""The command line: its options are frozen, its errors are one line and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from peers.cli import app
from peers.running import expected_error
from swarm.errors import ConfigError, DataError, SwarmError

RUNNER = CliRunner()

OPTIONS = {
    "local": {
        *("manifest", "--steps", "--out", "--stages", "--replicas"),
        *("--kill-every", "--kill-seed", "--allow-model", "--transport"),
        *("--http", "--metrics", "--log-format", "--tensorboard", "--wandb"),
    },
    "coordinator": {
        *("manifest", "--steps", "--out", "--listen", "--announce", "--identity"),
        *("--standby", "--resume", "--trainer", "--join", "--run", "--allow-model"),
        *("--transport", "--http", "--metrics", "--log-format", "--tensorboard", "--wandb"),
    },
    "identity": {"--identity"},
    "node": {
        *("--join", "--stage", "--run", "--threads", "--listen", "--announce", "--identity"),
        *("--allow-model", "--stay", "--memory", "--transport", "--device"),
        *("--metrics", "--log-format", "--upload-limit", "--nice"),
    },
    "doctor": {
        *("--join", "--memory", "--device", "--run", "--listen", "--announce", "--identity"),
        *("--transport", "--allow-model", "--json"),
    },
    "plan": {"manifest", "--peers", "--measure", "--allow-model", "--json"},
    "top": {"--join", "--run", "--every", "--identity", "--transport"},
    "status": {"--join", "--run", "--json", "--identity", "--transport"},
    "reference": {"manifest", "--steps", "--out", "--allow-model"},
    "export": {"run", "--out", "--allow-model"},
    "generate": {
        *("model", "--prompt", "--bytes", "--temperature", "--seed", "--allow-model"),
    },
    "simulate": {
        *("scenario", "--mode", "--trace", "--peers", "--duration", "--seed", "--out", "--json"),
    },
}


def test_the_options_are_these_and_a_new_one_is_a_decision() -> None:
    command = typer.main.get_command(app)
    found = {
        name: {option.opts[0] for option in sub.params if option.name != "help"}
        for name, sub in command.commands.items()  # type: ignore[attr-defined]
    }
    assert found == OPTIONS


@pytest.mark.parametrize("name", ["", *OPTIONS])
def test_help_says_what_each_option_is(name: str) -> None:
    result = RUNNER.invoke(app, [*name.split(), "--help"], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    for option in OPTIONS.get(name, OPTIONS.keys()):
        assert option.upper() in result.output.upper() or option in ("manifest", "run", "model")


def test_version() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("swarm 0.")


BAD = {
    "unknown field": ("[model]\nwidth = 3\n", "model.width"),
    "bad value": ("[batch]\nmicrobatch = 0\n", "batch.microbatch"),
    "not TOML": ("model = [", "TOML"),
    "impossible": ("[model]\nd_model = 10\nheads = 3\n", "d_model"),
    "no data": ('[data]\nsource = "text:/nowhere/at/all"\n', "/nowhere/at/all"),
    "other data": (f'[data]\nsha256 = "{"0" * 64}"\n', "000000"),
    "code": ('[model]\nkind = "some.module:model"\n', "--allow-model some.module:model"),
}


@pytest.mark.parametrize("command", ["reference", "local", "coordinator"])
@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_run_is_one_line(
    command: str, case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text, named = BAD[case]
    path = tmp_path / "run.toml"
    path.write_text(text)
    out = tmp_path / "out"
    result = RUNNER.invoke(app, [command, str(path), "--out", str(out)])
    error = result.stderr + capfd.readouterr().err
    assert result.exit_code == 2
    assert error.count("\n") == 1
    assert error.startswith("error: ")
    assert named in error
    assert not out.exists()


TOGETHER = {
    "nothing": ([], "exactly one of"),
    "two ways": (["run.toml", "--standby", "--join", "/ip4/127.0.0.1/tcp/1"], "exactly one of"),
    "standby of what": (["--standby"], "--join"),
    "steps of a standby": (["--standby", "--join", "x", "--steps", "3"], "--steps"),
    "no run directory": (["--resume", "/nowhere"], "run.toml"),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_a_coordinator_s_flags_have_to_go_together(
    case: str, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, named = TOGETHER[case]
    result = RUNNER.invoke(app, ["coordinator", *arguments])
    error = result.stderr + capfd.readouterr().err
    assert result.exit_code == 2
    assert error.count("\n") == 1
    assert named in error


def test_identity_prints_the_same_peer_id_each_time(tmp_path: Path) -> None:
    key = str(tmp_path / "a.key")
    first = RUNNER.invoke(app, ["identity", "--identity", key])
    again = RUNNER.invoke(app, ["identity", "--identity", key])
    assert again.output.startswith("12D3KooW")
    assert first.output.splitlines()[-1] == again.output.strip()


def test_a_missing_manifest_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    result = RUNNER.invoke(app, ["reference", "/nowhere/run.toml"])
    assert result.exit_code == 2
    assert "/nowhere/run.toml" in result.stderr + capfd.readouterr().err


def test_an_error_of_ours_is_found_in_groups_of_others() -> None:
    ours = DataError("the corpus is empty")
    group = BaseExceptionGroup("", [KeyError("x"), BaseExceptionGroup("", [ours])])
    assert expected_error(group) is ours
    assert expected_error(ours) is ours
    assert expected_error(BaseExceptionGroup("", [ValueError("x")])) is None
    assert isinstance(ConfigError("a", 1, "2"), SwarmError)
