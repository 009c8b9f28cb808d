#!/usr/bin/env bash
# Installs the project with its test extra into .venv, then runs linters, type checker and tests.
# Arguments are passed on to pytest; without any the whole suite runs, and the modules that decide
# and parse must be covered completely.
set -euo pipefail

# shellcheck source=scripts/_setup.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_setup.sh"

fully_covered=(swarm/core swarm/codecs dht/records.py peers/wire.py)

check_coverage() {
    local path pattern report
    for path in "${fully_covered[@]}"; do
        pattern="$path"
        [[ -d "$path" ]] && pattern="$path/*"
        if ! report="$("$venv_python" -m coverage report --include="$pattern" \
            --show-missing --skip-covered --fail-under=100 2>&1)"; then
            printf '%s\nerror: %s is not covered completely (lines and branches)\n' \
                "$report" "$path" >&2
            return 1
        fi
    done
    say "Coverage: 100 % of the lines and branches of ${fully_covered[*]}"
}

set_up test
cd -- "$root"
export OMP_NUM_THREADS=1 # many small processes: one torch thread each

install_browser &
browser=$!
say "ruff"
"$venv_python" -m ruff check .
"$venv_python" -m ruff format --check .
say "mypy"
"$venv_python" -m mypy
wait "$browser"
say "pytest"
if (($# > 0)); then
    exec "$venv_python" -m pytest "$@"
fi
# Tests with processes of their own mostly wait for them, so they run beside the others.
beside_log="$(mktemp)"
"$venv_python" -m pytest tests/multiprocess >"$beside_log" 2>&1 &
beside=$!
trap 'kill "$beside" 2>/dev/null || true; rm -f "$beside_log"' EXIT
status=0
"$venv_python" -m pytest tests/unit --cov=swarm.core --cov=swarm.codecs --cov=dht.records \
    --cov=peers.wire --cov-branch --cov-report= || status=$?
"$venv_python" -m pytest tests/contract tests/chaos tests/sim || status=$?
say "pytest tests/multiprocess"
wait "$beside" || status=$?
cat "$beside_log"
((status == 0)) || exit "$status"
check_coverage
