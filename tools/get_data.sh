#!/usr/bin/env bash
# get_data.sh [-o FOLDER] [--unpack-limit BYTES] NAME... - downloads texts and vocabularies; without a NAME it
# lists those it knows.
#   NAME            one of the list below: address, checksum and licence are known
#   ADDRESS         https://, http:// or file://; ADDRESS#sha256=HEX also checks it
#   speakleash:NAME a Polish corpus of speakleash.org, for example speakleash:wolne_lektury_corpus; its base
#                   address, which has changed before, is $SPEAKLEASH or the one below
# Files go to FOLDER (data). Existing files are checked and left alone, interrupted downloads continue. A file
# is written as FOLDER/file.ID.part, where ID follows from the address, and renamed once its first bytes,
# checksum and size are right. .gz and .zst are unpacked, to BYTES at most (100 times the packed size, and at
# least 1 MiB).
set -u
export LC_ALL=C # decimals have a point
[ "${BASH_VERSINFO[0]}" -ge 4 ] || { echo "get_data: needs bash 4: brew install bash" >&2; exit 2; }
folder=data limit=
speakleash=${SPEAKLEASH:-https://d6t0.c15.e2-2.dev/speakleash-ds-pub/datasets_text}
github=https://raw.githubusercontent.com novels=computationalstylistics
list="
vocab.bpe|GPT-2's merges, modified MIT|
  1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5|
  https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe
bert-vocab.txt|BERT uncased, Apache-2.0|
  07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3|
  $github/huggingface/swift-coreml-transformers/master/Resources/vocab.txt
tinyshakespeare.txt|public domain, collected under MIT|
  86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed|
  $github/karpathy/char-rnn/master/data/tinyshakespeare/input.txt
lalka.txt|Bolesław Prus, public domain|
  8e7c764ccc49ba3426fe0cae5456329415737326b75fe0f3a939c0e14867023d|
  $github/$novels/100_polish_novels/a76c221efdc66e13b7ab0a7c6d0c24f952a7263a/corpus/prus_lalka_1890.txt
jane_eyre.txt|Charlotte Brontë, public domain|
  428f466dfb07bb9f9df118a91bb18ac686d24a78fa9914d46ab7d8786e7ba361|
  $github/$novels/100_english_novels/143e601875d70e195f2cc5ebd8b034609271194d/corpus/Cbronte_Jane_1847.txt
"
list=${list//|$'\n'  /|} # NAME|LICENCE|SHA256|ADDRESS
fail() { local said="get_data: $*"; echo "${said//[[:cntrl:]]/?}" >&2; exit 1; }

# Downloads $1 to $2, continuing where $2 ends; from the start if the server cannot continue.
bring() {
  [ ! -L "$2" ] && [ ! -L "$2.new" ] || fail "$2 or $2.new is a link: remove it"
  if command -v curl > /dev/null; then
    curl -fL --retry 3 -sS -C - -o "$2" "$1" && return
    case $? in
      22 | 33 | 36)
        [ -s "$2" ] && curl -fL --retry 3 -sS -o "$2.new" "$1" && mv "$2.new" "$2" && return
        rm -f "$2.new";;
    esac
  elif command -v wget > /dev/null && [ "${1#file:}" = "$1" ]; then wget -q -c -O "$2" "$1" && return
  else fail "curl is missing, and wget, too: apt install curl"; fi
  [ -s "$2" ] || { rm -f "$2"; fail "cannot download $1: try again, or give another address"; }
  fail "cannot download all of $1; the first $(wc -c < "$2") bytes are kept in $2: try again"
}

first_bytes() { head -c 4 "$1" | od -An -tx1 | tr -d ' \n'; }

# What a file is by its first bytes, whatever its name.
kind() {
  case $(first_bytes "$1") in
    28b52ffd | 5[0-9a-f]2a4d18) echo zst;;
    1f8b*) echo gz;;
    '') echo empty;;
    *) if [ "$(head -c 4096 "$1" | tr -d '\0' | wc -c)" != "$(head -c 4096 "$1" | wc -c)" ]; then echo binary
       else case $(head -c 512 "$1" | sed 's/^\xef\xbb\xbf//' | tr -d ' \t\r\n' | head -c 1) in
         '<') echo page;; '{' | '"' | '[') echo json;; *) echo text;; esac; fi;;
  esac
}

# Refuses $1, which is to be $2, unless it is of the kind that the name says.
check_kind() {
  local is
  is=$(kind "$1")
  case $2:$is in
    *:page) say="a web page, not data: $(tr -d '\r' < "$1" | grep -m 1 . | cut -c 1-200)";;
    *.zst:zst | *.gz:gz) return;;
    *.zst:* | *.gz:* | *:binary | *:empty | *:zst | *:gz) say="$is";;
    *.jsonl:text | *.json:text) say="not JSON: $(head -n 1 "$1" | cut -c 1-200)";;
    *) return;;
  esac
  rm "$1"
  fail "$2 is $say; it was removed: check the address"
}

unpack() { # FOLDER/file.zst or .gz beside itself
  local packed=$1 plain=${1%.*} tool="gzip -dc" package=gzip most=$limit status
  [ "${packed##*.}" = zst ] && tool="zstd -dcq --long=27" package=zstd
  command -v $package > /dev/null ||
    fail "$package is needed to unpack $packed: apt install $package, then try again"
  [ -n "$most" ] || most=$((100 * $(wc -c < "$packed"))) most=$((most > 1048576 ? most : 1048576))
  rm -f "$plain.part" # a link would be followed
  $tool < "$packed" | head -c $((most + 1)) > "$plain.part"
  status="${PIPESTATUS[*]}"
  if [ "$(wc -c < "$plain.part")" -gt "$most" ]; then
    rm "$plain.part"
    fail "$packed unpacks to more than $most bytes: if that is right, add --unpack-limit BYTES"
  elif [ "$status" != "0 0" ]; then
    rm "$plain.part"
    fail "$packed is damaged, or the disk is full: remove it and try again"
  fi
  check_kind "$plain.part" "$plain"
  mv "$plain.part" "$plain" && rm "$packed" || fail "cannot write $plain"
}

checksum() { sha256sum < "$1" | cut -d ' ' -f 1; }
get() {
  local address=$1 sum='' licence='' file part found size=''
  found=$(grep -F "$1|" <<< "$list" | grep "^$1|")
  if [ -n "$found" ]; then IFS='|' read -r file licence sum address <<< "$found"; file=$folder/$file
  else
    case $1 in
      speakleash:*) address=$speakleash/${1#*:}.jsonl.zst
        size=$(curl -fsL "$speakleash/${1#*:}.manifest" 2> /dev/null |
          grep -oE '"file_size": *[0-9]+' | grep -oE '[0-9]+');;
      *'#'[sS][hH][aA]256=*) address=${1%#*} sum=${1##*=} sum=${sum,,}
        [[ $sum =~ ^[0-9a-f]{64}$ ]] || fail "$1: expected 64 hexadecimal digits after sha256=";;
      *://*) ;;
      *) fail "unknown name $1: run get_data.sh without a name for a list";;
    esac
    file=${address%%\?*} file=$folder/${file##*/}
  fi
  case $file in *.zst | *.gz) [ -s "${file%.*}" ] && { echo "${file%.*} is already there"; return; };; esac
  [ -n "${file##*/}" ] && [ ! -d "$file" ] || fail "$1 does not end with a file name: check the address"
  if [ -s "$file" ]; then
    [ -z "$sum" ] || found=$(checksum "$file")
    [ -z "$sum" ] || [ "$found" = "$sum" ] ||
      fail "$file is already there, but its checksum is $found, not $sum: move it away and try again"
    echo "$file is already there"
  else
    part=$file.$(sha256sum <<< "$address" | cut -c 1-8).part # an address never continues another's file
    bring "$address" "$part"
    check_kind "$part" "$file"
    if [ -n "$size" ] && [ "$(wc -c < "$part")" != "$size" ]; then
      found=$(wc -c < "$part"); rm "$part"
      fail "$file has $found bytes, but its manifest says $size; it was removed: try again"
    fi
    if [ -n "$sum" ]; then
      found=$(checksum "$part")
      if [ "$found" != "$sum" ]; then
        rm "$part"
        fail "the checksum of $file is $found, not $sum; it was removed: try again, or check the source"
      fi
    fi
    mv "$part" "$file" || fail "cannot write $file"
  fi
  case $file in *.zst | *.gz) unpack "$file"; file=${file%.*};; esac
  echo "$file, $(wc -c < "$file") bytes${licence:+, $licence}${sum:+, checksum correct}"
}

while :; do
  case ${1:-} in
    -o) folder=${2:?-o needs a folder};;
    --unpack-limit) limit=${2:-}; [[ $limit =~ ^[1-9][0-9]{0,17}$ ]] || fail "$1 needs a number of bytes";;
    *) break;;
  esac
  shift 2
done
case ${1:-} in
  '' | -h | --help)
    sed -n '2,12s/^# \?//p' "$0"
    echo
    awk -F'|' 'NF > 1 { printf "  %-20s %s\n", $1, $2 }' <<< "$list"
    exit 0;;
  -*) fail "there is no option ${1:0:100} (--help lists all)";;
esac
[[ $folder != -* ]] || folder=./$folder
mkdir -p "$folder" || exit 1
for name in "$@"; do get "$name"; done
