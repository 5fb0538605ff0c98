#!/usr/bin/env bash
# Installs what `make bench` needs: an environment of its own for the peers, and the servers that Debian packages.
# Without root or apt-get the servers have to be there; the report says of each that is missing that it failed.
#   bench/install.sh ENVIRONMENT [PYTHON]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=$1
python=${2:-python3}

test -x "$environment/bin/python" || "$python" -m venv "$environment"
install() {
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-warn-script-location --no-build-isolation "$@"
}
install --require-hashes --use-pep517 -r requirements/build.txt
install --require-hashes --use-pep517 -r requirements/base.txt -r requirements/bench.txt
install --no-deps -e .

missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
command -v rabbitmq-server >/dev/null || missing+=(rabbitmq-server)
if ((${#missing[@]} == 0)) || ! command -v apt-get >/dev/null || ((EUID != 0)); then
    exit 0
fi
# Packages of servers start them; the bench starts its own.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update >/dev/null
apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
