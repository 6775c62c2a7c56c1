#!/usr/bin/env bash
# gpu.sh PROGRAM JSON - runs the GPU tests and writes what they proved, on which GPU and for which sources.
program=$1 json=$2
out=$("$program" 2>&1); status=$?
printf '%s\n' "$out"
line=$(printf '%s\n' "$out" | grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' | tail -1)
read -r passed _ failed _ skipped _ <<< "${line:-0 passed, 1 failed, 0 skipped}"
case $out in *"skipped: "*CUDA*) exit $status;; esac # no GPU: nothing to write down
[ $status = 0 ] || [ "$failed" != 0 ] || failed=1
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -1; }
blob() { { printf 'blob %d\0' "$(wc -c < "$1")"; cat "$1"; } | sha1sum | cut -d' ' -f1; } # as git hash-object
{
  printf '{"date": "%s", "gpu": "%s",' "$(date -u +%Y-%m-%d)" "$(query name)"
  printf ' "driver": "%s",' "$(query driver_version)"
  printf ' "cuda": "%s",' "$(nvidia-smi | grep -oE 'CUDA Version: [0-9.]+' | grep -oE '[0-9.]+')"
  printf ' "passed": %d, "failed": %d, "skipped": %d,\n "sources": {' "$passed" "$failed" "$skipped"
  comma=
  for file in mtt.h mtt_kernels.cu tests/test_cuda.c; do
    printf '%s"%s": "%s"' "$comma" $file "$(blob $file)"
    comma=', '
  done
  printf '}}\n'
} > "$json"
exit $status
