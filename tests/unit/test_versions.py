"""``swarm --version``, ``python -m swarm``, and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys

from typer.testing import CliRunner

from peers import wire
from peers.cli import app
from peers.versions import installed, versions


def test_the_wire_protocol_and_the_libraries_are_told():
    told = versions()
    assert told["wire protocol"] == str(wire.VERSION)
    assert told["torch"].startswith("2.")
    lines = CliRunner().invoke(app, ["--version"]).stdout.splitlines()
    assert lines == [f"{name} {text}" for name, text in told.items()]


def test_what_is_missing_is_said():
    assert installed("no-such-library-anywhere") == "not installed"


def test_python_m_swarm_is_the_command_and_imports_nothing_heavy():
    code = (
        "import runpy, sys; sys.argv = ['swarm', '--version']\n"
        "try: runpy.run_module('swarm', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: print(end.code or 0, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith("swarm ")
    assert done.stdout.splitlines()[-1] == "0 False"


def test_a_shell_can_complete_commands_and_options():
    def completed(words: str) -> str:
        environment = {
            **os.environ,
            "_SWARM_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        return subprocess.run(
            [sys.executable, "-m", "peers.cli"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        ).stdout

    assert "coordinator" in completed("swarm coord").split()
    assert "--join" in completed("swarm node --jo").split()
