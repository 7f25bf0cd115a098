git log -1 --oneline 2>/dev/null
export PYTHONUNBUFFERED=1
date
(PYTHONPATH=src timeout 120 python3 -m pytest -q -x -p no:cacheprovider tests/test_cuda_loss.py tests/test_tensor_stats.py 2>&1 | tail -40) | tee $OUT/pytest2.txt
timeout 200 python3 scratch/explore2.py 180 > $OUT/explore2.txt 2>&1
tail -60 $OUT/explore2.txt
date
timeout 100 python3 scratch/linear2.py > $OUT/linear2.txt 2>&1
tail -40 $OUT/linear2.txt
date
for k in "bfloat16 262144"; do
  set -- $k
  timeout 40 ncu --clock-control none -k regex:cross_entropy -s 1 -c 1 --set full --import-source no -o /tmp/$1_$2 -f python3 scratch/profile.py $1 $2 > /tmp/ncu_$1_$2.log 2>&1
  tail -2 /tmp/ncu_$1_$2.log
  ncu --import /tmp/$1_$2.ncu-rep --page details > $OUT/ncu_$1_$2.txt 2>&1
  ncu --import /tmp/$1_$2.ncu-rep --page source --csv > $OUT/ncu_$1_$2.csv 2>&1
done
date
PYTHONPATH=src timeout 150 python3 benchmarks/gpu_watch.py $OUT --rounds 6 2>&1 | tail -12 | tee $OUT/watch2.txt
date
