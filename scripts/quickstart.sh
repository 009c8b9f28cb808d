#!/usr/bin/env bash
# Installs the project into .venv and trains a small GPT on a swarm of processes on this machine.
# Arguments are passed on: ./scripts/quickstart.sh --help
set -euo pipefail

# shellcheck source=scripts/_setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

set_up
exec "$venv/bin/swarm" local "$@"
