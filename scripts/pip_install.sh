#!/usr/bin/env bash
# Runs pip with one line of progress in place of its output: pip_install.sh VENV TITLE ARGUMENTS...
# The whole output is in VENV/pip.log; its end is shown when pip fails.
set -euo pipefail
venv=$1 title=$2
shift 2
log=$venv/pip.log
begun=$SECONDS

show() { # the line that pip is at, on a terminal only
  local line
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    case $line in
      Collecting* | *Downloading* | Building* | *"Preparing metadata"* | "Installing collected"*)
        [ -t 1 ] && printf '\r\033[K  %.70s' "${line#"${line%%[![:space:]]*}"}" ;;
    esac
  done
  [ ! -t 1 ] || printf '\r\033[K'
}

echo "installing $title ..."
: >"$log"
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 </dev/null | show; then
  tail -n 15 "$log" >&2
  echo "error: pip could not install $title; all it said is in $log" >&2
  exit 1
fi
echo "installed $title ($((SECONDS - begun)) s)"
