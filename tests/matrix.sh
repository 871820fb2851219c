#!/usr/bin/env bash
# The suite on what newcomers have: every Python at hand, the PyTorch versions that pip can get, an older CPU, a browser;
# and the programme for a GPU, as a rehearsal.
# Each row runs in a clone of its own under build/matrix, of what is committed; the rows' last lines stand in its table.
#
#     tests/matrix.sh [PYTHON ...]      for example python3.12 /opt/python3.13/bin/python3; without: every one on the PATH
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
[ -z "$(git status --porcelain)" ] || echo "Not committed, and so not tried: $(git status --short | wc -l) files."
mkdir -p build/matrix
table=build/matrix/table.txt
: >"$table"
status=0

row() { # name, Python, torch (empty: the pin), make's target, environment...
    local name=$1 python=$2 torch=$3 target=$4 folder="build/matrix/$1"
    shift 4
    rm -rf "$folder"
    git clone -q . "$folder" || return 1
    echo "== $name: log in $folder.log"
    (
        cd "$folder" && make setup PYTHON="$python" \
            && { [ -z "$torch" ] || .venv/bin/python -m pip install "torch==$torch.*"; } \
            && env "$@" make "$target" PYTHON="$python"
    ) >"$folder.log" 2>&1 </dev/null || status=1
    local last="$folder/build/test/summary.txt"
    [ -f "$last" ] || last=$folder.log
    printf '%-24s %s\n' "$name" "$(grep -v '^make' "$last" | tail -n 1)" | tee -a "$table"
    rm -rf "$folder"
}

pythons=("$@")
if [ $# = 0 ]; then
    for version in 3.11 3.12 3.13; do
        "python$version" -c '' 2>/dev/null && pythons+=("python$version")
    done
fi
for python in "${pythons[@]}"; do row "$(basename "$python")" "$python" "" test; done
row torch-2.14 "${pythons[0]}" 2.14 test
row older-cpu "${pythons[0]}" "" test ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
row browser "${pythons[0]}" "" test-browser
row gpu-rehearsal "${pythons[0]}" "" gpu SMALL=1
echo; cat "$table"
exit $status
