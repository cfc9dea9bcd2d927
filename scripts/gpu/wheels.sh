#!/usr/bin/env bash
# Gathers wheels for a GPU machine that has no network: wheels.sh [FOLDER]   (default .wheels, which git ignores)
#
# The machine has Python 3.12, numpy, torch for CUDA, triton, transformers and pytest, on Linux x86-64. What else the engine, its tests
# and a mesh import is fetched here, in the versions of this environment ($PYTHON, default .venv/bin/python). There:
#
#   python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl && export PYTHONPATH=SITE
#   python3 -m scripts.gpu.check
#
# $WHEELS names packages instead of these; $TARGET_PYTHON another version than 3.12.
set -euo pipefail
folder=${1:-.wheels}
python=${PYTHON:-.venv/bin/python}
target=${TARGET_PYTHON:-3.12}
names=${WHEELS:-"
  msgspec xxhash orjson psutil safetensors typing_extensions
  pytest-asyncio pytest-timeout hypothesis sortedcontainers
  grpcio grpcio-health-checking grpcio-reflection protobuf googleapis-common-protos
  llguidance
  fastapi starlette annotated-doc pydantic pydantic_core annotated-types typing-inspection uvicorn uvloop httptools h11 click
  anyio idna sniffio httpx httpcore certifi jinja2 MarkupSafe typer rich shellingham markdown-it-py mdurl pygments
  prometheus_client swagger_ui_bundle
  opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-proto
  opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-grpc
"}

platforms=()
for glibc in 39 38 37 36 35 34 33 32 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64 --platform any)
wanted=()
for name in $names; do
  version=$("$python" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$name") ||
    { echo "error: $name is not installed in $python: make install-dev" >&2; exit 1; }
  wanted+=("$name==$version")
done
mkdir -p "$folder"
rm -f "$folder"/*.whl
"$python" -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --python-version "$target" \
  --implementation cp --abi "cp${target//./}" --abi abi3 --abi none "${platforms[@]}" --dest "$folder" "${wanted[@]}"
echo "${#wanted[@]} wheels, $(du -sm "$folder" | cut -f1) MiB, in $folder"
