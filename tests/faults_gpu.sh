#!/usr/bin/env bash
# faults_gpu.sh BUILD_DIR [TECHNIQUE...] - builds platforms/faults_cuda.c, in which each CUDA call of a
# trainer's life fails once, and runs it where there is a GPU. Every call of mtt_kernels.cu must be in its
# tables.
export LC_ALL=C # decimals have a point
build=$1; shift
mkdir -p "$build" && tools/deps.sh || exit 1
if ! command -v nvcc > /dev/null; then
  echo "faults_gpu.sh: nvcc is missing: it comes with the CUDA Toolkit" >&2
  exit 3
fi
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")
arch=-gencode=arch=compute_90a,code=sm_90a kernels=$build/kernels_90a.o # of .ci/run
if nvidia-smi -L > /dev/null 2>&1; then arch=$(tools/arch.sh) kernels=$build/faults_kernels.o; fi
[ "$kernels" -nt mtt_kernels.cu ] && [ "$kernels" -nt mtt.h ] ||
  nvcc -O1 "$arch" -c mtt_kernels.cu -o "$kernels" || exit 1
names=$(sed -nE 's/^CALL[A-Z_]*\(([a-zA-Z0-9_]+),.*/\1/p; s/^cuda.* __wrap_([A-Za-z]+)\(.*/\1/p' \
  tests/platforms/faults_cuda.c)
missing=$(nm -u "$kernels" | awk '{ print $2 }' |
  grep -E '^(cuda|cublas|__cudaLaunch)' | grep -vE 'Get(Error|Status)(Name|String)$' | grep -vxF "$names")
[ -z "$missing" ] || { echo "FAILED: calls of mtt_kernels.cu that are not in the tables:" $missing; exit 1; }
# shellcheck disable=SC2046
gcc -std=gnu99 -O1 -Wall -Wextra -I"$cuda/include" $(printf -- '-Wl,--wrap=%s ' $names) \
  tests/platforms/faults_cuda.c "$kernels" -o "$build/faults_cuda" -L"$cuda/lib64" -lcublasLt \
  -lcudart_static -ldl -lrt -lpthread -lstdc++ -lm && "$build/faults_cuda" "$@"
