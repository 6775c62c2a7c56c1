#!/usr/bin/env bash
# emulate.sh BUILD_DIR [SOURCE_DIR] [TEST...] - runs tests/test_cuda.c on a machine without a GPU: emulate.h
# runs the kernels on the CPU. SOURCE_DIR (default: here) has mtt.h, mtt_kernels.cu and tests/. TEST is an
# argument list of test_cuda, such as 'fp8 40', or `ranks`: test_together.c with up to 4 ranks, which
# copy from each other's memory or have nccl_fake.c; or `trainer`: tools/trainer.c asks it. Several run side
# by side. Default: a small share.
#
#   tests/emulate.sh build               the portable kernels, as for an RTX 40
#   ARCH=900 tests/emulate.sh build      those that an H100 or H200 runs, with the >>hopper room
#   ARCH=750 tests/emulate.sh build      those that a T4 runs
#   tests/emulate.sh build ../next 'quick fp8 12' 'operations 0 60'
#
# ARCH=750, 800, 890 (default) or 900: the compute capability. Needs g++, Boost.Context
# (libboost-context-dev) and CUDA's headers (CUDA_HOME, default /usr/local/cuda), no CUDA library. Not
# covered: speed, blocks that run at the same time (but for those of a cluster), missing fences of the
# asynchronous proxy, and races that neither order of a block's threads shows.
export LC_ALL=C # decimals have a point
here=$(cd "$(dirname "$0")" && pwd) || exit 1
build=$(mkdir -p "$1/emulate" && cd "$1/emulate" && pwd) || exit 1
shift
source=$here/..
if [ -d "$1" ]; then source=$1; shift; fi
source=$(cd "$source" && pwd)
arch=${ARCH:-890}
if [ $# = 0 ] && [ "$arch" = 750 ]; then set -- 'quick operations 2 24' failures; fi
if [ $# = 0 ] && [ "$arch" = 900 ]; then set -- 'quick operations 1 1' 'quick fp8 3' failures; fi
# part 0 runs nothing: it counts the shapes of a whole run on a GPU, at least 500 for each operation
[ $# -gt 0 ] ||
  set -- 'quick operations 8 60' 'quick fp8 12' 'part 0 1 operations 80 1280' failures ranks trainer
export OMP_NUM_THREADS=1 # tests run side by side
program=$source/tests/test_cuda.c
if ! grep -q '"quick"' "$program"; then
  echo "emulate.sh: $program does not know quick; the one beside this script is taken"
  program=$build/tests/test_cuda.c
  mkdir -p "$build/tests"
  cp "$here"/test_cuda.c "$here"/test.h "$here"/techniques.h "$here"/away.h "$build/tests"
  cp "$source/mtt.h" "$build"
fi
flags=(-O2 -g1 -march=native -fopenmp "-I${CUDA_HOME:-/usr/local/cuda}/include")

gcc -std=gnu99 "${flags[@]}" -DMTT_CUDA= -c "$program" -o "$build/test.o" & test=$!
case " $* " in
  *" ranks "*)
    gcc -std=gnu99 "${flags[@]}" -DMTT_CUDA= -c "$source/tests/units/test_together.c" \
      -o "$build/together.o" &&
      gcc -std=gnu99 "${flags[@]}" -shared -fPIC "$source/tests/platforms/nccl_fake.c" \
        -o "$build/libnccl.so.2" || exit 1 ;;
esac
case " $* " in
  *" trainer "*)
    gcc -std=gnu99 "${flags[@]}" -DMTT_CUDA= -c "$source/tools/trainer.c" -o "$build/trainer.o" || exit 1 ;;
esac
# -ffp-contract=off: __fmul_rn must not be fused. -fno-strict-aliasing: kernels read bytes as other types. -w:
# nvcc's warnings are the ones that count. -Wno-psabi: of gcc 4.6.
flags+=(-std=c++17 -ffp-contract=off -fno-strict-aliasing -w -Wno-psabi)
if [ "$arch" = 900 ]; then room=-D__CUDA_ARCH_FEAT_SM90_ALL; else room=-DMTT_NO_HOPPER; fi
python3 "$here/platforms/emulate.py" "$source/mtt_kernels.cu" "$build/kernels.ii" g++ "${flags[@]}" $room \
  "-DEMULATE_ARCH=$arch" "-I$source" -include "$here/platforms/emulate_host.h" || exit 1
g++ "${flags[@]}" -c "$build/kernels.ii" -o "$build/kernels.o" || exit 1
wait $test || exit 1
link() { # OBJECT PROGRAM
  g++ -fopenmp -rdynamic "$build/$1.o" "$build/kernels.o" -o "$build/$2" -l:libboost_context.a -ldl -lm
}
link test test_cuda || exit 1
[ ! -f "$build/together.o" ] || link together test_together || exit 1
[ ! -f "$build/trainer.o" ] || link trainer trainer || exit 1
ask_trainer() { # the free memory of the device is a budget; a variable that changes precision is refused
  . "$here/lib.sh"
  local find=("$build/trainer" --find-max-batch --device cuda --preset tiny)
  "${find[@]}" > "$build/out" 2> "$build/err"
  check "free memory is said" says "$build/err" 'the device has 16384.0 MiB free'
  "${find[@]}" --memory-budget 16G > "$build/given" 2> "$build/err"
  check "it is the budget" eval '[ -s "$build/out" ] && cmp "$build/out" "$build/given"'
  NVIDIA_TF32_OVERRIDE=1 "${find[@]}" > "$build/out" 2> "$build/err"; code=$?
  check "an environment of another precision ends with $code, not 2" eval \
    '[ $code = 2 ] && says "$build/err" "unset NVIDIA_TF32_OVERRIDE"'
  closing_line
}

one() { # NUMBER ARGUMENTS: the log says so where the program ends early
  local start=$SECONDS
  local command=("$build/test_cuda" $2) # shellcheck disable=SC2206
  if [ "$2" = ranks ]; then command=(env "LD_LIBRARY_PATH=$build" "$build/test_together" emulated 4); fi
  [ "$2" != trainer ] || command=(ask_trainer)
  "${command[@]}" > "$build/log$1" 2>&1
  local status=$?
  grep -q '^[0-9]* passed,' "$build/log$1" || echo "FAILED: test_cuda $2, status $status" >> "$build/log$1"
  echo "test_cuda $2: $((SECONDS - start)) s" >> "$build/log$1"
}
number=0
for arguments; do
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
  number=$((number + 1))
  one $number "$arguments" &
done
wait
for ((i = 1; i <= number; i++)); do cat "$build/log$i"; done > "$build/log"
grep -E '^(FAILED|skipped|test_cuda |[0-9]+ passed)' "$build/log"
awk '/^[0-9]+ passed,/ {p += $1; f += $3; s += $5} /^FAILED: test_cuda/ {f++}
  END {printf "%d passed, %d failed, %d skipped\n", p, f, s; exit f || !p}' "$build/log"
