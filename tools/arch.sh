#!/usr/bin/env bash
# arch.sh [gpu | half] - nvcc's option for this machine's GPUs. On Hopper it is sm_90a, with CUDA 12.5 or
# later: -arch=native gives sm_90, which has no warpgroup products. Where one GPU is too old for mtt, it is
# the option for the newest one.
# With `gpu`: the name of a GPU that mtt can use, of compute capability 7.5 or later. If there is none,
# nothing, and on stderr why not, unless there is no nvidia-smi either.
# With `half`: the 16 bits in which that GPU trains: fp16 if it is a T4 or its like, else bf16.
export LC_ALL=C # decimals have a point
command -v nvidia-smi > /dev/null || { [ -n "${1:-}" ] || echo -arch=native; exit 0; }
gpus=$(nvidia-smi --query-gpu=compute_cap,name --format=csv,noheader 2> /dev/null |
  sed -nE 's/^ *([0-9]+\.[0-9]+), *(.*)$/\1 \2/p' | sort -V)
newest=${gpus##*$'\n'} oldest=${gpus%%$'\n'*}
too_old() { [[ $1 =~ ^([0-6]\.|7\.[0-4]) ]]; }
if [ "${1:-}" = half ]; then
  [ -z "$newest" ] || too_old "$newest" || case $newest in 7.*) echo fp16;; *) echo bf16;; esac
  exit 0
fi
if [ "${1:-}" = gpu ]; then
  if [ -z "$newest" ]; then
    echo "nvidia-smi names no GPU: is its driver loaded, and new enough? The CPU is used." >&2
  elif too_old "$newest"; then
    echo "The GPU (${newest#* }) has compute capability ${newest%% *}, below 7.5: the CPU is used." >&2
  else
    echo "${newest#* }"
  fi
  exit 0
fi
version=${newest%% *} hopper=-gencode=arch=compute_90a,code=sm_90a
release=$(nvcc --version 2> /dev/null | sed -nE 's/.*release ([0-9.]+).*/\1/p')
[ "$(printf '%s\n' "${release:-12.5}" 12.5 | sort -V | head -n 1)" = 12.5 ] || hopper=-arch=sm_90
case $(cut -d . -f 1 <<< "$gpus" | sort -nu | paste -sd ' ')/$version in
  9/* | [0-7]' '*/9.0) echo $hopper;;
  *) if too_old "$oldest" && ! too_old "$newest"; then echo "-arch=sm_${version/./}"
    else echo -arch=native; fi;;
esac
