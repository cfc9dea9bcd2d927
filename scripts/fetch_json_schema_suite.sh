#!/usr/bin/env bash
# Puts JSON Schema's official test suite (draft 2020-12) into VENV/json-schema-suite: fetch_json_schema_suite.sh VENV
# It lies in the source package of jsonschema, in the version that VENV has, so the package index is all that is needed.
# Without it one test is skipped and says so; nothing else needs it, so this never fails.
set -euo pipefail
venv=$1
draft=tests/draft2020-12
[ ! -d "$venv/json-schema-suite/$draft" ] || exit 0

work=$(mktemp -d "$venv/json-schema-suite.XXXXXX")
trap 'rm -rf "$work"' EXIT

fetch() {
  local version
  version=$("$venv/bin/python" -c 'from importlib.metadata import version; print(version("jsonschema"))') &&
    timeout 120 "$venv/bin/python" -m pip download --disable-pip-version-check --quiet --retries 1 --timeout 10 \
      --no-deps --no-binary jsonschema --dest "$work" "jsonschema==$version" &&
    mkdir "$work/suite" &&
    tar -xzf "$work"/jsonschema-*.tar.gz -C "$work/suite" --strip-components=2 --wildcards "*/json/$draft" "*/json/LICENSE" &&
    [ -d "$work/suite/$draft" ] &&
    rm -rf "$venv/json-schema-suite" && # of an older draft, or half of one
    mv "$work/suite" "$venv/json-schema-suite"
}

echo "fetching JSON Schema's test suite ..."
fetch >"$work/log" 2>&1 || {
  tail -n 3 "$work/log"
  echo "JSON Schema's test suite could not be fetched from the package index: its test is skipped"
}
