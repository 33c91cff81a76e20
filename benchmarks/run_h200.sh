#!/usr/bin/env bash
# Every kernel and rollout figure of one GPU, into benchmarks/results/. Set COMMIT where the code is no git checkout, and
# CONFIGS to a folder of config.json files named after their models (Qwen2.5-7B-Instruct.json, ...).
set -euo pipefail
cd "$(dirname "$0")/.."
QERL="${PYTHON:-python} -m qerl.cli.main"
COMMIT_OPTION=(${COMMIT:+--commit "$COMMIT"})
RESULTS=${RESULTS:-benchmarks/results}
case "${1:-all}" in
  kernels | all) $QERL bench kernels --out "$RESULTS/kernels-h200.json" "${COMMIT_OPTION[@]}" ;;&
  lora | all) $QERL bench kernels --parts linears --lora-rank 32 --out "$RESULTS/kernels-lora-h200.json" "${COMMIT_OPTION[@]}" ;;&
  rollout | all)
    $QERL bench rollout --config-json "${CONFIGS:?folder of config.json files}/Qwen2.5-7B-Instruct.json" --name 7B \
      --weights nvfp4,bf16 --lora-rank 0,32 --prefill 256x256 --out "$RESULTS/rollout-h200.json" "${COMMIT_OPTION[@]}" ;;&
  rollout-32b | all)
    $QERL bench rollout --config-json "${CONFIGS:?folder of config.json files}/Qwen2.5-32B-Instruct.json" --name 32B \
      --weights nvfp4 --lora-rank 0,32 --batch 1,8,64 --out "$RESULTS/rollout-32b-h200.json" "${COMMIT_OPTION[@]}" ;;&
  long-tailed | all)
    $QERL bench rollout --config-json "${CONFIGS:?folder of config.json files}/Qwen2.5-7B-Instruct.json" --name 7B \
      --weights nvfp4 --lora-rank 32 --lengths lognormal --batch 32 --out "$RESULTS/rollout-long-h200.json" \
      "${COMMIT_OPTION[@]}" ;;
  kernels | lora | rollout | rollout-32b) ;;
  *) echo "usage: $0 [all | kernels | lora | rollout | rollout-32b | long-tailed]" >&2; exit 2 ;;
esac
