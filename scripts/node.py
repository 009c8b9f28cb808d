"""Start a node: ``swarm node``."""

import sys

from peers.cli import app

if __name__ == "__main__":
    app(["node", *sys.argv[1:]], prog_name="scripts/node.py")
