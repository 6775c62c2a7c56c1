#!/usr/bin/env bash
# bench_cpu.sh - time of a training step on this CPU: FP32 without and with a BLAS, BF16, FP16; PyTorch's.
usage() {
  cat << 'TEXT'
bench_cpu.sh [CASE...]   prints the median ms of a step, on an idle machine and beside one busy process
  cases: a    4 layers, 256 wide, 50,257 ids, batch 4 x 256
         demo 2 layers, 128 wide, 10,000 ids, batch 16 x 128
Variables: REPEATS (5) runs of each program, which take turns, so that a disturbance meets all alike;
STEPS (8) of a run, whose second half counts; THREADS (2); PYTHON (python3), left out if it has no PyTorch;
CFLAGS (-O3 -march=native). As on a CPU without AVX-512:
  CFLAGS='-O3 -march=x86-64-v3 -DMTT_PORTABLE' OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 \
  ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 tools/bench_cpu.sh a
Exit status: 1 if a program cannot be built or a run of ours failed, 2 for a wrong call.
TEXT
}
set -u -o pipefail
export LC_ALL=C # decimals have a point
[ "${BASH_VERSINFO[0]}" -ge 4 ] || { echo "bench_cpu: needs bash 4: brew install bash" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3} repeats=${REPEATS:-5} steps=${STEPS:-8} failed=
export OMP_NUM_THREADS=${THREADS:-2} OMP_WAIT_POLICY=passive # threads that spin slow each other down
fail() { echo "bench_cpu: $2" >&2; exit "$1"; }

# NAME: layers, heads, width, ids, batch, tokens
declare -A sizes=([a]="4 8 256 50257 4 256" [demo]="2 4 128 10000 16 128")
case ${1:-} in --help | -h) usage; exit 0;; esac
for name; do [ -n "${sizes[$name]:-}" ] || fail 2 "there is no case $name (--help lists all)"; done
[ $# -gt 0 ] || set -- a demo

work=$(mktemp -d) || fail 1 "cannot make a folder for programs in ${TMPDIR:-/tmp}"
busy=
finish() { [ -z "$busy" ] || kill "$busy"; rm -rf "$work"; }
trap finish EXIT
build() { # PROGRAM FLAG...
  local program=$1; shift
  ${CC:-cc} ${CFLAGS:--O3 -march=native} -std=gnu99 -fopenmp "$root/tools/profile.c" -o "$work/$program" \
    "$@" -lm
}
build plain || fail 1 "cannot build tools/profile.c"
programs="plain_fp32 plain_bf16 plain_fp16"
blas=$(ls -d /usr/lib/*/openblas-openmp 2> /dev/null | head -n 1)
if [ -n "$blas" ] && build blas -DMTT_CBLAS -L"$blas" -lopenblas -Wl,-rpath,"$blas"; then
  programs+=" blas_fp32"
else echo "bench_cpu: no OpenBLAS for OpenMP: its rows are left out" >&2
fi
if "$python" -c 'import torch' 2> /dev/null; then programs+=" torch_fp32 torch_bf16"
else echo "bench_cpu: $python has no PyTorch: its rows are left out" >&2; fi

cat > "$work/step.py" << 'PYTHON'
import sys, time, torch
from torch import nn
from torch.nn import functional as F
bf16, steps = sys.argv[1] == "bf16", int(sys.argv[2])
layers, heads, width, ids, batch, tokens = map(int, sys.argv[3:])
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        qkv = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (t.view(batch, tokens, heads, -1).transpose(1, 2) for t in qkv)
        scores = (q @ k.transpose(2, 3) / (width // heads) ** 0.5).masked_fill(mask, float("-inf"))
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))
        return x + self.out(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))
torch.set_num_threads(int(__import__("os").environ["OMP_NUM_THREADS"]))
mask = torch.triu(torch.ones(tokens, tokens, dtype=torch.bool), 1)
model = nn.Sequential(nn.Embedding(ids, width), *(Layer() for _ in range(layers)), nn.LayerNorm(width),
                      nn.Linear(width, ids))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
x, y = torch.randint(0, ids, (2, batch, tokens))
for step in range(steps):
    if step == steps // 2: start = time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = F.cross_entropy(model(x).view(-1, ids), y.view(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
print((time.perf_counter() - start) / (steps - steps // 2) * 1e3)
PYTHON

run() { # PROGRAM_PRECISION CASE: ms of a step
  local layers heads width ids batch tokens precision=${1#*_}
  read -r layers heads width ids batch tokens <<< "${sizes[$2]}"
  case $1 in
    torch_*) "$python" "$work/step.py" $precision $steps ${sizes[$2]} 2> "$work/log";;
    *) "$work/${1%_*}" --device cpu --technique $precision --steps $steps --only-step --layers $layers \
      --heads $heads --d-model $width --vocab-size $ids --batch-size $batch --seq-len $tokens \
      2> "$work/log" | sed -nE 's/.*"ms": ([0-9.]+).*/\1/p';;
  esac
}
echo "| case | load | program | ms a step, median of $repeats | least | most |"
echo "|---|---|---|---:|---:|---:|"
for name; do
  for load in idle busy; do
    [ $load = idle ] || { while :; do :; done & busy=$!; }
    rm -f "$work"/ms.*
    for ((i = 0; i < repeats; i++)); do
      for program in $programs; do
        ms=$(run $program "$name") && [ -n "$ms" ] && echo "$ms" >> "$work/ms.$program" ||
          { failed=1; echo "bench_cpu: $program: $(tail -n 1 "$work/log")" >&2; }
      done
    done
    for program in $programs; do
      [ -s "$work/ms.$program" ] && sort -n "$work/ms.$program" | awk -v row="$name | $load | $program" '
        {ms[NR] = $1} END {printf "| %s | %.0f | %.0f | %.0f |\n", row, ms[int((NR + 1) / 2)], ms[1], ms[NR]}'
    done
    [ -z "$busy" ] || { kill "$busy"; wait "$busy" 2> /dev/null; busy=; }
  done
done
[ -z "$failed" ]
