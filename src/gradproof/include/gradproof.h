/* gradproof.h: watch a training that is written in C, C++ or CUDA.

   One header, C99 or C++11, POSIX, nothing to link but libm. It writes the directory that `gradproof run` writes for a
   Python script, so that `gradproof diagnose`, `report`, `live`, `compare` and `export` read it:

       #include "gradproof.h"

       gp_run *run = gp_open("runs/a", 10);                    measure every 10th step
       gp_tensor(run, GP_WEIGHT, "fc", w, GP_F32, gp_2d(64, 256));
       gp_tensor(run, GP_GRADIENT, "fc", dw, GP_F32, gp_2d(64, 256));
       gp_updates(run, NULL);                                  also how far each weight moves
       for (...) {
           ... forward, backward ...
           gp_will_update(run);                                before the weights change
           ... update ...
           gp_step(run, loss, lr);
       }
       gp_close(run);

   gp_dump(run, "step.safetensors"), called after the backward and before the update, writes that step for
   `gradproof check-dump`. gp_zeroed, gp_backward and gp_clipped say in which order a step does what.

   It never ends your program: what cannot be written costs one line on stderr, and the record ends there. Every function
   takes NULL for a run and does nothing. One thread at a time; a forked child is not recorded.

   SPDX-License-Identifier: Apache-2.0 */
#ifndef GRADPROOF_H
#define GRADPROOF_H

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <unistd.h>

#define GRADPROOF_H_VERSION "1"
#define GP__FORMAT 1 /* of run.json, as record/schema.py counts it */
#define GP__MOST_DIMENSIONS 8
#ifndef GP_MOST_FRAMES
#define GP_MOST_FRAMES 1073741824.0 /* bytes of tensors.bin: half as many steps are measured whenever a quarter of what is left is full */
#endif

typedef enum { GP_F32, GP_F64, GP_BF16, GP_F16, GP_I32, GP_I64, GP_U8 } gp_dtype; /* integers: in batches only */

/* GP_BATCH is written by gp_dump alone. */
typedef enum {
    GP_WEIGHT,
    GP_GRADIENT,
    GP_ACTIVATION,
    GP_ACTIVATION_GRADIENT,
    GP_ADAM_M,
    GP_ADAM_V,
    GP_BATCH
} gp_kind;

typedef struct {
    int dims;
    int64_t size[GP__MOST_DIMENSIONS];
} gp_shape;

typedef struct gp_run gp_run;

/* ---- the statistics of a tensor: one read, at the speed of the memory ---- */

/* All but nan and inf are over the finite entries; subnormal is by the tensor's own dtype. */
typedef struct {
    double count, nan, inf, zero, subnormal, min, max, sum, squares;
} gp_stats;

#define GP__BLOCK 1024 /* entries whose sums are kept in the tensor's own precision, then added up in double */

/* NaN and Inf are told by their bits: with -ffast-math a comparison may be taken not to see them. */
static inline uint32_t gp__bits32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint64_t gp__bits64(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline int gp__is_finite(double x) { return (gp__bits64(x) >> 52 & 0x7ff) != 0x7ff; }

static inline int gp__is_nan(double x) { return (gp__bits64(x) & 0x7fffffffffffffffULL) > 0x7ff0000000000000ULL; }

/* Where the processor has wider vectors than the program was compiled for, the passes below use them. */
#if defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#define GP__FAST __attribute__((optimize("O3"))) /* below it, gcc leaves the conversions in scalars */
#else
#define GP__FAST
#endif
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__CUDACC__) && !defined(GP__NO_WIDE)
#include <immintrin.h>
#define GP__WIDE GP__FAST __attribute__((target("avx2,fma,f16c")))
#define GP__HAS_WIDE __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
#endif

/* A block of float or double. The fast pass keeps `lanes` independent sums, which any compiler turns into vectors; it gives
   a block up, by returning 0, where a square is not finite or leaves the format (`largest`, `smallest`). The close pass reads
   one entry at a time in double: blocks that were given up, and ends that fill no block. */
#define GP__DEFINE_FAST(name, attribute, real, size_of, bits_t, bits_of, lanes, smallest, largest)                           \
    attribute static inline int name(const real *x, real tiny, gp_stats *s) {                                                \
        const bits_t size_bits = (bits_t)~(bits_t)0 >> 1;                                                                    \
        real sum[lanes], squares[lanes], low[lanes], high[lanes], small[lanes], least, most, size, total = 0, few = 0;       \
        double all = 0, all_squares = 0;                                                                                     \
        bits_t zero[lanes], zeros = 0;                                                                                       \
        int i, j;                                                                                                            \
        for (j = 0; j < lanes; j++) {                                                                                        \
            sum[j] = squares[j] = small[j] = 0;                                                                              \
            low[j] = high[j] = x[j];                                                                                         \
            zero[j] = 0;                                                                                                     \
        }                                                                                                                    \
        for (i = 0; i < GP__BLOCK; i += lanes) {                                                                             \
            for (j = 0; j < lanes; j++) {                                                                                    \
                real v = x[i + j], a = size_of(v);                                                                           \
                sum[j] += v;                                                                                                 \
                squares[j] += v * v;                                                                                         \
                low[j] = low[j] < v ? low[j] : v;                                                                            \
                high[j] = high[j] > v ? high[j] : v;                                                                         \
                small[j] += a < tiny ? (real)1 : (real)0;                                                                    \
            }                                                                                                                \
        }                                                                                                                    \
        least = low[0];                                                                                                      \
        most = high[0];                                                                                                      \
        for (j = 0; j < lanes; j++) {                                                                                        \
            least = low[j] < least ? low[j] : least;                                                                         \
            most = high[j] > most ? high[j] : most;                                                                          \
            all += (double)sum[j];                                                                                           \
            all_squares += (double)squares[j];                                                                               \
            total += squares[j];                                                                                             \
            few += small[j];                                                                                                 \
        }                                                                                                                    \
        if ((bits_of(total) & size_bits) > bits_of((real)largest)) return 0;                                                 \
        size = most > -least ? most : -least;                                                                                \
        if (few < GP__BLOCK && size < (real)smallest) return 0;                                                              \
        if (few > 0) {                                                                                                       \
            for (i = 0; i < GP__BLOCK; i += lanes)                                                                           \
                for (j = 0; j < lanes; j++) zero[j] += (bits_of(x[i + j]) & size_bits) == 0;                                 \
            for (j = 0; j < lanes; j++) zeros += zero[j];                                                                    \
            if (few >= GP__BLOCK && zeros < GP__BLOCK) return 0;                                                             \
        }                                                                                                                    \
        s->zero += (double)zeros;                                                                                            \
        s->subnormal += (double)few - (double)zeros;                                                                         \
        s->min = (double)least < s->min ? (double)least : s->min;                                                            \
        s->max = (double)most > s->max ? (double)most : s->max;                                                              \
        s->sum += all;                                                                                                       \
        s->squares += all_squares;                                                                                           \
        return 1;                                                                                                            \
    }

#define GP__DEFINE_CLOSE(name, real, bits_t, bits_of, infinity)                                                              \
    static inline void name(const real *x, int n, real tiny, gp_stats *s) {                                                  \
        int i;                                                                                                               \
        for (i = 0; i < n; i++) {                                                                                            \
            bits_t bits = bits_of(x[i]) & ((bits_t)~(bits_t)0 >> 1);                                                         \
            double v = (double)x[i];                                                                                         \
            s->nan += bits > (bits_t)infinity;                                                                               \
            s->inf += bits == (bits_t)infinity;                                                                              \
            if (bits >= (bits_t)infinity) continue;                                                                          \
            s->zero += bits == 0;                                                                                            \
            s->subnormal += bits != 0 && v < (double)tiny && v > -(double)tiny;                                              \
            s->min = v < s->min ? v : s->min;                                                                                \
            s->max = v > s->max ? v : s->max;                                                                                \
            s->sum += v;                                                                                                     \
            s->squares += v * v;                                                                                             \
        }                                                                                                                    \
    }

/* Blocks of 16 bits as floats. */
GP__FAST static inline void gp__from_bf16(const uint16_t *x, float *out) {
    uint32_t bits[GP__BLOCK];
    int i;
    for (i = 0; i < GP__BLOCK; i++) bits[i] = (uint32_t)x[i] << 16;
    memcpy(out, bits, sizeof bits);
}

GP__FAST static inline void gp__from_f16(const uint16_t *x, float *out) {
    int32_t bits[GP__BLOCK], tiny[GP__BLOCK];
    float small[GP__BLOCK];
    int i;
    for (i = 0; i < GP__BLOCK; i++) small[i] = (float)(x[i] & 0x7fff) * 5.9604644775390625e-8f; /* 2^-24: subnormal */
    memcpy(tiny, small, sizeof tiny);
    for (i = 0; i < GP__BLOCK; i++) {
        int32_t half = x[i], size = half & 0x7fff, above = -(size > 0x7bff), below = -(size < 0x400);
        int32_t normal = (size << 13) + (112 << 23) + (above & (112 << 23)); /* Inf and NaN stay what they are */
        bits[i] = (normal & ~below) | (tiny[i] & below) | (int32_t)((uint32_t)(half & 0x8000) << 16);
    }
    memcpy(out, bits, sizeof bits);
}

#ifdef GP__WIDE
GP__WIDE static inline void gp__wide_from_bf16(const uint16_t *x, float *out) {
    int i;
    for (i = 0; i < GP__BLOCK; i += 8) {
        __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(x + i)));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
    }
}

GP__WIDE static inline void gp__wide_from_f16(const uint16_t *x, float *out) {
    int i;
    for (i = 0; i < GP__BLOCK; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + i))));
}
#endif

GP__FAST static inline void gp__subtract_float(const float *x, const float *old, int n, float *out) {
    int i;
    for (i = 0; i < n; i++) out[i] = x[i] - old[i];
}

GP__FAST static inline void gp__subtract_double(const double *x, const double *old, int n, double *out) {
    int i;
    for (i = 0; i < n; i++) out[i] = x[i] - old[i];
}

GP__DEFINE_FAST(gp__fast_float, GP__FAST, float, fabsf, uint32_t, gp__bits32, 16, 1e-12, 1e36)
GP__DEFINE_FAST(gp__fast_double, GP__FAST, double, fabs, uint64_t, gp__bits64, 16, 1e-140, 1e300)
GP__DEFINE_CLOSE(gp__close_float, float, uint32_t, gp__bits32, 0x7f800000UL)
GP__DEFINE_CLOSE(gp__close_double, double, uint64_t, gp__bits64, 0x7ff0000000000000ULL)
#ifdef GP__WIDE
GP__DEFINE_FAST(gp__wide_float, GP__WIDE, float, fabsf, uint32_t, gp__bits32, 16, 1e-12, 1e36)
GP__DEFINE_FAST(gp__wide_double, GP__WIDE, double, fabs, uint64_t, gp__bits64, 16, 1e-140, 1e300)
#else
#define gp__wide_float gp__fast_float
#define gp__wide_double gp__fast_double
#define gp__wide_from_bf16 gp__from_bf16
#define gp__wide_from_f16 gp__from_f16
#define GP__HAS_WIDE 0
#endif

static inline void gp__block_float(const float *x, int n, float tiny, int wide, gp_stats *s) {
    s->count += n;
    if (n < GP__BLOCK || !(wide ? gp__wide_float(x, tiny, s) : gp__fast_float(x, tiny, s))) gp__close_float(x, n, tiny, s);
}

static inline void gp__block_double(const double *x, int n, int wide, gp_stats *s) {
    const double tiny = 2.2250738585072014e-308;
    s->count += n;
    if (n < GP__BLOCK || !(wide ? gp__wide_double(x, tiny, s) : gp__fast_double(x, tiny, s))) gp__close_double(x, n, tiny, s);
}

static inline size_t gp__size_of(gp_dtype dtype) {
    static const unsigned char sizes[] = {4, 8, 2, 2, 4, 8, 1};
    return sizes[dtype];
}

/* Entries `first` to `first + n` as floats: where they lie, or converted into `room`. */
static inline const float *gp__floats(const void *data, gp_dtype dtype, size_t first, int n, int wide, float *room) {
    const uint16_t *x = (const uint16_t *)data + first;
    uint16_t padded[GP__BLOCK];
    if (dtype == GP_F32) return (const float *)data + first;
    if (n < GP__BLOCK) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, (size_t)n * sizeof *x);
        x = padded;
    }
    if (dtype == GP_BF16 && wide)
        gp__wide_from_bf16(x, room);
    else if (dtype == GP_BF16)
        gp__from_bf16(x, room);
    else if (wide)
        gp__wide_from_f16(x, room);
    else
        gp__from_f16(x, room);
    return room;
}

/* The statistics of a tensor on the host, or of its change since `before` where that is not NULL. */
static inline gp_stats gp_measure(const void *data, const void *before, gp_dtype dtype, size_t count) {
    const float tiny = dtype == GP_F16 && !before ? 6.103515625e-5f : 1.17549435e-38f;
    const int wide = GP__HAS_WIDE;
    float room[GP__BLOCK], old_room[GP__BLOCK];
    double change[GP__BLOCK];
    gp_stats s;
    size_t first;
    int n;
    memset(&s, 0, sizeof s);
    s.min = HUGE_VAL;
    s.max = -HUGE_VAL;
    for (first = 0; first < count; first += (size_t)n) {
        n = count - first < GP__BLOCK ? (int)(count - first) : GP__BLOCK;
        if (dtype == GP_F64) {
            const double *x = (const double *)data + first, *old = before ? (const double *)before + first : NULL;
            if (old) gp__subtract_double(x, old, n, change);
            gp__block_double(old ? change : x, n, wide, &s);
        } else {
            const float *x = gp__floats(data, dtype, first, n, wide, room);
            const float *old = before ? gp__floats(before, dtype, first, n, wide, old_room) : NULL;
            if (old) gp__subtract_float(x, old, n, room);
            gp__block_float(old ? room : x, n, tiny, wide, &s);
        }
    }
    if (s.count <= s.nan + s.inf) s.min = s.max = 0;
    return s;
}

/* ---- a run ---- */

typedef struct {
    gp_kind kind;
    gp_dtype dtype;
    gp_shape shape;
    char *name;
    const void *data;
    void *before; /* a copy of a weight whose update is asked for */
    size_t count;
    uint32_t number, update_number; /* under which frames know it */
    int on_device, wants_update, has_before, moved;
    gp_stats first, last, update;
    int measured; /* 1: `last` is of this step; 2: `update`, too */
    int seen;     /* how often it was measured */
} gp__tensor;

/* What a compiler of device code adds; host code calls it through these. */
typedef struct {
    int (*measure)(gp_run *, gp__tensor *, const void *before); /* starts: the numbers come with `collect` */
    int (*collect)(gp_run *);
    int (*keep)(gp_run *, gp__tensor *);                        /* copies the tensor into its `before` */
    int (*fetch)(void *host, const void *device, size_t bytes);
    void (*release)(gp_run *);
} gp__device;

typedef struct {
    char *text;
    size_t length, room;
    int failed;
} gp__text;

struct gp_run {
    char *path;
    int every, broken, frames, steps;
    pid_t owner;
    uint64_t step;
    double began, own_seconds, frame_bytes, frames_left;
    uint64_t frames_ended; /* a step, or 0 */
    gp__tensor **tensors;
    int count, numbers;
    char *command; /* a JSON list */
    char order[32];
    int backwards;
    double norm_before_clip, clip_limit;
    int clipped, will_update, told_of_infinity, rows_changed, complaints;
    char *dump, *dump_draft; /* a dump that waits for its loss */
    size_t dump_header;
    const gp__device *device;
    void *device_rows;
    int device_room;
};

static inline double gp__now(void) {
    struct timeval now;
    gettimeofday(&now, NULL);
    return (double)now.tv_sec + 1e-6 * (double)now.tv_usec;
}

static inline int gp__is_ours(const gp_run *run) { return run && !run->broken && run->owner == getpid(); }

static inline void gp__give_up(gp_run *run, const char *what, const char *why) {
    fprintf(stderr, "gradproof: cannot write %s (%s); training goes on, the record ends here\n", what, why);
    run->broken = 1;
}

/* Something that was asked and makes no sense: said, and left out. */
static inline void gp__complain(gp_run *run, const char *what, const char *name, const char *why) {
    if (run->complaints++ < 8) fprintf(stderr, "gradproof: %s %s is left out: %s\n", what, name ? name : "(null)", why);
}

static inline char *gp__copy_text(const char *text) {
    size_t size = strlen(text) + 1;
    char *copy = (char *)malloc(size);
    if (copy) memcpy(copy, text, size);
    return copy;
}

static inline void gp__put(gp__text *out, const char *text, size_t length) {
    if (out->failed) return;
    if (out->length + length + 1 > out->room) {
        size_t room = 2 * (out->length + length) + 256;
        char *more = (char *)realloc(out->text, room);
        if (!more) {
            out->failed = 1;
            return;
        }
        out->text = more;
        out->room = room;
    }
    memcpy(out->text + out->length, text, length);
    out->length += length;
    out->text[out->length] = 0;
}

static inline void gp__say(gp__text *out, const char *text) { gp__put(out, text, strlen(text)); }

static inline void gp__say_count(gp__text *out, long long count) {
    char digits[32];
    snprintf(digits, sizeof digits, "%lld", count);
    gp__say(out, digits);
}

/* A number as CSV and JSON want it, whatever the program's locale calls a point. */
static inline void gp__say_number(gp__text *out, double x, int digits) {
    char text[48], *comma;
    if (gp__is_nan(x)) {
        gp__say(out, "nan");
    } else if (!gp__is_finite(x)) {
        gp__say(out, gp__bits64(x) >> 63 ? "-inf" : "inf");
    } else {
        snprintf(text, sizeof text, "%.*g", digits, x);
        for (comma = text; *comma; comma++)
            if (*comma == ',') *comma = '.';
        gp__say(out, text);
    }
}

/* How many bytes of `s` are one character of UTF-8; 0 where they are none. */
static inline int gp__character(const unsigned char *s) {
    int more = s[0] < 0x80 ? 0 : s[0] >= 0xc2 && s[0] < 0xe0 ? 1 : (s[0] & 0xf0) == 0xe0 ? 2 : s[0] >= 0xf0 && s[0] < 0xf5 ? 3 : -1;
    int i;
    for (i = 1; i <= more; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (more == 2 && ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] >= 0xa0))) return 0;
    if (more == 3 && ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] >= 0x90))) return 0;
    return more + 1;
}

static inline void gp__say_quoted(gp__text *out, const char *text) {
    const unsigned char *s = (const unsigned char *)text;
    char escaped[8];
    gp__say(out, "\"");
    while (*s) {
        int length = gp__character(s);
        if (length == 0) {
            gp__say(out, "?");
            s++;
        } else if (*s < 0x20 || *s == '"' || *s == '\\') {
            snprintf(escaped, sizeof escaped, "\\u%04x", *s);
            gp__say(out, escaped);
            s++;
        } else {
            gp__put(out, (const char *)s, (size_t)length);
            s += length;
        }
    }
    gp__say(out, "\"");
}

static inline void gp__say_shape(gp__text *out, const gp_shape *shape) {
    int i;
    gp__say(out, "[");
    for (i = 0; i < shape->dims; i++) {
        if (i) gp__say(out, ",");
        gp__say_count(out, (long long)shape->size[i]);
    }
    gp__say(out, "]");
}

/* Whether a file may get this large; a write beyond the process's limit is a signal that would end it. */
static inline int gp__is_allowed(double size) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || size <= (double)limit.rlim_cur) return 1;
    errno = EFBIG;
    return 0;
}

/* What was written before stays as it is: a record goes to the end of its file in one call. */
static inline int gp__write_whole(int file, const void *data, size_t size) {
    struct stat now;
    ssize_t written;
    if (fstat(file, &now) == 0 && !gp__is_allowed((double)now.st_size + (double)size)) return 0;
    written = write(file, data, size);
    if (written >= 0 && (size_t)written != size) errno = ENOSPC;
    return written >= 0 && (size_t)written == size;
}

static inline char *gp__file_of(const gp_run *run, const char *name) {
    size_t size = strlen(run->path) + strlen(name) + 2;
    char *path = (char *)malloc(size);
    if (path) snprintf(path, size, "%s/%s", run->path, name);
    return path;
}

static inline int gp__open_file(gp_run *run, const char *name) {
    char *path = gp__file_of(run, name);
    int flags = O_WRONLY | O_CREAT | O_APPEND, file;
#ifdef O_CLOEXEC
    flags |= O_CLOEXEC;
#endif
    file = path ? open(path, flags, 0644) : -1;
    if (file < 0) gp__give_up(run, path ? path : name, strerror(errno));
    free(path);
    return file;
}

static inline void gp__append(gp_run *run, int file, const char *name, const void *data, size_t size) {
    if (!run->broken && !gp__write_whole(file, data, size)) gp__give_up(run, name, strerror(errno));
}

static inline const char *gp__kind_name(gp_kind kind) {
    static const char *const names[] = {"weight", "gradient", "output", "output_gradient", "adam_m", "adam_v", "batch"};
    return names[kind];
}

static inline const char *gp__dtype_name(gp_dtype dtype) {
    static const char *const names[] = {"float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8"};
    return names[dtype];
}

static inline gp__tensor *gp__find(const gp_run *run, gp_kind kind, const char *name) {
    int i;
    for (i = 0; i < run->count; i++)
        if (run->tensors[i]->kind == kind && strcmp(run->tensors[i]->name, name) == 0) return run->tensors[i];
    return NULL;
}

static inline void gp__say_tensor(gp__text *out, const char *kind, const gp__tensor *t) {
    gp__say(out, "{\"kind\":\"");
    gp__say(out, kind);
    gp__say(out, "\",\"name\":");
    gp__say_quoted(out, t->name);
    gp__say(out, ",\"shape\":");
    gp__say_shape(out, &t->shape);
    gp__say(out, ",\"dtype\":\"");
    gp__say(out, gp__dtype_name(t->dtype));
    gp__say(out, "\"}");
}

/* Tensors by the number that frames know them under. */
static inline void gp__say_tensors(gp__text *out, const gp_run *run) {
    int number, i;
    for (number = 0; number < run->numbers; number++) {
        if (number) gp__say(out, ",");
        for (i = 0; i < run->count; i++) {
            const gp__tensor *t = run->tensors[i];
            if (t->kind == GP_BATCH) continue;
            if (t->number == (uint32_t)number) gp__say_tensor(out, gp__kind_name(t->kind), t);
            if (t->wants_update && t->update_number == (uint32_t)number) gp__say_tensor(out, "update", t);
        }
    }
}

static inline void gp__say_parameters(gp__text *out, const gp_run *run, int ended) {
    int i, some = 0;
    for (i = 0; i < run->count; i++) {
        const gp__tensor *t = run->tensors[i];
        if (t->kind != GP_WEIGHT) continue;
        if (some++) gp__say(out, ",");
        gp__say(out, "{\"name\":");
        gp__say_quoted(out, t->name);
        gp__say(out, ",\"shape\":");
        gp__say_shape(out, &t->shape);
        gp__say(out, ",\"dtype\":\"");
        gp__say(out, gp__dtype_name(t->dtype));
        gp__say(out, "\",\"trainable\":true,\"optimizer\":0,\"gradient\":");
        gp__say(out, gp__find(run, GP_GRADIENT, t->name) ? "true" : "false");
        if (ended && t->seen > 1) gp__say(out, t->moved ? ",\"changed\":true" : ",\"changed\":false");
        gp__say(out, "}");
    }
}

/* run.json, replaced as a whole. */
static inline void gp__save_info(gp_run *run, int ended) {
    gp__text out;
    char *path = gp__file_of(run, "run.json"), *draft = gp__file_of(run, "run.tmp"), here[4096];
    double now = gp__now();
    int file = -1;
    memset(&out, 0, sizeof out);
    gp__say(&out, "{\"format\":");
    gp__say_count(&out, GP__FORMAT);
    gp__say(&out,
            ",\"statistics\":[\"nan\",\"inf\",\"zero\",\"subnormal\",\"min\",\"max\",\"absmax\",\"mean\",\"std\",\"norm\","
            "\"cosine\",\"eps_share\",\"dead\"],\"tensors\":[");
    gp__say_tensors(&out, run);
    gp__say(&out, "],\"command\":");
    gp__say(&out, run->command ? run->command : "[]");
    gp__say(&out, ",\"source\":{},\"directory\":");
    gp__say_quoted(&out, getcwd(here, sizeof here) ? here : "");
    gp__say(&out, ",\"began\":");
    gp__say_number(&out, run->began, 17);
    gp__say(&out, ",\"rank\":0,\"world\":1,\"schedule\":\"every ");
    gp__say_count(&out, run->every);
    gp__say(&out, " steps\",\"written_by\":\"gradproof.h\",\"versions\":{\"gradproof.h\":\"" GRADPROOF_H_VERSION "\",\"compiler\":");
#ifdef __VERSION__
    gp__say_quoted(&out, __VERSION__);
#else
    gp__say_quoted(&out, "unknown");
#endif
    gp__say(&out, "},\"optimizers\":[{\"name\":\"update\",\"class\":\"written by hand\",\"groups\":[]}],\"parameters\":[");
    gp__say_parameters(&out, run, ended);
    gp__say(&out, "]");
    if (run->frames_ended) {
        gp__say(&out, ",\"frames_ended\":");
        gp__say_count(&out, (long long)run->frames_ended);
    }
    if (ended) {
        gp__say(&out, ",\"ended\":");
        gp__say_number(&out, now, 17);
        gp__say(&out, ",\"cost\":{\"taped_steps\":0,\"own_seconds\":");
        gp__say_number(&out, run->own_seconds, 6);
        gp__say(&out, ",\"share\":");
        gp__say_number(&out, now > run->began ? run->own_seconds / (now - run->began) : 0.0, 6);
        gp__say(&out, ",\"steps\":");
        gp__say_count(&out, (long long)run->step);
        gp__say(&out, "}");
    }
    gp__say(&out, "}");
    run->rows_changed = 0;
    if (path && draft && !out.failed) file = open(draft, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || !gp__write_whole(file, out.text, out.length) || rename(draft, path) != 0)
        gp__give_up(run, path ? path : "run.json", strerror(errno));
    if (file >= 0) close(file);
    free(out.text);
    free(path);
    free(draft);
}

/* A directory that no other run has: runs/a, else runs/a-2, runs/a-3, … */
static inline char *gp__new_directory(const char *wanted) {
    size_t size = strlen(wanted) + 16;
    char *path = (char *)malloc(size), *slash;
    int number;
    if (!path) return NULL;
    snprintf(path, size, "%s", wanted);
    for (slash = path + strlen(path); slash > path + 1 && slash[-1] == '/'; slash--) slash[-1] = 0;
    for (slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        (void)mkdir(path, 0755); /* whether it was needed, and failed, the last one tells */
        *slash = '/';
    }
    (void)rmdir(path); /* an empty one is taken */
    for (number = 2; number < 10000; number++) {
        size_t length;
        if (mkdir(path, 0755) == 0) return path;
        if (errno != EEXIST) break;
        snprintf(path, size, "%s", wanted);
        for (length = strlen(path); length > 1 && path[length - 1] == '/'; length--) path[length - 1] = 0;
        snprintf(path + length, size - length, "-%d", number);
    }
    free(path);
    return NULL;
}

/* Begins a run in a new directory (`gp_path` says which); tensors are measured at every `every`th step, from the first. */
static inline gp_run *gp_open(const char *path, int every) {
    static const char header[] =
        "step,seconds,epoch,batch,optimizer,loss,lr,grad_norm,norm_before_clip,clip_limit,weight_norm,update_norm,cosine,"
        "backwards,loss_scale,skipped,depth,order\n";
    const uint16_t one = 1;
    gp_run *run = (gp_run *)calloc(1, sizeof *run);
    if (!run || !path || !*path || *(const unsigned char *)&one != 1) {
        fprintf(stderr, "gradproof: nothing is recorded (%s)\n",
                !run ? "no memory" : !path || !*path ? "gp_open was given no path" : "this machine is big-endian");
        free(run);
        return NULL;
    }
    run->every = every > 0 ? every : 1;
    run->frames_left = GP_MOST_FRAMES;
    run->owner = getpid();
    run->began = gp__now();
    run->path = gp__new_directory(path);
    if (!run->path) {
        fprintf(stderr, "gradproof: cannot make the directory %s (%s); training goes on, nothing is recorded\n", path,
                strerror(errno));
        free(run);
        return NULL;
    }
    run->frames = run->steps = -1;
    run->steps = gp__open_file(run, "steps.csv");
    if (!run->broken) run->frames = gp__open_file(run, "tensors.bin");
    gp__append(run, run->steps, "steps.csv", header, sizeof header - 1);
    if (!run->broken) gp__save_info(run, 0);
    return run;
}

/* Where the run is written; NULL where it is not. */
static inline const char *gp_path(const gp_run *run) { return run ? run->path : NULL; }

/* What was called, for the report: gp_command(run, argc, argv). */
static inline void gp_command(gp_run *run, int argc, char **argv) {
    gp__text out;
    int i;
    if (!gp__is_ours(run)) return;
    memset(&out, 0, sizeof out);
    gp__say(&out, "[");
    for (i = 0; i < argc; i++) {
        if (i) gp__say(&out, ",");
        gp__say_quoted(&out, argv[i]);
    }
    gp__say(&out, "]");
    free(run->command);
    run->command = out.failed ? NULL : out.text;
    run->rows_changed = 1;
}

static inline gp_shape gp__shape(int dims, int64_t a, int64_t b, int64_t c, int64_t d) {
    gp_shape shape;
    memset(&shape, 0, sizeof shape);
    shape.dims = dims;
    shape.size[0] = a;
    shape.size[1] = b;
    shape.size[2] = c;
    shape.size[3] = d;
    return shape;
}

static inline gp_shape gp_1d(int64_t a) { return gp__shape(1, a, 0, 0, 0); }
static inline gp_shape gp_2d(int64_t a, int64_t b) { return gp__shape(2, a, b, 0, 0); }
static inline gp_shape gp_3d(int64_t a, int64_t b, int64_t c) { return gp__shape(3, a, b, c, 0); }
static inline gp_shape gp_4d(int64_t a, int64_t b, int64_t c, int64_t d) { return gp__shape(4, a, b, c, d); }

static inline gp__tensor *gp__add_tensor(gp_run *run, gp_kind kind, const char *name, const void *data, gp_dtype dtype,
                                         gp_shape shape) {
    static const char *const bad[] = {"it has no name", "its pointer is NULL", "it has no such dtype",
                                      "it has too many dimensions, or a negative one", "integers are measured in batches only",
                                      "it was named before with another shape or dtype", "there is no memory for it"};
    gp__tensor *t, **more;
    size_t count = 1;
    int i, why = !name || !*name ? 0 : (int)dtype < 0 || dtype > GP_U8 || (int)kind < 0 || kind > GP_BATCH ? 2 : -1;
    if (why < 0 && (shape.dims < 0 || shape.dims > GP__MOST_DIMENSIONS)) why = 3;
    for (i = 0; why < 0 && i < shape.dims; i++) {
        if (shape.size[i] < 0) why = 3;
        count *= (size_t)shape.size[i];
    }
    if (why < 0 && !data && count) why = 1;
    if (why < 0 && dtype >= GP_I32 && kind != GP_BATCH) why = 4;
    t = why < 0 ? gp__find(run, kind, name) : NULL;
    if (t && (t->dtype != dtype || t->count != count)) why = 5;
    if (t && why < 0) { /* it has moved in memory */
        t->data = data;
        return t;
    }
    if (why < 0) {
        t = (gp__tensor *)calloc(1, sizeof *t);
        more = (gp__tensor **)realloc(run->tensors, (size_t)(run->count + 1) * sizeof *more);
        if (more) run->tensors = more;
        if (t) t->name = gp__copy_text(name);
        if (!t || !more || !t->name) {
            if (t) free(t->name);
            free(t);
            why = 6;
        }
    }
    if (why >= 0) {
        gp__complain(run, "a tensor", name, bad[why]);
        return NULL;
    }
    t->kind = kind;
    t->dtype = dtype;
    t->shape = shape;
    t->data = data;
    t->count = count;
    if (kind != GP_BATCH) t->number = (uint32_t)run->numbers++;
    run->tensors[run->count++] = t;
    run->rows_changed = 1;
    return t;
}

/* Names a tensor on the host. A weight and its gradient have one name. Called again, it says where the tensor is now. */
static inline void gp_tensor(gp_run *run, gp_kind kind, const char *name, const void *data, gp_dtype dtype, gp_shape shape) {
    if (gp__is_ours(run)) gp__add_tensor(run, kind, name, data, dtype, shape);
}

/* Asks for the updates of a weight, or with NULL of all weights named so far; costs a copy of each. */
static inline void gp_updates(gp_run *run, const char *name) {
    int i, found = 0;
    if (!gp__is_ours(run)) return;
    for (i = 0; i < run->count; i++) {
        gp__tensor *t = run->tensors[i];
        if (t->kind != GP_WEIGHT || (name && strcmp(t->name, name) != 0)) continue;
        found = 1;
        if (t->wants_update) continue;
        t->wants_update = 1;
        t->update_number = (uint32_t)run->numbers++;
        run->rows_changed = 1;
    }
    if (!found) gp__complain(run, "the update of", name ? name : "every weight", "no such weight was named before");
}

/* Whether tensors are measured at the step that is under way. */
static inline int gp_measures(const gp_run *run) {
    return gp__is_ours(run) && run->count > 0 && run->step % (uint64_t)run->every == 0;
}

static inline void gp__mark(gp_run *run, char what) {
    size_t length = strlen(run->order);
    if (length + 1 < sizeof run->order) run->order[length] = what;
}

/* Said where a step does it: gradients are cleared; a backward is done; gradients were clipped. */
static inline void gp_zeroed(gp_run *run) {
    if (gp__is_ours(run)) gp__mark(run, 'z');
}

static inline void gp_backward(gp_run *run) {
    if (!gp__is_ours(run)) return;
    gp__mark(run, 'b');
    run->backwards++;
}

static inline void gp_clipped(gp_run *run, double norm_before, double limit) {
    if (!gp__is_ours(run)) return;
    gp__mark(run, 'c');
    run->norm_before_clip = norm_before;
    run->clip_limit = limit;
    run->clipped = 1;
}

static inline void gp__keep(gp_run *run, gp__tensor *t) {
    size_t bytes = t->count * gp__size_of(t->dtype);
    if (t->on_device) {
        t->has_before = run->device->keep(run, t);
        return;
    }
    if (!t->before) t->before = malloc(bytes ? bytes : 1);
    if (t->before && bytes) memcpy(t->before, t->data, bytes);
    t->has_before = t->before != NULL;
}

static inline void gp__note_statistics(gp__tensor *t) {
    if (t->kind == GP_WEIGHT) {
        if (!t->seen)
            t->first = t->last;
        else if (memcmp(&t->first, &t->last, sizeof t->last) != 0)
            t->moved = 1;
        if (t->measured == 2 && t->update.count > t->update.zero) t->moved = 1;
    }
    t->seen++;
}

static inline void gp__measure_one(gp_run *run, gp__tensor *t) {
    if (t->kind == GP_BATCH || t->measured) return;
    t->measured = 1;
    if (!t->on_device)
        t->last = gp_measure(t->data, NULL, t->dtype, t->count);
    else if (!run->device->measure(run, t, NULL))
        t->measured = 0;
}

static inline void gp__measure_update(gp_run *run, gp__tensor *t) {
    if (!t->has_before || !t->measured) return;
    t->has_before = 0;
    if (t->on_device && !run->device->measure(run, t, t->before)) return;
    if (!t->on_device) t->update = gp_measure(t->data, t->before, t->dtype, t->count);
    t->measured = 2;
}

/* Called after backward and clip, before the weights change: gradients are measured as the update will find them, weights as
   the forward has used them. Without it, gp_step measures what it finds. */
static inline void gp_will_update(gp_run *run) {
    double start;
    int i;
    if (!gp__is_ours(run)) return;
    gp__mark(run, 's');
    run->will_update = 1;
    if (!gp_measures(run)) return;
    start = gp__now();
    for (i = 0; i < run->count; i++) gp__measure_one(run, run->tensors[i]);
    if (run->device) run->device->collect(run);
    for (i = 0; i < run->count; i++)
        if (run->tensors[i]->wants_update) gp__keep(run, run->tensors[i]);
    run->own_seconds += gp__now() - start;
}

static inline uint32_t gp__crc(const unsigned char *data, size_t size) {
    static const uint32_t nibble[16] = {0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
                                        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
                                        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c};
    uint32_t crc = 0xffffffffu;
    size_t i;
    for (i = 0; i < size; i++) {
        crc ^= data[i];
        crc = crc >> 4 ^ nibble[crc & 15];
        crc = crc >> 4 ^ nibble[crc & 15];
    }
    return ~crc;
}

/* A finite number stays finite. */
static inline float gp__narrow(double x) {
    const double largest = 3.4028234663852886e38;
    if (!gp__is_finite(x)) return (float)x;
    return (float)(x > largest ? largest : x < -largest ? -largest : x);
}

#define GP__COLUMNS 13

static inline void gp__fill_row(const gp_stats *s, float *row) {
    const uint32_t not_measured = 0x7fc00000;
    double finite = s->count - s->nan - s->inf, mean, variance;
    int i;
    if (finite < 1) finite = 1;
    mean = s->sum / finite;
    variance = s->squares / finite - mean * mean;
    row[0] = gp__narrow(s->nan);
    row[1] = gp__narrow(s->inf);
    row[2] = gp__narrow(s->zero);
    row[3] = gp__narrow(s->subnormal);
    row[4] = gp__narrow(s->min);
    row[5] = gp__narrow(s->max);
    row[6] = gp__narrow(s->max > -s->min ? s->max : -s->min);
    row[7] = gp__narrow(mean);
    row[8] = gp__narrow(sqrt(variance > 0 ? variance : 0));
    row[9] = gp__narrow(sqrt(s->squares));
    for (i = 10; i < GP__COLUMNS; i++) memcpy(&row[i], &not_measured, sizeof not_measured);
}

/* Whether a frame of so many bytes has room; when a quarter of what was left is full, fewer steps are measured. */
static inline int gp__has_room(gp_run *run, double size) {
    if (run->frame_bytes + size > GP_MOST_FRAMES) {
        if (!run->frames_ended) run->frames_ended = run->step;
        return 0;
    }
    run->frame_bytes += size;
    if (GP_MOST_FRAMES - run->frame_bytes < 0.75 * run->frames_left && run->every < 1 << 29) {
        run->frames_left *= 0.75;
        run->every *= 2;
        run->rows_changed = 1; /* run.json says how often */
    }
    return 1;
}

/* One frame: a header of 28 bytes, the numbers of the tensors, their statistics. */
static inline void gp__write_frame(gp_run *run) {
    uint32_t rows = 0, row = 0, size, content = 1, crc;
    unsigned char *frame;
    int i;
    for (i = 0; i < run->count; i++) rows += (uint32_t)run->tensors[i]->measured;
    size = rows * 4 * (1 + GP__COLUMNS);
    if (!gp__has_room(run, 28.0 + size)) return;
    frame = (unsigned char *)malloc(28 + (size_t)size);
    if (!frame) {
        gp__give_up(run, "tensors.bin", "no memory");
        return;
    }
    for (i = 0; i < run->count; i++) {
        const gp__tensor *t = run->tensors[i];
        float values[GP__COLUMNS];
        int which;
        for (which = 0; which < t->measured; which++, row++) {
            gp__fill_row(which ? &t->update : &t->last, values);
            memcpy(frame + 28 + 4 * (size_t)row, which ? &t->update_number : &t->number, 4);
            memcpy(frame + 28 + 4 * (size_t)rows + sizeof values * (size_t)row, values, sizeof values);
        }
    }
    crc = gp__crc(frame + 28, size);
    memcpy(frame, "GPf1", 4);
    memcpy(frame + 4, &content, 4);
    memcpy(frame + 8, &run->step, 8);
    memcpy(frame + 16, &rows, 4);
    memcpy(frame + 20, &size, 4);
    memcpy(frame + 24, &crc, 4);
    if (run->rows_changed) gp__save_info(run, 0);
    if (rows) gp__append(run, run->frames, "tensors.bin", frame, 28 + (size_t)size);
    free(frame);
}

/* The norm of all tensors of a kind together, as a cell; nan or inf if one of them holds such a value; empty if none was
   measured. */
static inline void gp__say_norm(gp__text *out, const gp_run *run, gp_kind kind, int measured) {
    double squares = 0, nan = 0, inf = 0;
    int i, some = 0;
    for (i = 0; i < run->count; i++) {
        const gp__tensor *t = run->tensors[i];
        const gp_stats *s = measured == 2 ? &t->update : &t->last;
        if (t->kind != kind || t->measured < measured) continue;
        some = 1;
        squares += s->squares;
        nan += s->nan;
        inf += s->inf;
    }
    if (!some) return;
    if (nan > 0)
        gp__say(out, "nan");
    else if (inf > 0)
        gp__say(out, "inf");
    else
        gp__say_number(out, sqrt(squares), 9);
}

static inline void gp__write_row(gp_run *run, double loss, double lr, int depth) {
    gp__text out;
    memset(&out, 0, sizeof out);
    gp__say_count(&out, (long long)run->step);
    gp__say(&out, ",");
    gp__say_number(&out, gp__now() - run->began, 9);
    gp__say(&out, ",,,,");
    gp__say_number(&out, loss, 9);
    gp__say(&out, ",");
    gp__say_number(&out, lr, 9);
    gp__say(&out, ",");
    gp__say_norm(&out, run, GP_GRADIENT, 1);
    gp__say(&out, ",");
    if (run->clipped) gp__say_number(&out, run->norm_before_clip, 9);
    gp__say(&out, ",");
    if (run->clipped) gp__say_number(&out, run->clip_limit, 9);
    gp__say(&out, ",");
    gp__say_norm(&out, run, GP_WEIGHT, 1);
    gp__say(&out, ",");
    gp__say_norm(&out, run, GP_WEIGHT, 2);
    gp__say(&out, ",,");
    if (run->backwards) gp__say_count(&out, run->backwards);
    gp__say(&out, ",,,");
    gp__say_count(&out, depth);
    gp__say(&out, ",");
    gp__say(&out, run->order);
    gp__say(&out, "\n");
    if (out.failed)
        gp__give_up(run, "steps.csv", "no memory");
    else
        gp__append(run, run->steps, "steps.csv", out.text, out.length);
    free(out.text);
}

static inline void gp__finish_dump(gp_run *run, double loss, double lr);

/* The end of a step, after the weights have changed: one row of the run; every `every`th time, statistics, too. */
static inline void gp_step(gp_run *run, double loss, double lr) {
    double start;
    int i, depth = 0, first_infinity;
    if (!gp__is_ours(run)) return;
    start = gp__now();
    first_infinity = !gp__is_finite(loss) && !run->told_of_infinity;
    run->told_of_infinity |= first_infinity;
    if (gp_measures(run) || first_infinity) {
        for (i = 0; i < run->count; i++) {
            gp__tensor *t = run->tensors[i];
            gp__measure_one(run, t);
            gp__measure_update(run, t);
            if (t->kind != GP_BATCH && depth < 2) depth = 2;
            if (t->kind == GP_ACTIVATION) depth = 4;
        }
        if (run->device) run->device->collect(run);
        for (i = 0; i < run->count; i++)
            if (run->tensors[i]->measured) gp__note_statistics(run->tensors[i]);
        gp__write_frame(run);
    }
    if (!run->broken) gp__write_row(run, loss, lr, depth);
    gp__finish_dump(run, loss, lr);
    run->step++;
    for (i = 0; i < run->count; i++) {
        gp__tensor *t = run->tensors[i];
        t->measured = 0;
        if (t->wants_update && !run->will_update && gp_measures(run)) gp__keep(run, t);
    }
    memset(run->order, 0, sizeof run->order);
    run->backwards = run->clipped = run->will_update = 0;
    run->own_seconds += gp__now() - start;
}

/* ---- a step as a file ---- */

/* The safetensors header of a dump: {"__metadata__":{…},"weights/fc":{"dtype":"F32","shape":[…],"data_offsets":[…]},…} */
static inline void gp__say_dump_header(gp__text *out, const gp_run *run, double loss, double lr) {
    static const char *const folders[] = {"weights/", "gradients/", "activations/", "activation_gradients/", "", "", "batch/"};
    static const char *const dtypes[] = {"F32", "F64", "BF16", "F16", "I32", "I64", "U8"};
    unsigned long long offset = 0;
    char digits[64];
    int i;
    gp__say(out, "{\"__metadata__\":{\"format\":\"gradproof-dump-1\",\"byte_order\":\"little\",\"step\":\"");
    gp__say_count(out, (long long)run->step);
    gp__say(out, "\",\"loss\":\"");
    gp__say_number(out, loss, 17);
    gp__say(out, "\",\"lr\":\"");
    gp__say_number(out, lr, 17);
    gp__say(out, "\"}");
    for (i = 0; i < run->count; i++) {
        const gp__tensor *t = run->tensors[i];
        unsigned long long bytes = (unsigned long long)t->count * gp__size_of(t->dtype);
        gp__text name;
        if (!*folders[t->kind]) continue;
        memset(&name, 0, sizeof name);
        gp__say(&name, folders[t->kind]);
        gp__say(&name, t->name);
        gp__say(out, ",");
        gp__say_quoted(out, name.failed ? t->name : name.text);
        free(name.text);
        gp__say(out, ":{\"dtype\":\"");
        gp__say(out, dtypes[t->dtype]);
        gp__say(out, "\",\"shape\":");
        gp__say_shape(out, &t->shape);
        snprintf(digits, sizeof digits, ",\"data_offsets\":[%llu,%llu]}", offset, offset + bytes);
        gp__say(out, digits);
        offset += bytes;
    }
    gp__say(out, "}");
}

static inline int gp__write_data(gp_run *run, FILE *file, const gp__tensor *t) {
    size_t bytes = t->count * gp__size_of(t->dtype), done = 0, piece;
    char *room;
    if (!t->on_device) return !bytes || fwrite(t->data, 1, bytes, file) == bytes;
    room = (char *)malloc(1 << 20);
    for (; room && done < bytes; done += piece) {
        piece = bytes - done < 1 << 20 ? bytes - done : 1 << 20;
        if (!run->device->fetch(room, (const char *)t->data + done, piece) || fwrite(room, 1, piece, file) != piece) break;
    }
    free(room);
    return done == bytes;
}

static inline void gp__drop_dump(gp_run *run, const char *why) {
    fprintf(stderr, "gradproof: cannot write the dump %s (%s); training goes on\n", run->dump ? run->dump : "", why);
    if (run->dump_draft) (void)remove(run->dump_draft);
    free(run->dump);
    free(run->dump_draft);
    run->dump = run->dump_draft = NULL;
}

/* Writes this step as a file for `gradproof check-dump`: every weight, batch, activation and gradient that was named. Called
   after the backward and before the update; the file is there after the gp_step that follows, with its loss. */
static inline void gp_dump(gp_run *run, const char *path) {
    gp__text header;
    unsigned char length[8];
    uint64_t size;
    FILE *file;
    double start, bytes = 0;
    int i, fine;
    if (!gp__is_ours(run) || !path) return;
    if (run->will_update)
        fprintf(stderr, "gradproof: gp_dump comes after gp_will_update: were the weights those of the forward?\n");
    if (run->dump) gp__drop_dump(run, "another dump of the same step came after it");
    start = gp__now();
    run->dump = gp__copy_text(path);
    run->dump_draft = (char *)malloc(strlen(path) + 8);
    if (run->dump && run->dump_draft) snprintf(run->dump_draft, strlen(path) + 8, "%s.tmp", path);
    memset(&header, 0, sizeof header);
    gp__say_dump_header(&header, run, -1.7976931348623157e308, -1.7976931348623157e308); /* as long as a number gets */
    while (!header.failed && header.length % 8) gp__say(&header, " ");
    if (!run->dump || !run->dump_draft || header.failed) {
        free(header.text);
        gp__drop_dump(run, "no memory");
        return;
    }
    size = header.length;
    run->dump_header = header.length;
    for (i = 0; i < 8; i++) length[i] = (unsigned char)(size >> 8 * i);
    for (i = 0; i < run->count; i++) bytes += (double)run->tensors[i]->count * (double)gp__size_of(run->tensors[i]->dtype);
    file = gp__is_allowed(bytes + (double)header.length + 8) ? fopen(run->dump_draft, "wb") : NULL;
    fine = file && fwrite(length, 1, 8, file) == 8 && fwrite(header.text, 1, header.length, file) == header.length;
    for (i = 0; fine && i < run->count; i++) {
        gp_kind kind = run->tensors[i]->kind;
        if (kind != GP_ADAM_M && kind != GP_ADAM_V) fine = gp__write_data(run, file, run->tensors[i]);
    }
    if (file && fclose(file) != 0) fine = 0;
    free(header.text);
    if (!fine) gp__drop_dump(run, strerror(errno));
    run->own_seconds += gp__now() - start;
}

/* The loss and the rate of the step go into the header, and the file gets its name. */
static inline void gp__finish_dump(gp_run *run, double loss, double lr) {
    gp__text header;
    FILE *file;
    int fine;
    if (!run->dump) return;
    memset(&header, 0, sizeof header);
    gp__say_dump_header(&header, run, loss, lr);
    while (!header.failed && header.length < run->dump_header) gp__say(&header, " ");
    if (header.failed || header.length != run->dump_header) {
        free(header.text);
        gp__drop_dump(run, "tensors were named between gp_dump and gp_step");
        return;
    }
    file = fopen(run->dump_draft, "r+b");
    fine = file && fseek(file, 8, SEEK_SET) == 0 &&
           fwrite(header.text, 1, header.length, file) == header.length;
    if (file && fclose(file) != 0) fine = 0;
    free(header.text);
    if (fine && rename(run->dump_draft, run->dump) == 0) {
        free(run->dump);
        free(run->dump_draft);
        run->dump = run->dump_draft = NULL;
    } else {
        gp__drop_dump(run, strerror(errno));
    }
}

/* Ends a run; what was written stays as it is. */
static inline void gp_close(gp_run *run) {
    int i;
    if (!run) return;
    if (gp__is_ours(run)) {
        if (run->dump) gp__drop_dump(run, "no gp_step followed it");
        gp__save_info(run, 1);
    }
    if (run->device) run->device->release(run);
    if (run->steps >= 0) close(run->steps);
    if (run->frames >= 0) close(run->frames);
    for (i = 0; i < run->count; i++) {
        if (!run->tensors[i]->on_device) free(run->tensors[i]->before);
        free(run->tensors[i]->name);
        free(run->tensors[i]);
    }
    free(run->tensors);
    free(run->command);
    free(run->dump);
    free(run->dump_draft);
    free(run->path);
    free(run);
}

#ifdef __CUDACC__
/* ---- tensors on a GPU: this part is there for nvcc alone; a run opened here may be used from C files, too ---- */

/* The statistics of a tensor under way. `low` and `high` are keys that are ordered as the numbers are, and begin at 0. */
typedef struct {
    double nan, inf, zero, subnormal, sum, squares;
    unsigned long long low, high;
} gp__row;

typedef struct {
    gp__row *rows, *host; /* on the device; as they arrive */
    struct {
        gp__tensor *tensor;
        int update;
    } *of;
    int room, used;
    cudaStream_t stream;
} gp__gpu;

template <int dtype> struct gp__entry { typedef float real; typedef uint32_t stored; enum { pack = 4 }; };
template <> struct gp__entry<GP_F64> { typedef double real; typedef uint64_t stored; enum { pack = 2 }; };
template <> struct gp__entry<GP_BF16> { typedef float real; typedef uint16_t stored; enum { pack = 8 }; };
template <> struct gp__entry<GP_F16> { typedef float real; typedef uint16_t stored; enum { pack = 8 }; };

template <int dtype> __device__ inline typename gp__entry<dtype>::real gp__decode(typename gp__entry<dtype>::stored bits) {
    typedef typename gp__entry<dtype>::real real;
    float wide;
    if (dtype == GP_F64) return (real)__longlong_as_double((long long)bits);
    if (dtype == GP_F32) return (real)__uint_as_float((unsigned)bits);
    if (dtype == GP_BF16) return (real)__uint_as_float((unsigned)bits << 16);
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)bits));
    return (real)wide;
}

__device__ inline unsigned long long gp__key(double x) {
    unsigned long long bits = (unsigned long long)__double_as_longlong(x);
    return bits >> 63 ? ~bits : bits | 0x8000000000000000ULL;
}

__device__ inline double gp__sum_of_warp(double x) {
    for (int other = 16; other; other /= 2) x += __shfl_xor_sync(0xffffffffu, x, other);
    return x;
}

__device__ inline unsigned long long gp__max_of_warp(unsigned long long x) {
    for (int other = 16; other; other /= 2) {
        unsigned long long there = __shfl_xor_sync(0xffffffffu, x, other);
        x = there > x ? there : x;
    }
    return x;
}

/* What one thread has seen. */
template <typename real> struct gp__seen {
    double sum, squares;
    real low, high;
    unsigned nan, inf, zero, subnormal;
};

__device__ inline float gp__least(float a, float b) { return fminf(a, b); }
__device__ inline double gp__least(double a, double b) { return a < b ? a : b; }
__device__ inline float gp__most(float a, float b) { return fmaxf(a, b); }
__device__ inline double gp__most(double a, double b) { return a > b ? a : b; }
__device__ inline float gp__size(float a) { return fabsf(a); }
__device__ inline double gp__size(double a) { return fabs(a); }

/* The first n entries of a pack. They are added up in their own precision, then in double; a pack whose squares leave the format
   is looked at entry by entry, and so is one with an entry near zero. */
template <int pack, typename real>
__device__ inline void gp__see(gp__seen<real> &seen, const real (&value)[pack], int n, real tiny) {
    real part = 0, squares = 0, least = value[0], most = value[0], smallest = gp__size(value[0]);
#pragma unroll
    for (int i = 0; i < pack; i++) {
        if (i >= n) continue;
        part += value[i];
        squares += value[i] * value[i];
        least = gp__least(least, value[i]);
        most = gp__most(most, value[i]);
        smallest = gp__least(smallest, gp__size(value[i]));
    }
    if (!(smallest >= tiny)) {
#pragma unroll
        for (int i = 0; i < pack; i++) {
            if (i >= n) continue;
            seen.zero += value[i] == 0;
            seen.subnormal += value[i] != 0 && gp__size(value[i]) < tiny;
        }
    }
    if (squares >= (real)1e-24 && squares <= (real)1e36) {
        seen.sum += (double)part;
        seen.squares += (double)squares;
        seen.low = gp__least(seen.low, least);
        seen.high = gp__most(seen.high, most);
        return;
    }
#pragma unroll
    for (int i = 0; i < pack; i++) {
        double v = (double)value[i];
        unsigned long long bits = (unsigned long long)__double_as_longlong(v) & 0x7fffffffffffffffULL;
        if (i >= n) continue;
        if (bits >= 0x7ff0000000000000ULL) {
            seen.nan += bits > 0x7ff0000000000000ULL;
            seen.inf += bits == 0x7ff0000000000000ULL;
            continue;
        }
        seen.sum += v;
        seen.squares += v * v;
        seen.low = gp__least(seen.low, value[i]);
        seen.high = gp__most(seen.high, value[i]);
    }
}

/* One read of a tensor (and of its copy, for a change), 16 bytes at a time where it is aligned, several of them under way. */
template <int dtype, int change>
__global__ void __launch_bounds__(256) gp__measure_kernel(const void *data, const void *before, size_t count, int aligned, gp__row *row) {
    typedef typename gp__entry<dtype>::real real;
    typedef typename gp__entry<dtype>::stored stored;
    enum { pack = gp__entry<dtype>::pack, ahead = change ? 4 : 8 };
    union many { uint4 whole; stored one[pack]; };
    const real tiny = (real)(dtype == GP_F64 ? 2.2250738585072014e-308 : dtype == GP_F16 && !change ? 6.103515625e-5 : 1.17549435e-38);
    const size_t whole = aligned ? count / pack : 0, packs = (count + pack - 1) / pack, tile = (size_t)blockDim.x * ahead;
    gp__seen<real> seen = {0, 0, (real)(1.0 / 0.0), (real)(-1.0 / 0.0), 0, 0, 0, 0};
    for (size_t first = blockIdx.x * tile + threadIdx.x; first < packs; first += gridDim.x * tile) {
        if (first + (ahead - 1) * (size_t)blockDim.x < whole) {
            many now[ahead], old[ahead];
#pragma unroll
            for (int j = 0; j < ahead; j++) {
                now[j].whole = __ldcs((const uint4 *)data + first + j * (size_t)blockDim.x);
                if (change) old[j].whole = __ldcs((const uint4 *)before + first + j * (size_t)blockDim.x);
            }
#pragma unroll
            for (int j = 0; j < ahead; j++) {
                real value[pack];
#pragma unroll
                for (int i = 0; i < pack; i++) {
                    value[i] = gp__decode<dtype>(now[j].one[i]);
                    if (change) value[i] -= gp__decode<dtype>(old[j].one[i]);
                }
                gp__see<pack>(seen, value, pack, tiny);
            }
            continue;
        }
        for (size_t p = first; p < packs && p < first + tile; p += blockDim.x) {
            int n = count - p * pack < (size_t)pack ? (int)(count - p * pack) : pack;
            real value[pack];
            for (int i = 0; i < pack; i++) {
                size_t at = p * pack + (i < n ? i : 0);
                value[i] = gp__decode<dtype>(((const stored *)data)[at]);
                if (change) value[i] -= gp__decode<dtype>(((const stored *)before)[at]);
            }
            gp__see<pack>(seen, value, n, tiny);
        }
    }
    __shared__ double sums[6][32];
    __shared__ unsigned long long ends[2][32];
    double mine[6] = {(double)seen.nan, (double)seen.inf, (double)seen.zero, (double)seen.subnormal, seen.sum, seen.squares};
    unsigned long long end[2] = {0, 0};
    if (seen.low <= seen.high) end[0] = ~gp__key((double)seen.low), end[1] = gp__key((double)seen.high);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (int i = 0; i < 6; i++) {
        double all = gp__sum_of_warp(mine[i]);
        if (lane == 0) sums[i][warp] = all;
    }
    for (int i = 0; i < 2; i++) {
        unsigned long long all = gp__max_of_warp(end[i]);
        if (lane == 0) ends[i][warp] = all;
    }
    __syncthreads();
    if (warp) return;
    for (int i = 0; i < 6; i++) {
        double all = gp__sum_of_warp(lane < warps ? sums[i][lane] : 0.0);
        if (lane == 0 && all != 0) atomicAdd(&row->nan + i, all);
    }
    for (int i = 0; i < 2; i++) {
        unsigned long long all = gp__max_of_warp(lane < warps ? ends[i][lane] : 0);
        if (lane == 0 && all) atomicMax(&row->low + i, all);
    }
}

static inline double gp__of_key(unsigned long long key) {
    unsigned long long bits = key >> 63 ? key & 0x7fffffffffffffffULL : ~key;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Waits for the numbers of all tensors whose measuring has begun: the one transfer of a step. */
static inline int gp__gpu_collect(gp_run *run) {
    gp__gpu *gpu = (gp__gpu *)run->device_rows;
    size_t bytes = (size_t)gpu->used * sizeof(gp__row);
    int i, fine = 1;
    if (!gpu->used) return 1;
    fine = cudaMemcpyAsync(gpu->host, gpu->rows, bytes, cudaMemcpyDeviceToHost, gpu->stream) == cudaSuccess &&
           cudaStreamSynchronize(gpu->stream) == cudaSuccess;
    for (i = 0; i < gpu->used; i++) {
        gp__tensor *t = gpu->of[i].tensor;
        const gp__row *row = &gpu->host[i];
        gp_stats s;
        if (!fine) {
            t->measured = 0;
            continue;
        }
        s.count = (double)t->count;
        s.nan = row->nan;
        s.inf = row->inf;
        s.zero = row->zero;
        s.subnormal = row->subnormal;
        s.sum = row->sum;
        s.squares = row->squares;
        s.min = row->low ? gp__of_key(~row->low) : 0;
        s.max = row->high ? gp__of_key(row->high) : 0;
        *(gpu->of[i].update ? &t->update : &t->last) = s;
    }
    gpu->used = 0;
    if (!fine) gp__complain(run, "a measurement of", "the device's tensors", cudaGetErrorString(cudaPeekAtLastError()));
    return fine;
}

static inline int gp__gpu_make_room(gp_run *run, gp__gpu *gpu) {
    int room = 2 * run->count + 16;
    gp__gpu_collect(run);
    cudaFree(gpu->rows);
    gpu->rows = NULL;
    gpu->room = 0;
    gpu->host = (gp__row *)realloc(gpu->host, (size_t)room * sizeof *gpu->host);
    *(void **)&gpu->of = realloc(gpu->of, (size_t)room * sizeof *gpu->of);
    if (!gpu->host || !gpu->of || cudaMalloc((void **)&gpu->rows, (size_t)room * sizeof *gpu->rows) != cudaSuccess) return 0;
    gpu->room = room;
    return 1;
}

template <int change>
static inline void gp__launch(gp__tensor *t, const void *before, int blocks, int aligned, gp__row *row, cudaStream_t stream) {
    switch (t->dtype) {
    case GP_F64: gp__measure_kernel<GP_F64, change><<<blocks, 256, 0, stream>>>(t->data, before, t->count, aligned, row); break;
    case GP_BF16: gp__measure_kernel<GP_BF16, change><<<blocks, 256, 0, stream>>>(t->data, before, t->count, aligned, row); break;
    case GP_F16: gp__measure_kernel<GP_F16, change><<<blocks, 256, 0, stream>>>(t->data, before, t->count, aligned, row); break;
    default: gp__measure_kernel<GP_F32, change><<<blocks, 256, 0, stream>>>(t->data, before, t->count, aligned, row); break;
    }
}

static inline int gp__gpu_measure(gp_run *run, gp__tensor *t, const void *before) {
    gp__gpu *gpu = (gp__gpu *)run->device_rows;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    int aligned = ((uintptr_t)t->data | (uintptr_t)before) % 16 == 0, device = 0, processors = 1, blocks;
    gp__row *row;
    if (cudaStreamIsCapturing(gpu->stream, &capture) != cudaSuccess || capture != cudaStreamCaptureStatusNone) return 0;
    if (cudaPeekAtLastError() != cudaSuccess) return 0; /* the program's own: it is not ours to clear */
    if (gpu->used == gpu->room && !gp__gpu_make_room(run, gpu)) return 0;
    row = gpu->rows + gpu->used;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    blocks = (int)((t->count + 8191) / 8192);
    blocks = blocks < 1 ? 1 : blocks > 8 * processors ? 8 * processors : blocks;
    cudaMemsetAsync(row, 0, sizeof *row, gpu->stream);
    if (before)
        gp__launch<1>(t, before, blocks, aligned, row, gpu->stream);
    else
        gp__launch<0>(t, before, blocks, aligned, row, gpu->stream);
    if (cudaGetLastError() != cudaSuccess) return 0;
    gpu->of[gpu->used].tensor = t;
    gpu->of[gpu->used++].update = before != NULL;
    return 1;
}

static inline int gp__gpu_keep(gp_run *run, gp__tensor *t) {
    gp__gpu *gpu = (gp__gpu *)run->device_rows;
    size_t bytes = t->count * gp__size_of(t->dtype);
    if (!t->before && cudaMalloc(&t->before, bytes ? bytes : 1) != cudaSuccess) {
        (void)cudaGetLastError();
        t->before = NULL;
        t->wants_update = 0;
        gp__complain(run, "the update of", t->name, "there is no room on the device for a copy");
        return 0;
    }
    return cudaMemcpyAsync(t->before, t->data, bytes, cudaMemcpyDeviceToDevice, gpu->stream) == cudaSuccess;
}

static inline int gp__gpu_fetch(void *host, const void *device, size_t bytes) {
    return cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
}

static inline void gp__gpu_release(gp_run *run) {
    gp__gpu *gpu = (gp__gpu *)run->device_rows;
    int i;
    for (i = 0; i < run->count; i++)
        if (run->tensors[i]->on_device) cudaFree(run->tensors[i]->before);
    cudaFree(gpu->rows);
    free(gpu->host);
    free(gpu->of);
    free(gpu);
}

static inline int gp__has_gpu(gp_run *run) {
    static const gp__device functions = {gp__gpu_measure, gp__gpu_collect, gp__gpu_keep, gp__gpu_fetch, gp__gpu_release};
    if (!run->device_rows) run->device_rows = calloc(1, sizeof(gp__gpu));
    if (run->device_rows) run->device = &functions;
    return run->device_rows != NULL;
}

/* As gp_tensor, of a tensor in the memory of the GPU. */
static inline void gp_device_tensor(gp_run *run, gp_kind kind, const char *name, const void *data, gp_dtype dtype,
                                    gp_shape shape) {
    gp__tensor *t = gp__is_ours(run) && gp__has_gpu(run) ? gp__add_tensor(run, kind, name, data, dtype, shape) : NULL;
    if (t) t->on_device = 1;
}

/* The stream in which the training runs, where that is not the default one. */
static inline void gp_device_stream(gp_run *run, cudaStream_t stream) {
    if (gp__is_ours(run) && gp__has_gpu(run)) ((gp__gpu *)run->device_rows)->stream = stream;
}
#endif

#endif
