#!/usr/bin/env bash
# arch.sh - nvcc's option for this machine's GPUs. On Hopper it is sm_90a: -arch=native gives sm_90, which has
# no warpgroup products.
case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | sort -u) in
  9.0) echo -gencode=arch=compute_90a,code=sm_90a;;
  *) echo -arch=native;;
esac
