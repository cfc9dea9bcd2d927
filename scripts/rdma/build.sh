#!/usr/bin/env bash
# build.sh [--no-compile] - make what tests/support/rdma/guest.py boots, under ${RDMA_GUEST_CACHE:-~/.cache/kvmesh/rdma-guest}:
#
#   linux       a User-Mode-Linux kernel with Soft-RoCE: taken from linux-uml.xz (and linux-uml.sha256) in $RDMA_GUEST_PREBUILT
#               (default ../shared/rdma beside the repository) where that is, else compiled (kernel.sh; minutes; not with --no-compile)
#   boot/       the root it starts in: busybox and init
#   overlay/    verbs libraries and tools, perftest, iproute2: laid over the host's files in the guest, never installed here
#   python/     pyverbs of the same version, for PYTHONPATH
#   made/       what each of these was made from; it is made again only when that changes
#
# One builder at a time; a second one waits for it. Exit status 3: only compiling the kernel would help.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

compile=1
[ "${1:-}" != --no-compile ] || compile=
PACKAGES=(libibverbs1 librdmacm1 libibumad3 libnl-3-200 libnl-route-3-200 libpci3 ibverbs-providers ibverbs-utils perftest iproute2 busybox-static)

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the guest needs Linux on x86-64, this is $(uname -sm)"
need flock util-linux; need setpriv util-linux
mkdir -p "$CACHE"
exec 9>"$CACHE/.lock"
flock -w 3600 9 || fail "another build holds $CACHE/.lock"

# once NAME RESULT: what was made from the same things is not made again. Guests may be running from it.
once() {
  local name=$1 from
  from=$("made_from_$name")
  [ ! -e "$CACHE/$2" ] || [ "$(cat "$CACHE/made/$name" 2>/dev/null)" != "$from" ] || return 0
  "make_$name"
  mkdir -p "$CACHE/made"
  echo "$from" >"$CACHE/made/$name"
}

# replace NAME: by NAME.new, whole; what was there stays if making that failed.
replace() {
  rm -rf "$CACHE/$1.old"
  [ ! -e "$CACHE/$1" ] || mv "$CACHE/$1" "$CACHE/$1.old"
  mv "$CACHE/$1.new" "$CACHE/$1"
  rm -rf "$CACHE/$1.old"
}

made_from_kernel() {
  if [ -e "$PREBUILT/linux-uml.xz" ]; then
    cut -d' ' -f1 "$PREBUILT/linux-uml.sha256"
  else
    cat "$CACHE/made/kernel" 2>/dev/null || echo compiled # whatever is there is good
  fi
}
make_kernel() {
  local want
  if [ -e "$PREBUILT/linux-uml.xz" ]; then
    need xz xz-utils
    want=$(cut -d' ' -f1 "$PREBUILT/linux-uml.sha256")
    xz -dc "$PREBUILT/linux-uml.xz" >"$CACHE/linux.part"
    echo "$want  $CACHE/linux.part" | sha256sum -c --quiet - >&2 || fail "$PREBUILT/linux-uml.xz is not what its sha256 says"
    chmod 755 "$CACHE/linux.part"
    mv "$CACHE/linux.part" "$CACHE/linux"
    say "took the kernel of $PREBUILT"
  elif [ ! -x "$CACHE/linux" ]; then
    if [ -z "$compile" ]; then say "no kernel in $CACHE and none prebuilt in $PREBUILT; run: make rdma-guest"; exit 3; fi
    "$HERE/kernel.sh"
  fi
}

# The distribution's pyverbs is of the same version as its libibverbs, whose private symbols it binds: both from one archive.
made_from_packages() { { cat /etc/os-release; echo "${PACKAGES[@]}"; cat "$HERE/lib.sh"; } | sha256sum; }
make_packages() {
  need apt-get apt; need dpkg-deb dpkg
  private_apt host
  local python more
  python=$(apt-cache "${APT[@]}" depends python3-pyverbs 2>/dev/null | grep -oE 'libpython3\.[0-9]+' | head -1 || true)
  if [ -z "$python" ]; then
    tail -3 "$CACHE/apt/host/update.log" >&2
    fail "no python3-pyverbs in this machine's package archives (Debian 12 has it; apt needs the network)"
  fi
  # What these need and the host does not have.
  more=$(apt-get "${APT[@]}" -s install --no-install-recommends "${PACKAGES[@]}" "$python" 2>/dev/null | awk '$1 == "Inst" {print $2}' || true)
  rm -rf "$CACHE/overlay.new" "$CACHE/python.new" "$CACHE/pyverbs"
  # shellcheck disable=SC2086  # words
  unpack_packages "$CACHE/overlay.new" $(printf '%s\n' "${PACKAGES[@]}" $more | sort -u)
  rm -rf "$CACHE"/overlay.new/usr/share/{doc,man,locale,bash-completion}
  unpack_packages "$CACHE/pyverbs" python3-pyverbs
  mkdir -p "$CACHE/python.new"
  mv "$CACHE/pyverbs/usr/lib/python3/dist-packages/pyverbs" "$CACHE/python.new/"
  replace overlay
  replace python
  rm -rf "$CACHE/pyverbs" "$CACHE/apt"
}

made_from_boot() { cat "$HERE"/{init,network.sh} "$CACHE/overlay/usr/bin/busybox" | sha256sum; }
make_boot() {
  local new=$CACHE/boot.new applet
  rm -rf "$new"
  mkdir -p "$new"/{bin,host,over,upper,root,job,proc,sys,dev}
  cp "$CACHE/overlay/usr/bin/busybox" "$new/bin/busybox"
  for applet in $("$new/bin/busybox" --list); do [ "$applet" = busybox ] || ln -s busybox "$new/bin/$applet"; done
  install -m 755 "$HERE/init" "$HERE/network.sh" "$new/"
  replace boot
  say "ready in $CACHE"
}

once kernel linux
once packages python/pyverbs
once boot boot/init
