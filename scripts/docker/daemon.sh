#!/usr/bin/env bash
# A Docker daemon by hand, where there is none: Debian 12, root, no systemd. `daemon.sh install | start | stop`
#
#   install   engine, Compose v2 and buildx; the last two are newer than Debian 12 and come from the next release, whose
#             packages need only its libc. /etc/apt is left as it is.
#   start     dockerd on a data root of its own, at the usual socket
#   stop      ends what `start` began, and takes its firewall rules and its bridge away
#
# Root without CAP_SYS_RESOURCE (a sandbox) may only lower limits: no `memlock: -1` in compose files there.
set -euo pipefail
home=${KVMESH_DOCKER_HOME:-/var/lib/kvmesh-docker}
pid_file=$home/dockerd.pid
socket=/var/run/docker.sock

fail() { echo "error: $*" >&2; exit 1; }

install() {
  [ "$(id -u)" = 0 ] || fail "a Docker daemon is installed by root only"
  command -v apt-get >/dev/null || fail "no apt-get here: install Docker and its Compose plugin yourself"
  export DEBIAN_FRONTEND=noninteractive
  local mirror view folder
  mirror=$(awk '/^URIs:/ {print $2; exit}' /etc/apt/sources.list.d/debian.sources 2>/dev/null) || true
  [ -n "$mirror" ] || mirror=$(awk '$1 == "deb" {print $2; exit}' /etc/apt/sources.list 2>/dev/null) || true
  [ -n "$mirror" ] || fail "no Debian package source is configured"
  # The package would start a service.
  [ -e /usr/sbin/policy-rc.d ] || { printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod +x /usr/sbin/policy-rc.d; }
  folder=$(mktemp -d)
  chmod 755 "$folder"
  mkdir -p "$folder"/{lists/partial,cache/archives/partial,packages}
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$folder/sources.list"
  view=(-o "Dir::Etc::sourcelist=$folder/sources.list" -o "Dir::Etc::sourceparts=/dev/null"
    -o "Dir::State::lists=$folder/lists" -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=root)
  apt-get -qq update
  apt-get "${view[@]}" -qq update
  (cd "$folder/packages" && apt-get "${view[@]}" -qq download docker.io docker-cli containerd docker-compose docker-buildx)
  apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends "$folder"/packages/*.deb iptables >/dev/null
  rm -rf "$folder"
}

start() {
  mkdir -p "$home"
  if [ -s "$pid_file" ] && kill -0 "$(cat "$pid_file")" 2>/dev/null; then return; fi
  rm -f "$pid_file"
  cat /proc/sys/net/ipv4/ip_forward >"$home/ip_forward.before"
  setsid nohup dockerd --data-root "$home/data" --exec-root "$home/exec" --pidfile "$pid_file" -H "unix://$socket" \
    >"$home/dockerd.log" 2>&1 </dev/null &
  for _ in $(seq 150); do
    docker info >/dev/null 2>&1 && return
    sleep 0.2
  done
  tail -n 15 "$home/dockerd.log" >&2
  fail "the Docker daemon does not start; all it said is in $home/dockerd.log"
}

rules_away() { # the daemon's rules in one table of one family, then its emptied chains
  local tables=$1 table=$2 rule chain
  { "$tables" -t "$table" -S 2>/dev/null | grep -E '^-A.*(DOCKER|docker0|br-[0-9a-f]{12}|172\.17\.0\.0/16)' || true; } |
    sed 's/^-A/-D/' | while read -r rule; do eval "$tables -t $table $rule" 2>/dev/null || true; done
  for chain in $({ "$tables" -t "$table" -S 2>/dev/null || true; } | awk '$1 == "-N" && $2 ~ /^DOCKER/ {print $2}'); do
    "$tables" -t "$table" -F "$chain" 2>/dev/null || true
    "$tables" -t "$table" -X "$chain" 2>/dev/null || true
  done
}

stop() {
  [ -s "$pid_file" ] || return 0
  local pid tables table
  pid=$(cat "$pid_file")
  kill "$pid" 2>/dev/null || true
  for _ in $(seq 300); do kill -0 "$pid" 2>/dev/null || break; sleep 0.2; done
  kill -0 "$pid" 2>/dev/null && fail "the Docker daemon (pid $pid) does not stop"
  for tables in iptables ip6tables; do
    "$tables" -P FORWARD ACCEPT 2>/dev/null || true
    for table in filter nat raw; do rules_away "$tables" "$table"; done
  done
  ip link del docker0 2>/dev/null || true
  [ ! -f "$home/ip_forward.before" ] || cat "$home/ip_forward.before" >/proc/sys/net/ipv4/ip_forward
}

case ${1:-} in
  install | start | stop) "$1" ;;
  *) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
