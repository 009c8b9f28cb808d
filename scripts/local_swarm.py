"""A swarm on this machine: ``swarm local``."""

import sys

from peers.cli import app

if __name__ == "__main__":
    app(["local", *sys.argv[1:]], prog_name="scripts/local_swarm.py")
