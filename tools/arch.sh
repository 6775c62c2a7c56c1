#!/usr/bin/env bash
# arch.sh - nvcc's option for this machine's GPUs. Hopper's products of warpgroups are in code for sm_90a alone, which native is not.
case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | sort -u) in
  9.0) echo -gencode=arch=compute_90a,code=sm_90a;;
  *) echo -arch=native;;
esac
