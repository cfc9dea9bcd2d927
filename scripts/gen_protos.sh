#!/usr/bin/env bash
# Generates kvmesh/rpc/pb from protos/. With --check, fails when the generated code is out of date.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
export PATH="$(cd "$(dirname "$python")" && pwd):$PATH"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m grpc_tools.protoc -I protos --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" \
  --mypy_grpc_out="quiet:$out" protos/kvmesh/v1/*.proto $(cd protos && find envoy -name '*.proto' | sort)
# The stubs live inside the package kvmesh.rpc.pb; descriptor names stay kvmesh/v1/*.proto.
sed -i -E 's/from kvmesh\.v1 import/from kvmesh.rpc.pb import/; s/\bkvmesh\.v1\.([a-z]+_pb2)/kvmesh.rpc.pb.\1/g; s/import kvmesh\.v1\./import kvmesh.rpc.pb./' "$out"/kvmesh/v1/*.py "$out"/kvmesh/v1/*.pyi
touch "$out/kvmesh/v1/__init__.py"
# Envoy's subset lies flat beside them, as envoy_*; its packages are those of the descriptors alone.
for file in $(cd "$out" && find envoy -type f | sort); do
  sed -E 's/\bfrom envoy\.[a-z0-9_.]+ import ([a-z_]+_pb2)/from kvmesh.rpc.pb import envoy_\1/; s/\benvoy\.[a-z0-9_.]+\.v3\.([a-z_]+_pb2)\b/kvmesh.rpc.pb.envoy_\1/g' "$out/$file" >"$out/kvmesh/v1/envoy_$(basename "$file")"
done
if [ "${1:-}" = "--check" ]; then
  diff -rq -x __pycache__ "$out/kvmesh/v1" kvmesh/rpc/pb || { echo "kvmesh/rpc/pb is out of date: run scripts/gen_protos.sh" >&2; exit 1; }
else
  rm -f kvmesh/rpc/pb/*_pb2* && cp "$out"/kvmesh/v1/* kvmesh/rpc/pb/
fi
