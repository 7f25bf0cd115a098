#!/bin/bash
# The corpus on a GPU machine, in one go: the scripts whose name fits, recorded in each way and asked there.
#     benchmarks/corpus.sh OUT [REGEX] [JOBS] [WAYS]      OUT/WAY.md has the tables, OUT/WAY.log what was recorded
set -u
OUT=$1 ONLY=${2:-} JOBS=${3:-$(nproc)} WAYS=${4:-"as-it-is bf16 fp16 compiled"}
export PYTHONPATH=$(dirname "$0")/../src OMP_NUM_THREADS=1
for way in $WAYS; do
    there=(--device cuda --only "$ONLY" --jobs "$JOBS")
    [ "$way" = as-it-is ] || there+=(--precision "$way")
    [ -z "${CORPUS:-}" ] || there+=(--corpus "$CORPUS")
    python3 -m gradproof scoreboard --record "${there[@]}" >"$OUT/$way.log" 2>&1
    tail -1 "$OUT/$way.log"
    python3 -m gradproof scoreboard --specimens "${there[@]}" --out "$OUT/$way.md" >/dev/null 2>>"$OUT/$way.log"
    sed -n '1,/^## Questions and/p' "$OUT/$way.md"
done
