git log -1 --oneline 2>/dev/null; pwd; ls
export PYTHONUNBUFFERED=1
timeout 150 python3 scratch/explore1.py > $OUT/explore1.txt 2>&1 &
wait
for k in "bfloat16 262144" "float32 262144" "bfloat16 32000"; do
  set -- $k
  timeout 60 ncu --clock-control none -k regex:cross_entropy -s 1 -c 1 --set full --import-source no -o /tmp/$1_$2 -f python3 scratch/profile.py $1 $2 > /tmp/ncu_$1_$2.log 2>&1
  tail -3 /tmp/ncu_$1_$2.log
  ncu --import /tmp/$1_$2.ncu-rep --page details > $OUT/ncu_$1_$2.txt 2>&1
  ncu --import /tmp/$1_$2.ncu-rep --page source --csv > $OUT/ncu_$1_$2.csv 2>&1
done
(PYTHONPATH=src timeout 100 python3 -m pytest -q -p no:cacheprovider tests/test_tape_attention.py tests/test_before_update.py -k gpu 2>&1 | tail -30) | tee $OUT/pytest_gpu.txt
cat $OUT/explore1.txt | tail -150
