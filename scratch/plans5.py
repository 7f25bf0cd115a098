"""Plans to try, by shape."""
import sys
sys.path.insert(0, "src")
from gradproof.kernels.cuda_loss import Plan

SHAPES = {32000: 8192, 50257: 8192, 128256: 8192, 262144: 4096}

def candidates(v, size, most=26):
    aligned = v * size % 16 == 0
    total = -(-v * size // 16) + (not aligned)
    found = {}
    for cluster in (1, 2, 4, 8):
        if 16 * total > cluster * (222 << 10): continue
        for ctas in (1, 2, 3, 4):
            if 16 * total / cluster > 224 * 1024 / ctas: continue
            if 16 * total / cluster < 28 * 1024: continue
            room = (233472 // ctas - 1024 - 64)
            options = []
            for group in (2, 4):
                for threads in range(96, 1025, 32):
                    if not 352 <= threads * ctas <= 1024: continue
                    pieces = -(-total // (cluster * threads * group)) * group
                    waste = cluster * threads * pieces / total
                    ring = (room - 24 * 2 * cluster * threads // 32 // 2 * 2) // (16 * threads) // group * group
                    ring = min(ring, 2 * pieces)
                    if ring < pieces or ring // group > 14 or pieces // group < 2: continue
                    # few wasted pieces, a long ring, many threads
                    score = -3 * (waste - 1) + 0.5 * min(1, ring / pieces - 1) * pieces * 16 * threads / (96 << 10) + 0.0002 * threads * ctas + (0.05 if group == 4 else 0)
                    options.append((score, Plan(cluster, threads, pieces, ring, group), ctas, waste))
            options.sort(key=lambda o: -o[0])
            for score, plan, c, waste in options[:5 if ctas < 3 else 3]:
                found[plan] = (score, c, round(waste, 3))
    ranked = sorted(found.items(), key=lambda f: -f[1][0])[:most]
    plans = [p for p, _ in ranked]
    extra = {(262144, 2): [(4, 512, 16, 24, 4), (16, 256, 8, 12, 4), (16, 256, 8, 8, 4)], (262144, 4): [(8, 512, 16, 24, 4), (16, 512, 8, 12, 4), (16, 256, 16, 24, 4), (16, 256, 16, 16, 4), (16, 256, 16, 26, 2)],
             (50257, 2): [(1, 320, 20, 40, 4)], (128256, 2): [(2, 512, 16, 24, 4)], (128256, 4): [(4, 512, 16, 24, 4)]}
    for e in extra.get((v, size), []):
        if Plan(*e) not in plans:
            plans.insert(1, Plan(*e)); found[Plan(*e)] = (0, Plan(*e).ctas, 1)
    return plans, found

if __name__ == "__main__":
    for v in SHAPES:
        for size in (2, 4):
            plans, found = candidates(v, size)
            print(v, size, len(found))
            for p in plans: print("  ", p.cluster, p.threads, p.pieces, p.ring, p.group, "ctas", found[p][1], p.ctas, "waste", found[p][2], "KiB", p.shared_bytes >> 10)
