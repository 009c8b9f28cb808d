# shellcheck shell=bash
# The set-up that quickstart.sh and test.sh share: a virtual environment in .venv with this project
# in it. Source this file, then call `set_up` (or `set_up test` for the extra of that name).
# PYTHON may name the interpreter; without it the first python >= 3.11 on the PATH is taken.

root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
venv="$root/.venv"
venv_python="$venv/bin/python"

say() { printf '==> %s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        is_new_enough "$PYTHON" ||
            fail "PYTHON=$PYTHON is not a Python >= 3.11; set PYTHON to one, or leave it unset"
        printf '%s\n' "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.11 python3.12 python3.13 python; do
        if is_new_enough "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 found on the PATH; install one, or name it: PYTHON=/path/to/python $0"
}

# The compiler that building an extension module will call.
compiler_of() {
    if [[ -n "${CC:-}" ]]; then
        printf '%s\n' "${CC%% *}"
    else
        "$1" -c 'import sysconfig; print((sysconfig.get_config_var("CC") or "cc").split()[0])'
    fi
}

has_python_headers() {
    "$1" - <<'PY'
import os, sys, sysconfig
folder = sysconfig.get_path("include")
sys.exit(not (folder and os.path.exists(os.path.join(folder, "Python.h"))))
PY
}

has_gmp_headers() {
    local compiler="$1" header
    if command -v "$compiler" >/dev/null; then
        printf '#include <gmp.h>\n' | "$compiler" -E -x c - >/dev/null 2>&1
        return
    fi
    for header in /usr/include/gmp.h /usr/include/*/gmp.h /usr/local/include/gmp.h; do
        [[ -e "$header" ]] && return
    done
    return 1
}

# Prints, one a line, the Debian packages that hold what is missing to install with interpreter $1.
missing_packages() {
    local python="$1" version compiler
    version="$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')"
    if venv_works; then
        # One dependency (fastecdsa) is compiled; once it is there, no compiler is needed any more.
        "$venv_python" -c 'import fastecdsa.curve' 2>/dev/null && return
    else
        "$python" -c 'import venv, ensurepip' 2>/dev/null || printf '%s\n' "$version-venv"
    fi
    compiler="$(compiler_of "$python")"
    command -v "$compiler" >/dev/null || printf '%s\n' gcc libc6-dev
    has_python_headers "$python" || printf '%s\n' "$version-dev"
    has_gmp_headers "$compiler" || printf '%s\n' libgmp-dev
}

install_missing_packages() {
    local python="$1" packages=() as_root=() line
    mapfile -t packages < <(missing_packages "$python")
    ((${#packages[@]} == 0)) && return
    line="apt-get install -y ${packages[*]}"
    [[ "$(id -u)" == 0 ]] || line="sudo $line"
    if ! command -v apt-get >/dev/null; then
        fail "missing (by their Debian names): ${packages[*]}; install them, then run this again"
    fi
    if [[ "$(id -u)" != 0 ]]; then
        sudo -n true 2>/dev/null || fail "missing: ${packages[*]}; run this, then try again: $line"
        as_root=(sudo -n)
    fi
    say "Installing with apt-get: ${packages[*]}"
    "${as_root[@]}" apt-get update -qq || say "apt-get update failed; going on with the old lists"
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq --no-install-recommends "${packages[@]}" ||
        fail "apt-get could not install ${packages[*]}; run this, then try again: $line"
    mapfile -t packages < <(missing_packages "$python")
    ((${#packages[@]} == 0)) ||
        fail "still missing for $python after apt-get: ${packages[*]}; try PYTHON=/usr/bin/python3"
}

# A virtual environment that works and is of the interpreter that was asked for, if one was.
venv_works() {
    is_new_enough "$venv_python" || return 1
    "$venv_python" -m pip --version >/dev/null 2>&1 || return 1
    [[ -z "${PYTHON:-}" ]] && return
    local what='import sys; print(sys.base_prefix, sys.version)'
    [[ "$("$venv_python" -c "$what")" == "$("$PYTHON" -c "$what" 2>/dev/null)" ]]
}

make_venv() {
    local python="$1"
    if venv_works; then
        return
    fi
    if [[ -e "$venv" || -L "$venv" ]]; then
        say "The environment in .venv does not work or is of another Python; making it anew"
        rm -rf -- "$venv"
    fi
    say "Making a virtual environment in .venv with $("$python" --version)"
    "$python" -m venv "$venv" || fail "$python could not make $venv (see above)"
}

# What an installation depends on: the requirements, the interpreter and the place.
fingerprint() {
    "$venv_python" - "$root/pyproject.toml" "$root" <<'PY'
import hashlib, pathlib, sys
text = pathlib.Path(sys.argv[1]).read_bytes() + sys.argv[2].encode() + sys.version.encode()
print(hashlib.sha256(text).hexdigest())
PY
}

pip_install() {
    local quiet=(--quiet)
    [[ -t 1 ]] && quiet=() # on a terminal pip's progress bars are welcome
    "$venv_python" -m pip install --disable-pip-version-check "${quiet[@]}" "$@"
}

set_up() {
    local extra="${1:-}" python stamp
    stamp="$venv/.installed${extra:+-$extra}"
    if [[ -f "$stamp" ]] && venv_works && [[ "$(<"$stamp")" == "$(fingerprint)" ]]; then
        return
    fi
    python="$(find_python)"
    install_missing_packages "$python"
    make_venv "$python"
    # torch goes first and alone: a later resolution then keeps this build of it.
    say "Installing PyTorch (some hundred MB; the first time this takes a few minutes)"
    pip_install "torch>=2.6,<2.14" || fail "pip could not install torch (see above)"
    say "Installing swarm and what it needs${extra:+, with what the ${extra}s need}"
    pip_install --editable "$root${extra:+[$extra]}" || fail "pip could not install swarm (see above)"
    fingerprint >"$stamp"
    say "Ready: $venv"
}

# For the test that looks at the dashboard. Without a browser it is skipped, so nothing fails here.
install_browser() {
    command -v chromium >/dev/null && command -v chromedriver >/dev/null && return
    if [[ "$(id -u)" != 0 ]] || ! command -v apt-get >/dev/null; then
        say "No chromium: the dashboard's test is skipped (apt-get install chromium chromium-driver)"
        return
    fi
    {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends chromium chromium-driver
    } >/dev/null 2>&1 || say "chromium could not be installed: the dashboard's test is skipped"
}
