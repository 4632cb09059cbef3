#!/usr/bin/env bash
# Makes one plan and holds it against limits: what the templates for GitHub and GitLab run, and what a test runs.
#
#   MODEL=Qwen/Qwen3-8B BUDGET="--budget 24GB --batch 8 --context 32768" GATES="--max-kl 0.01" ci/plan.sh
#
# MODEL         a folder, a hub id or an embedded model's name
# BUDGET        options of `kvcal plan`: the budget and its workload
# PLAN_OPTIONS  further options of `kvcal plan`, such as --data corpus.jsonl
# EVAL_OPTIONS  further options of `kvcal eval`, which measures 16 bits and fp8, too
# GATES         limits of `kvcal eval` and `kvcal card`; exit code 7 beyond one of them
# CARD_OPTIONS  further options of `kvcal card`, such as --kv-memory 40GB
# LAST          the card of the plan in use; exit code 7 for a worse one. Default: that of the last run that ended well
# OUT           folder of the results; default artifacts/ci
#
# Where 16 bits fit in the budget there is no plan, and the exit code is 0: report.txt says so.
# OUT then holds plan.safetensors, its card README.md, report.txt, size.json, plan.json, evaluation.json and card.json;
# OUT/made holds what another run resumes from. Options are split at spaces.
set -euo pipefail
: "${MODEL:?set MODEL, such as Qwen/Qwen3-8B}" "${BUDGET:?set BUDGET, such as --budget 24GB}"
out=${OUT:-artifacts/ci}
read -ra budget <<< "$BUDGET"
read -ra plan_options <<< "${PLAN_OPTIONS:-}"
read -ra eval_options <<< "${EVAL_OPTIONS:-}"
read -ra gates <<< "${GATES:-}"
read -ra card_options <<< "${CARD_OPTIONS:-}"
last=${LAST:-$out/made/last.md}
mkdir -p "$out"

kvcal doctor
kvcal size "$MODEL" --json > "$out/size.json"
kvcal plan "$MODEL" "${budget[@]}" "${plan_options[@]}" --out "$out/made" --name plan -o "$out/plan.safetensors" \
  --json \
  > "$out/plan.json"

if grep -q '"verdict": "16-bit-fits"' "$out/plan.json"; then
  rm -f "$out/plan.safetensors" "$out/README.md"  # of an earlier budget
  echo "16 bits fit: $MODEL needs no plan for $BUDGET" > "$out/report.txt"
  exit 0
fi

# The report repeats the evaluation from the rows that the JSON's call has measured, and never decides.
evaluate=(kvcal eval "$out/plan.safetensors" --model "$MODEL" --set 'evaluate.against=["fp8"]' "${eval_options[@]}" "${gates[@]}" --out "$out/made/plan")
code=0
"${evaluate[@]}" --json > "$out/evaluation.json" || code=$?
if [ -f "$last" ]; then card_options+=(--against "$last"); fi
kvcal card "$out/made/plan" "${gates[@]}" "${card_options[@]}" --json > "$out/card.json" || code=$?
cp "$out/made/plan/README.md" "$out/README.md"
if [ "$code" = 0 ]; then cp "$out/README.md" "$out/made/last.md"; fi
{
  kvcal inspect "$out/plan.safetensors"
  "${evaluate[@]}" --quiet || true
} > "$out/report.txt"
exit "$code"
