#!/usr/bin/env bash
# `make test-compose`: builds the image, starts the mesh in containers and runs tests/compose against it.
#
#   a Docker daemon is used if there is one; else root on Debian 12 gets one, which is ended with the tests
#   KVMESH_WHEELS=FOLDER          wheels that the image is made from first (a CPU torch); default: PIP_FIND_LINKS
#   COMPOSE_TEST_FAULTS=REGEX     the faults of these names, . for all; default: one of each kind
#   COMPOSE_TEST_TABLE, _LOGS=FILE   what to keep
#
# Without a daemon it says why, runs nothing and leaves with 0: the tests are skipped, visibly.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
began=$SECONDS
ours=

skip() {
  echo "tests/compose is skipped: $*"
  echo "  a Docker daemon with Compose v2, or root on Debian 12, would run it"
  # pytest shows the skip and its reason
  exec "$python" -m pytest -q tests/compose/test_compose.py
}

end() { [ -z "$ours" ] || scripts/docker/daemon.sh stop || true; }
trap end EXIT

step() { echo "── $* ($((SECONDS - began)) s)"; }

if ! docker info >/dev/null 2>&1; then
  if ! command -v dockerd >/dev/null; then
    step "installing a Docker daemon"
    scripts/docker/daemon.sh install >/tmp/kvmesh-docker-install.log 2>&1 ||
      skip "no Docker daemon, and none could be installed: $(tail -n 1 /tmp/kvmesh-docker-install.log)"
  fi
  step "starting a Docker daemon"
  said=$(scripts/docker/daemon.sh start 2>&1) || skip "the Docker daemon does not start: $(tail -n 1 <<<"$said")"
  ours=yes
fi
docker compose version >/dev/null 2>&1 || skip "docker has no Compose v2"
step "base images"
said=$(scripts/docker/base_images.sh 2>&1) || skip "no base images: $(tail -n 1 <<<"$said")"
step "building the image"
wheels=${KVMESH_WHEELS:-${PIP_FIND_LINKS:-compose/wheels}}
[ -d "$wheels" ] || wheels=compose/wheels
docker build -q -t kvmesh-redis:test - >/dev/null <<'D' &
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/* \
 && mkdir /data && chown redis /data
USER redis
WORKDIR /data
D
redis=$!
docker build -q --build-context "wheels=$wheels" -f compose/Dockerfile -t kvmesh:test . >/dev/null
wait "$redis"
step "tests"
KVMESH_IMAGE=kvmesh:test KVMESH_REDIS_IMAGE=kvmesh-redis:test COMPOSE_TEST=1 \
  "$python" -m pytest -q -s tests/compose/test_compose.py "$@"
step "done"
