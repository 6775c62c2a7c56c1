# lib.sh - functions that the test scripts share.
export LC_ALL=C # decimals have a point
passed=0 failed=0 skipped=0
pass() { passed=$((passed + 1)); }
fail() { failed=$((failed + 1)); echo "FAILED: $*"; }
skip() { skipped=$((skipped + 1)); echo "skipped: $*"; } # REASON
check() { # NAME COMMAND...: the command must succeed
  local name=$1; shift
  if "$@" > /dev/null 2>&1; then pass; else fail "$name"; fi
}
says() { grep -qE -- "$2" "$1"; } # FILE PATTERN
not() { ! "$@"; }
sum() { sha256sum "$@" | sha256sum; } # FILE...
field() { sed -n "1s/.*\"$2\": \([^,}]*\).*/\1/p" "$1"; } # FILE KEY: a number of a JSON object
is_json() { # [--lines] FILE: one document, or one on each line
  if ! command -v python3 > /dev/null; then grep -q '^{.*}$' "${!#}"; return; fi
  python3 - "$@" << 'PYTHON'
import json, sys
text = open(sys.argv[-1], encoding="utf-8").read()
for one in text.splitlines() if sys.argv[1] == "--lines" else [text]: assert isinstance(json.loads(one), dict)
PYTHON
}
sample_text() { # 60 documents of random syllables
  awk 'BEGIN {
    srand(7)
    for (d = 0; d < 60; d++) {
      for (i = 0; i < 700; i++)
        printf "%s ", substr("alabetagammadelta", 1 + int(rand() * 10), 2 + int(rand() * 5))
      print "\n"
    }
  }'
}
stb_header() { # where the compiler finds it
  echo '#include <stb/stb_sprintf.h>' | gcc -E - | sed -n 's/^# 1 "\(.*stb_sprintf.h\)".*/\1/p' | head -1
}
closing_line() { # the last command of a test
  echo "$passed passed, $failed failed, $skipped skipped"
  [ $failed = 0 ]
}
