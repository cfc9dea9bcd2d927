#!/usr/bin/env bash
# build.sh [--no-compile] - make what tests/rdma/guest.py boots, under ${KVMESH_RDMA_GUEST:-~/.cache/kvmesh/rdma-guest}:
#
#   linux       a User-Mode-Linux kernel with Soft-RoCE: taken from linux-uml.xz (and linux-uml.sha256) in $KVMESH_RDMA_PREBUILT
#               (default ../shared/rdma beside the repository) where that is, else compiled (kernel.sh; minutes; not with --no-compile)
#   boot/       the root it starts in: busybox and init
#   overlay/    verbs libraries and tools, perftest, iproute2: laid over the host's files in the guest, never installed here
#   python/     pyverbs of the same version, for PYTHONPATH
#   ready       what all of this was made from; nothing is done again while that is unchanged
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
flock 9

stamp() {
  cat "$HERE"/{build.sh,lib.sh,init,network.sh} | sha256sum
  cat "$PREBUILT/linux-uml.sha256" 2>/dev/null || true
}
if [ -x "$CACHE/linux" ] && [ "$(cat "$CACHE/ready" 2>/dev/null)" = "$(stamp)" ]; then exit 0; fi
rm -f "$CACHE/ready"

take_kernel() {
  local want
  if [ -e "$PREBUILT/linux-uml.xz" ] && [ -e "$PREBUILT/linux-uml.sha256" ]; then
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

# Version of the distribution's pyverbs equals that of its libibverbs, whose private symbols it binds: both come from one archive.
take_packages() {
  need apt-get apt; need dpkg-deb dpkg
  private_apt host
  local python more
  python=$(apt-cache "${APT[@]}" depends python3-pyverbs 2>/dev/null | grep -oE 'libpython3\.[0-9]+' | head -1 || true)
  [ -n "$python" ] || { tail -3 "$CACHE/apt/host/update.log" >&2; fail "no python3-pyverbs in the archives of this machine (Debian and Ubuntu have it; apt needs the network)"; }
  # What these need and the host does not have.
  more=$(apt-get "${APT[@]}" -s install --no-install-recommends "${PACKAGES[@]}" "$python" 2>/dev/null | awk '$1 == "Inst" {print $2}' || true)
  rm -rf "$CACHE/overlay" "$CACHE/python" "$CACHE/pyverbs"
  # shellcheck disable=SC2086  # words
  unpack_packages "$CACHE/overlay" $(printf '%s\n' "${PACKAGES[@]}" $more | sort -u)
  rm -rf "$CACHE"/overlay/usr/share/{doc,man,locale,bash-completion}
  unpack_packages "$CACHE/pyverbs" python3-pyverbs
  mkdir -p "$CACHE/python"
  mv "$CACHE/pyverbs/usr/lib/python3/dist-packages/pyverbs" "$CACHE/python/"
  rm -rf "$CACHE/pyverbs" "$CACHE/apt"
}

make_boot() {
  rm -rf "$CACHE/boot"
  mkdir -p "$CACHE"/boot/{bin,host,over,upper,root,job,proc,sys,dev}
  cp "$CACHE/overlay/usr/bin/busybox" "$CACHE/boot/bin/busybox"
  for applet in $("$CACHE/boot/bin/busybox" --list); do [ "$applet" = busybox ] || ln -s busybox "$CACHE/boot/bin/$applet"; done
  install -m 755 "$HERE/init" "$CACHE/boot/init"
  install -m 755 "$HERE/network.sh" "$CACHE/boot/network.sh"
}

take_kernel
take_packages
make_boot
stamp >"$CACHE/ready"
say "ready in $CACHE"
