#!/usr/bin/env bash
# sanitize_gpu.sh BUILD_DIR [PROGRAM] - a small step of each technique, and text, under the four tools of
# compute-sanitizer, on a GPU. memcheck and synccheck watch cuBLASLt's kernels, too. initcheck and racecheck
# misread those, so the host computes the products for them.
export LC_ALL=C # decimals have a point
build=$1 program=${2:-$1/sanitize_cuda} passed=0 failed=0 skipped=0
if ! command -v compute-sanitizer > /dev/null; then
  echo "compute-sanitizer is missing: it comes with the CUDA Toolkit" >&2
  exit 3
fi
if [ $# -lt 2 ]; then # a program built elsewhere is taken as it is
  mkdir -p "$build"
  nvcc -O3 -lineinfo "$(tools/arch.sh)" -c mtt_kernels.cu -o "$build/sanitize_kernels.o" &&
    nvcc -O2 tests/platforms/sanitize_cuda.c "$build/sanitize_kernels.o" -o "$program" -lcublasLt -ldl \
      -Xlinker --wrap=cudaGetDriverEntryPointByVersion || exit 1
fi
for technique in $("$program"); do
  for tool in memcheck initcheck synccheck racecheck; do
    case $tool in initcheck | racecheck) products=host;; *) products=;; esac
    out=$(timeout 120 compute-sanitizer --tool $tool --print-limit 3 --error-exitcode 9 \
      "$program" $technique $products 2>&1)
    status=$?
    if [ $status = 0 ]; then passed=$((passed + 1)); continue; fi
    failed=$((failed + 1))
    echo "FAILED: $technique under $tool, status $status"
    printf '%s\n' "$out" | grep -vE 'Host Frame|^=+ *$' | head -12 | cut -c1-240
  done
done
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ] && [ $passed -gt 0 ]
