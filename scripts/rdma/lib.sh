# shellcheck shell=bash
# Sourced by the scripts of this folder. Nothing here changes the host: apt keeps its lists and archives in $CACHE/apt, packages are
# unpacked, never installed, and root is not needed.

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
REPO=$(cd "$HERE/../.." && pwd)
CACHE=${RDMA_GUEST_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvmesh/rdma-guest}
PREBUILT=${RDMA_GUEST_PREBUILT:-$REPO/../shared/rdma}

say() { echo "rdma-guest: $*" >&2; }
fail() { say "$*"; exit 1; }

# need PROGRAM PACKAGE: one line that names what is missing.
need() { command -v "$1" >/dev/null || fail "'$1' is missing (Debian package: $2)"; }

# private_apt NAME [SOURCES.LIST]: fills the array APT with options for an apt of our own; without a list, the host's sources.
private_apt() {
  local dir=$CACHE/apt/$1
  mkdir -p "$dir/lists/partial" "$dir/cache/archives/partial"
  APT=(-qq -o "Dir::State::lists=$dir/lists" -o "Dir::Cache=$dir/cache" -o APT::Sandbox::User= -o Acquire::Retries=1 -o Acquire::http::Timeout=15 -o Acquire::https::Timeout=15)
  if [ -n "${2:-}" ]; then APT+=(-o "Dir::Etc::sourcelist=$2" -o Dir::Etc::sourceparts=/dev/null); fi
  # A broken third-party source must not stop us: what matters is whether the packages are found afterwards.
  apt-get "${APT[@]}" update >"$dir/update.log" 2>&1 || true
}

# unpack_packages DIR PACKAGE...: newest version of each (of the sources in APT) under DIR, laid out as on a host whose /bin, /lib
# and /sbin are links into /usr.
unpack_packages() {
  local dir=$1 d deb; shift
  mkdir -p "$dir"
  for d in bin sbin lib lib64; do mkdir -p "$dir/usr/$d"; ln -sfn "usr/$d" "$dir/$d"; done
  rm -rf "$CACHE/apt/debs"; mkdir -p "$CACHE/apt/debs"
  (cd "$CACHE/apt/debs" && apt-get "${APT[@]}" download "$@") >"$CACHE/apt/download.log" 2>&1 ||
    { tail -3 "$CACHE/apt/download.log" >&2; fail "apt cannot fetch: $* (no network, or not in this Debian's archive)"; }
  for deb in "$CACHE"/apt/debs/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink --no-same-owner -C "$dir"
  done
  rm -rf "$CACHE/apt/debs"
}
