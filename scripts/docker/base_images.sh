#!/usr/bin/env bash
# The two images that compose/Dockerfile and the tests begin with, made here where no registry can be reached:
# debian:bookworm-slim by debootstrap, python:3.11-slim-bookworm from this machine's own Python 3.11, or Debian's.
# They hold this machine's certificates and package source: for this machine, never to be pushed.
set -euo pipefail
cache=${KVMESH_BASE_IMAGES:-/var/cache/kvmesh-base-images}
debian=debian:bookworm-slim python=python:3.11-slim-bookworm
bundle=/etc/ssl/certs/ca-certificates.crt

have() { docker image inspect "$1" >/dev/null 2>&1; }
pulled() { timeout 60 docker pull -q "$1" >/dev/null 2>&1; }
fail() { echo "error: $*" >&2; exit 1; }

if have $debian && have $python; then exit 0; fi
if pulled $debian && pulled $python; then exit 0; fi
[ "$(id -u)" = 0 ] || fail "no registry can be reached, and only root can make base images"
sources=/etc/apt/sources.list.d/debian.sources
mirror=$(awk '/^URIs:/ {print $2; exit}' $sources) security=$(awk '/^URIs:/ && ++n == 2 {print $2}' $sources)
mkdir -p "$cache"

make_debian() {
  local root=$cache/root
  command -v debootstrap >/dev/null || apt-get -qq install -y --no-install-recommends debootstrap >/dev/null
  rm -rf --one-file-system "$root"; mkdir -p "$root"
  debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata bookworm "$root" "$mirror" >"$cache/log" 2>&1 ||
    { tail -n 15 "$cache/log" >&2; fail "debootstrap failed"; }
  # The way to the package sources may be a proxy that signs for itself.
  cp -a /usr/local/share/ca-certificates/. "$root/usr/local/share/ca-certificates/"
  chroot "$root" update-ca-certificates >/dev/null 2>&1
  { echo "deb $mirror bookworm main"; echo "deb $mirror bookworm-updates main"
    [ -z "$security" ] || echo "deb $security bookworm-security main"; } >"$root/etc/apt/sources.list"
  printf 'Acquire::Check-Valid-Until "false";\nAcquire::Check-Date "false";\n' >"$root/etc/apt/apt.conf.d/99here"
  printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"; chmod +x "$root/usr/sbin/policy-rc.d"
  printf '[global]\ncert = %s\ntimeout = 180\nretries = 5\n' $bundle >"$root/etc/pip.conf"
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* "$root"/usr/share/{man,info,locale}/*
  tar -C "$root" --numeric-owner --one-file-system -cf "$cache/debian.tar.part" .
  mv "$cache/debian.tar.part" "$cache/debian.tar"
  rm -rf --one-file-system "$root"
}

make_python() {
  local folder from
  folder=$(mktemp -d)
  from=$(python3.11 -c 'import sys; print(sys.base_prefix)' 2>/dev/null || echo /usr)
  if [ "$from" = /usr ]; then
    cat >"$folder/Dockerfile" <<'D'
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-pip python3-venv python3-dev \
 && rm -rf /var/lib/apt/lists/* /usr/lib/python3.11/EXTERNALLY-MANAGED \
 && for name in python python3 python3.11; do ln -s /usr/bin/python3.11 /usr/local/bin/$name; done
D
  else # relocatable: one that was built from source
    mkdir "$folder/python"
    tar -C "$from" -c --exclude=__pycache__ --exclude=site-packages --exclude=lib/python3.11/test --exclude='*.a' \
      bin/python3.11 include/python3.11 lib/python3.11 lib/libpython3.11.so.1.0 lib/libpython3.11.so | tar -x -C "$folder/python"
    cat >"$folder/Dockerfile" <<'D'
FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends libssl3 libffi8 libsqlite3-0 libncursesw6 libreadline8 \
    libbz2-1.0 liblzma5 zlib1g libexpat1 libuuid1 libnsl2 libtirpc3 libcrypt1 libgdbm6 && rm -rf /var/lib/apt/lists/*
COPY --chown=0:0 python /usr/local
RUN ldconfig && cd /usr/local/bin && ln -s python3.11 python3 && ln -s python3.11 python \
 && mkdir -p /usr/local/lib/python3.11/site-packages && python -m ensurepip >/dev/null
D
  fi
  docker build -q -t $python "$folder" >/dev/null
  rm -rf "$folder"
}

[ -s "$cache/debian.tar" ] || make_debian
docker import -c "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8" -c 'CMD ["bash"]' \
  -c "ENV SSL_CERT_FILE=$bundle REQUESTS_CA_BUNDLE=$bundle CURL_CA_BUNDLE=$bundle" "$cache/debian.tar" $debian >/dev/null
make_python
