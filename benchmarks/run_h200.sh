#!/usr/bin/env bash
# Kernel and rollout figures of one GPU, into benchmarks/results/. CONFIGS: a folder of config.json files named after their
# models (Qwen2.5-7B-Instruct.json, Qwen2.5-32B-Instruct.json). COMMIT: of the code, where this is no git checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
RESULTS=${RESULTS:-benchmarks/results}
COMMON=(${COMMIT:+--commit "$COMMIT"})

qerl() { "${PYTHON:-python}" -m qerl.cli.main "$@"; }
rollout() { # model size, then options
  qerl bench rollout --config-json "${CONFIGS:?folder of config.json files}/Qwen2.5-$1-Instruct.json" --name "$1" \
    --append --out "$RESULTS/rollout-h200.json" "${COMMON[@]}" "${@:2}"
}

kernels() { qerl bench kernels --force --out "$RESULTS/kernels-h200.json" "${COMMON[@]}"; }
lora() { qerl bench kernels --parts linears --lora-rank 32 --append --out "$RESULTS/kernels-h200.json" "${COMMON[@]}"; }
rest() { # below the power limit; longer rests before longer turns
  local linears=(bench kernels --parts linears --append --out "$RESULTS/kernels-h200.json" "${COMMON[@]}")
  qerl "${linears[@]}" --rows 128,256,512,1024 --rest-ms 15
  qerl "${linears[@]}" --rows 2048,4096,8192 --rest-ms 40
}
rollout-7b() { rollout 7B --weights nvfp4,bf16 --lora-rank 32,0 --prefill 256x256; }
rollout-32b() { rollout 32B --weights nvfp4 --lora-rank 32,0 --batch 1,8,64; }
first-token() ( # nothing compiled before; a subshell, so that its trap removes the caches however it ends
  caches=$(mktemp -d)
  trap 'rm -rf "$caches"' EXIT
  XDG_CACHE_HOME=$caches TRITON_CACHE_DIR=$caches/triton rollout 7B --weights nvfp4 --lora-rank 32 --batch 1
)
long-tailed() { rollout 7B --weights nvfp4 --lora-rank 32 --lengths lognormal --batch 32; }

for part in "${@:-first-token kernels lora rest rollout-7b rollout-32b long-tailed}"; do
  for name in $part; do
    declare -F "$name" >/dev/null || { echo "unknown part $name" >&2; exit 2; }
    "$name"
  done
done
