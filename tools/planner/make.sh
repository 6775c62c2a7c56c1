#!/usr/bin/env bash
# make.sh PAGE.html - makes the page that plans: build/schedule's page, tools/planner/page.html, and in it
#                     planner.c, compiled to WebAssembly. On Debian it takes
#                     apt-get install clang lld binaryen musl-dev. Sizes have 64 bits, addresses that the
#                     browser sees 32, since not every browser has memories of 64.
# make.sh --sources - prints what the page was made of, one number for all files.
set -eu -o pipefail
cd "$(dirname "$0")/../.."
. tests/lib.sh
sources=$(cat mtt.h tools/{explorer,failure,options,quiz}.h tools/planner/* | sha256sum | cut -c 1-16)
[ "$1" != --sources ] || { echo "$sources"; exit; }
page=$(realpath "$1") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(stb_header)" "$work"
clang --target=wasm64 -std=gnu99 -Os -ffreestanding -fno-builtin -mbulk-memory -Wall -Wextra \
  -Wno-unused-function -I"$work" -isystem /usr/include/x86_64-linux-musl -c tools/planner/planner.c \
  -o "$work/planner.o"
wasm-ld -mwasm64 --no-entry --gc-sections --strip-all -z stack-size=1048576 "$work/planner.o" \
  -o "$work/planner.wasm"
wasm-opt --enable-memory64 --enable-bulk-memory --memory64-lowering -Os "$work/planner.wasm" \
  -o "$work/lowered.wasm"
cc -O1 tools/schedule.c -o "$work/schedule" -lm
(cd "$work" && ./schedule --html fixed.html > /dev/null)
{
  sed '$d' "$work/fixed.html" # its last line is </html>
  echo "<!-- made of $sources -->"
  sed -n '/>WASM</q; p' tools/planner/page.html
  printf "<script type='application/octet-stream' id='wasm'>%s</script>\n" \
    "$(base64 -w 0 "$work/lowered.wasm")"
  sed '1,/>WASM</d' tools/planner/page.html
  echo '</html>'
} > "$work/page.html"
mv "$work/page.html" "$page"
