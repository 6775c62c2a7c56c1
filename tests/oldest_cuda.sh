#!/usr/bin/env bash
# oldest_cuda.sh BUILD_DIR [ARCHITECTURE...] - compiles mtt_kernels.cu with the headers of CUDA 12.1, for
# sm_80 or as told, and assembles it by the ptxas of 12.1: what mtt takes from the runtime, the driver,
# cuBLASLt and PTX was there then. NVIDIA's packages on PyPI have them.
#
# The front end is this machine's nvcc, with CUB of 12.4, since that of 12.1 refuses a newer nvcc. So this
# does not prove that nvcc 12.1 parses the file. For sm_90a mtt asks for 12.5.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
build=$1 old=$1/oldest_cuda packages=$1/oldest_cuda/nvidia
shift
install() {
  python3 -m pip install -q --no-deps --target "$old" nvidia-cuda-runtime-cu12==12.1.105 \
    nvidia-cuda-nvcc-cu12==12.1.105 'nvidia-cuda-cccl-cu12==12.4.*' || return
  chmod +x "$packages/cuda_nvcc/bin/ptxas"
  # of cuBLAS's 410 MB the headers alone
  python3 -m pip install -q --no-deps --ignore-installed --dry-run --report "$old/report.json" \
    nvidia-cublas-cu12==12.1.3.1 || return
  python3 - "$old" << 'PYTHON'
import io, json, sys, urllib.request, zipfile

class Remote(io.RawIOBase):
    """A file on a server, read in ranges."""
    def __init__(self, url):
        self.url, self.at = url, 0
        answer = urllib.request.urlopen(urllib.request.Request(url, method="HEAD"))
        self.size = int(answer.headers["Content-Length"])
    def seekable(self):
        return True
    def tell(self):
        return self.at
    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at
    def read(self, count=-1):
        end = self.size if count < 0 else min(self.size, self.at + count)
        if end <= self.at: return b""
        part = {"Range": f"bytes={self.at}-{end - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=part)) as answer:
            if answer.status != 206: sys.exit("this server sends no parts of files")
            data = answer.read()
        self.at += len(data)
        return data

url = json.load(open(sys.argv[1] + "/report.json"))["install"][0]["download_info"]["url"]
package = zipfile.ZipFile(Remote(url))
for name in package.namelist():
    if name.startswith("nvidia/cublas/include/") and name.endswith(".h"): package.extract(name, sys.argv[1])
PYTHON
}
if ! command -v nvcc > /dev/null; then skip "CUDA 12.1: no nvcc"; closing_line; exit; fi
if [ ! -f "$packages/cublas/include/cublasLt.h" ] && ! install > "$build/oldest_cuda.log" 2>&1; then
  skip "CUDA 12.1: $(tail -n 1 "$build/oldest_cuda.log")"; closing_line; exit
fi
compile() { # ARCHITECTURE: nothing is run, so nothing is optimized
  local ptx=$old/$1.ptx
  nvcc -ptx -arch=sm_$1 -Xcicc -O0 -I"$packages/cuda_runtime/include" -I"$packages/cublas/include" \
    -I"$packages/cuda_cccl/include" mtt_kernels.cu -o "$ptx" > "$old/$1.log" 2>&1 || return
  sed -i 's/^\.version .*/.version 8.1/' "$ptx" # what is newer than that is then refused
  "$packages/cuda_nvcc/bin/ptxas" -arch=sm_$1 -O0 "$ptx" -o "$old/$1.cubin" >> "$old/$1.log" 2>&1
}
check "the headers are not those of 12.1" grep -qE 'CUDART_VERSION +12010$' \
  "$packages/cuda_runtime/include/cuda_runtime_api.h"
for arch in "${@:-80}"; do
  if compile "$arch"; then pass; else fail "sm_$arch: $(grep -m 1 error "$old/$arch.log")"; fi
done
closing_line
