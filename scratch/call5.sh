export PYTHONUNBUFFERED=1 PYTHONPATH=src
date
shape() {
  timeout $(($3 + 7)) python3 scratch/explore5.py $1 $2 $3 > $OUT/$1_$2.txt 2>&1
  grep -v "^Trace" $OUT/$1_$2.txt | head -9 | cut -c1-160; date
}
(timeout 22 python3 -m pytest -q -p no:cacheprovider tests/test_cuda_loss.py -k "thread or two_launches or several_rows or infinities" 2>&1 | tail -30) > $OUT/pytest.txt 2>&1
tail -5 $OUT/pytest.txt
shape bfloat16 262144 11
shape float32 262144 9
shape bfloat16 50257 9
shape bfloat16 32000 8
shape bfloat16 128256 9
timeout 40 python3 scratch/linear5.py 38 > $OUT/linear.txt 2>&1
tail -50 $OUT/linear.txt
date
shape float32 50257 8
shape float32 32000 7
shape float32 128256 7
