#!/usr/bin/env bash
# Makes one plan and holds it against limits: what the templates for GitHub and GitLab run, and what a test runs.
#
#   MODEL=Qwen/Qwen3-8B BUDGET="--budget 24GB --batch 8 --context 32768" GATES="--max-kl 0.01" ci/plan.sh
#
# MODEL         a folder, a hub id or an embedded model's name
# BUDGET        options of `kvcal plan`: the budget and its workload
# PLAN_OPTIONS  further options of `kvcal plan`, such as --data corpus.jsonl
# EVAL_OPTIONS  further options of `kvcal eval`
# GATES         limits of `kvcal eval`; exit code 7 beyond one of them
# OUT           folder of the results; default artifacts/ci
#
# Where 16 bits fit in the budget there is no plan, and the exit code is 0: report.txt says so.
# OUT then holds plan.safetensors, report.txt, size.json, plan.json and evaluation.json; OUT/made holds what another run
# resumes from. Options are split at spaces.
set -euo pipefail
: "${MODEL:?set MODEL, such as Qwen/Qwen3-8B}" "${BUDGET:?set BUDGET, such as --budget 24GB}"
out=${OUT:-artifacts/ci}
read -ra budget <<< "$BUDGET"
read -ra plan_options <<< "${PLAN_OPTIONS:-}"
read -ra eval_options <<< "${EVAL_OPTIONS:-}"
read -ra gates <<< "${GATES:-}"
mkdir -p "$out"

kvcal doctor
kvcal size "$MODEL" --json > "$out/size.json"
kvcal plan "$MODEL" "${budget[@]}" "${plan_options[@]}" --out "$out/made" -o "$out/plan.safetensors" --json \
  > "$out/plan.json"

if grep -q '"verdict": "16-bit-fits"' "$out/plan.json"; then
  rm -f "$out/plan.safetensors"  # of an earlier budget
  echo "16 bits fit: $MODEL needs no plan for $BUDGET" > "$out/report.txt"
  exit 0
fi

# The report repeats the evaluation from the rows that the JSON's call has measured, and never decides.
evaluate=(kvcal eval "$out/plan.safetensors" --model "$MODEL" "${eval_options[@]}" "${gates[@]}" --out "$out/made/eval")
code=0
"${evaluate[@]}" --json > "$out/evaluation.json" || code=$?
{
  kvcal inspect "$out/plan.safetensors"
  "${evaluate[@]}" --quiet || true
} > "$out/report.txt"
exit "$code"
