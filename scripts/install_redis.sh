#!/usr/bin/env bash
# Installs redis-server for the tests of several store masters, where it is missing and this user may use apt-get.
# Without it those tests are skipped and say so; nothing else needs it, so this never fails.
set -euo pipefail
command -v redis-server >/dev/null && exit 0

sudo=()
[ "$(id -u)" = 0 ] || sudo=(sudo -n)
if ! command -v apt-get >/dev/null || ! "${sudo[@]}" true 2>/dev/null; then
  echo "redis-server is not installed, and this user may not use apt-get: tests that need it are skipped"
  exit 0
fi
echo "installing redis-server with apt-get ..."
# The program is all that is needed: with RUNLEVEL=1 the package starts no service, where that is heeded.
install() {
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get -qq install -y --no-install-recommends redis-server
}
{ install || { "${sudo[@]}" apt-get -qq update && install; }; } >/dev/null 2>&1 ||
  echo "apt-get could not install redis-server: tests that need it are skipped"
