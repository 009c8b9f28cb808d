"""Start a run: ``swarm coordinator``."""

import sys

from peers.cli import app

if __name__ == "__main__":
    app(["coordinator", *sys.argv[1:]], prog_name="scripts/coordinator.py")
