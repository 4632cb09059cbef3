#!/usr/bin/env bash
# A first user's way: the wheel is built and installed into an empty environment; then from a model to a plan, the
# reasons for its bits, a report and a gate that fails. Commands are those of docs/first-user.md, whose outputs this
# writes anew; it fails where a command does not end as the page says.
#
#   make first-user          # minutes, most of them pip's
#
# PYTHON  the interpreter of the environment that builds the wheel, with hatchling
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
page=$root/docs/first-user.md
python=${PYTHON:-python3}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

"$python" -m pip wheel -q --no-deps --no-build-isolation --wheel-dir "$place" "$root" >&2
wheel=$(basename "$place"/kvcal-*.whl)
"$python" -m venv "$place/venv"
"$place/venv/bin/python" -m pip install -q --disable-pip-version-check --constraint "$root/requirements.lock" \
  "$place/$wheel[compile]" >&2
export PATH="$place/venv/bin:$PATH" COLUMNS=80
unset PYTHONPATH VIRTUAL_ENV
cd "$place"
case $(command -v kvcal) in "$place"/*) ;; *) echo "kvcal is not the one that was installed" >&2; exit 1 ;; esac

{
  sed '/^```text$/,$d' "$page"
  echo '```text'
  while IFS= read -r line; do
    echo "\$ $line"
    wanted=$(awk -v line="\$ $line" '$0 == line {at = 1; next} /^\$ / {at = 0} at && /^\[exit / {print $2 + 0}' "$page")
    code=0
    eval "$line" > output 2>&1 < /dev/null || code=$?
    grep -v "Loading weights" output | sed 's/ *$//' || true
    [ "$code" = 0 ] || echo "[exit $code]"
    [ "$code" = "${wanted:-0}" ] || { echo "exit code $code, expected ${wanted:-0}: $line" >&2; cat output >&2; exit 1; }
  done < <(sed -n 's/^\$ //p' "$page")
  echo '```'
} > written.md
test -s artifacts/first/small/report.html
cp written.md "$page"
echo "first user: every command of docs/first-user.md ended as it says; $(wc -c < artifacts/first/small/report.html)" \
  "bytes of report"
