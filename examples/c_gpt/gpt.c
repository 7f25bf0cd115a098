/* A small GPT in C: every backward by hand, watched through gradproof.h.

       make && ./gpt --steps 300                trains on bytes, writes runs/gpt, dumps step 5
       gradproof diagnose runs/gpt
       gradproof check-dump step.safetensors --before before.safetensors --against reference.py:loss

   -DSLIP_… plants one of twelve mistakes (`make slip SLIP=NO_MASK`); the comment at each #ifdef says what it does.

   B batch, T time, C channels, V vocabulary, NH heads, HS = C / NH; row-major, a linear layer's weight is (outputs, inputs). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tgmath.h>

#include "gradproof.h"
#include "loss.h"

#ifdef GPT_DOUBLE
#define DTYPE GP_F64
#else
#define DTYPE GP_F32
#endif

enum { V = 256 }; /* bytes */

static int B = 8, T = 32, C = 32, NH = 4, L = 2;

/* ---- layers: a pair of functions each; a backward adds to the gradients it is given ---- */

static void embedding_forward(real *out, const int *tokens, const real *wte, const real *wpe) {
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) out[i * C + c] = wte[tokens[i] * C + c] + wpe[i % T * C + c];
}

static void embedding_backward(const real *dout, const int *tokens, real *dwte, real *dwpe) {
    for (int i = 0; i < B * T; i++)
        for (int c = 0; c < C; c++) {
            dwte[tokens[i] * C + c] += dout[i * C + c];
            dwpe[i % T * C + c] += dout[i * C + c];
        }
}

static void layernorm_forward(real *out, real *mean, real *rstd, const real *x, const real *weight, const real *bias) {
    for (int i = 0; i < B * T; i++, x += C, out += C) {
        real m = 0, v = 0;
        for (int c = 0; c < C; c++) m += x[c] / C;
        for (int c = 0; c < C; c++) v += (x[c] - m) * (x[c] - m) / C;
        mean[i] = m;
        rstd[i] = 1 / sqrt(v + (real)1e-5);
        for (int c = 0; c < C; c++) out[c] = (x[c] - m) * rstd[i] * weight[c] + bias[c];
    }
}

static void layernorm_backward(real *dx, real *dweight, real *dbias, const real *dout, const real *x, const real *mean,
                               const real *rstd, const real *weight) {
    for (int i = 0; i < B * T; i++, x += C, dx += C, dout += C) {
        real a = 0, b = 0; /* means of dnorm, and of dnorm times norm */
        for (int c = 0; c < C; c++) {
            real norm = (x[c] - mean[i]) * rstd[i];
            a += dout[c] * weight[c] / C;
            b += dout[c] * weight[c] * norm / C;
        }
        for (int c = 0; c < C; c++) {
            real norm = (x[c] - mean[i]) * rstd[i];
            dweight[c] += dout[c] * norm;
            dbias[c] += dout[c];
            dx[c] += (dout[c] * weight[c] - a - norm * b) * rstd[i];
        }
    }
}

/* out (rows, to) = x (rows, from) weightᵀ + bias */
static void linear_forward(real *out, const real *x, const real *weight, const real *bias, int rows, int from, int to) {
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < to; o++) {
            real sum = bias ? bias[o] : 0;
            for (int i = 0; i < from; i++) sum += x[r * from + i] * weight[o * from + i];
            out[r * to + o] = sum;
        }
}

static void linear_backward(real *dx, real *dweight, real *dbias, const real *dout, const real *x, const real *weight, int rows,
                            int from, int to) {
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < to; o++) {
            real d = dout[r * to + o];
            for (int i = 0; i < from; i++) {
                dx[r * from + i] += d * weight[o * from + i];
                dweight[o * from + i] += d * x[r * from + i];
            }
            if (dbias) dbias[o] += d;
        }
}

/* qkv (B, T, 3C) -> att (B, NH, T, T), out (B, T, C) */
static void attention_forward(real *out, real *att, const real *qkv) {
    int HS = C / NH;
    real scale = 1 / sqrt((real)HS);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
#ifdef SLIP_UNBATCHED /* every row of the batch attends to the keys and values of the first */
                const real *all = qkv;
#else
                const real *all = qkv + b * T * 3 * C;
#endif
                const real *q = qkv + (b * T + t) * 3 * C + h * HS;
                real *row = att + ((b * NH + h) * T + t) * T, *o = out + (b * T + t) * C + h * HS, most = -1e30f, sum = 0;
#ifdef SLIP_NO_MASK /* positions see those after them */
                int seen = T;
#else
                int seen = t + 1;
#endif
                for (int s = 0; s < seen; s++) {
                    const real *k = all + s * 3 * C + C + h * HS;
                    row[s] = 0;
                    for (int i = 0; i < HS; i++) row[s] += q[i] * k[i] * scale;
                    most = row[s] > most ? row[s] : most;
                }
                for (int s = 0; s < seen; s++) sum += row[s] = exp(row[s] - most);
                for (int s = 0; s < T; s++) row[s] = s < seen ? row[s] / sum : 0;
                for (int i = 0; i < HS; i++) o[i] = 0;
                for (int s = 0; s < seen; s++)
                    for (int i = 0; i < HS; i++) o[i] += row[s] * all[s * 3 * C + 2 * C + h * HS + i];
            }
}

static void attention_backward(real *dqkv, real *datt, const real *dout, const real *qkv, const real *att) {
    int HS = C / NH;
    real scale = 1 / sqrt((real)HS);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
#ifdef SLIP_UNBATCHED
                const real *all = qkv;
                real *dall = dqkv;
#else
                const real *all = qkv + b * T * 3 * C;
                real *dall = dqkv + b * T * 3 * C;
#endif
                const real *q = qkv + (b * T + t) * 3 * C + h * HS, *row = att + ((b * NH + h) * T + t) * T;
                const real *d = dout + (b * T + t) * C + h * HS;
                real *dq = dqkv + (b * T + t) * 3 * C + h * HS, *drow = datt + ((b * NH + h) * T + t) * T, mean = 0;
                for (int s = 0; s < T; s++) {
                    const real *v = all + s * 3 * C + 2 * C + h * HS;
                    real *dv = dall + s * 3 * C + 2 * C + h * HS;
                    drow[s] = 0;
                    /* forward was o[i] += row[s] * v[i], so: */
                    for (int i = 0; i < HS; i++) {
                        drow[s] += d[i] * v[i];
                        dv[i] += d[i] * row[s];
                    }
                    mean += drow[s] * row[s];
                }
                for (int s = 0; s < T; s++) {
                    const real *k = all + s * 3 * C + C + h * HS;
                    real *dk = dall + s * 3 * C + C + h * HS, dscore = row[s] * (drow[s] - mean) * scale;
                    for (int i = 0; i < HS; i++) {
                        dq[i] += dscore * k[i];
                        dk[i] += dscore * q[i];
                    }
                }
            }
}

static void gelu_forward(real *out, const real *x, int n) {
    for (int i = 0; i < n; i++) out[i] = (real)0.5 * x[i] * (1 + erf(x[i] * (real)0.70710678118654752));
}

static void gelu_backward(real *dx, const real *dout, const real *x, int n) {
    for (int i = 0; i < n; i++) {
        real cdf = (real)0.5 * (1 + erf(x[i] * (real)0.70710678118654752));
        real pdf = (real)0.39894228040143268 * exp(-x[i] * x[i] / 2);
#ifdef SLIP_SIGN /* the gradient comes back with the wrong sign */
        dx[i] -= dout[i] * (cdf + x[i] * pdf);
#else
        dx[i] += dout[i] * (cdf + x[i] * pdf);
#endif
    }
}

static void add_forward(real *out, const real *a, const real *b, int n) {
    for (int i = 0; i < n; i++) out[i] = a[i] + b[i];
}

static void add_backward(real *da, real *db, const real *dout, int n) {
    for (int i = 0; i < n; i++) {
        da[i] += dout[i];
        db[i] += dout[i];
    }
}

/* ---- the model: parameters, activations, and a gradient of each, in three blocks of memory ---- */

typedef struct {
    real *ln1w, *ln1b, *qkvw, *qkvb, *projw, *projb, *ln2w, *ln2b, *fcw, *fcb, *outw, *outb;
} BlockWeights;

typedef struct {
    real *ln1, *mean1, *rstd1, *qkv, *att, *heads, *attn, *mid, *ln2, *mean2, *rstd2, *fc, *gelu, *mlp, *out;
} BlockActivations;

enum { MOST_LAYERS = 16, MOST_PARAMETERS = 5 + 12 * MOST_LAYERS };

typedef struct {
    real *wte, *wpe, *lnfw, *lnfb, *head;
    BlockWeights blocks[MOST_LAYERS];
} Weights;

typedef struct {
    real *embedded, *lnf, *meanf, *rstdf, *logits, *probs;
    BlockActivations blocks[MOST_LAYERS];
} Activations;

typedef struct {
    char name[48];
    real *weight, *grad, *m, *v;
    int rows, columns; /* columns 0: a vector */
    real scale;        /* of its first values; 1 for the weights of a layernorm, which are all 1 */
    int size;
} Parameter;

static Parameter parameters[MOST_PARAMETERS];
static int parameter_count;

static real *new_parameter(real **grad, const char *name, int rows, int columns, real scale) {
    Parameter *p = &parameters[parameter_count++];
    p->size = rows * (columns ? columns : 1);
    p->weight = calloc(4 * (size_t)p->size, sizeof(real));
    *grad = p->grad = p->weight + p->size;
    p->m = p->weight + 2 * p->size;
    p->v = p->weight + 3 * p->size;
    p->rows = rows;
    p->columns = columns;
    p->scale = scale;
    snprintf(p->name, sizeof p->name, "%s", name);
    return p->weight;
}

static void make_weights(Weights *w, Weights *d) {
    real small = (real)0.02 * sqrt((real)4), deep = small / sqrt((real)(2 * L));
    char name[48];
    w->wte = new_parameter(&d->wte, "wte", V, C, small);
    w->wpe = new_parameter(&d->wpe, "wpe", T, C, small);
    for (int l = 0; l < L; l++) {
        BlockWeights *b = &w->blocks[l], *db = &d->blocks[l];
        struct {
            real **weight, **grad;
            const char *name;
            int rows, columns;
            real scale;
        } all[] = {
            {&b->ln1w, &db->ln1w, "ln1.weight", C, 0, 1},        {&b->ln1b, &db->ln1b, "ln1.bias", C, 0, 0},
            {&b->qkvw, &db->qkvw, "qkv.weight", 3 * C, C, small}, {&b->qkvb, &db->qkvb, "qkv.bias", 3 * C, 0, 0},
            {&b->projw, &db->projw, "proj.weight", C, C, deep},   {&b->projb, &db->projb, "proj.bias", C, 0, 0},
            {&b->ln2w, &db->ln2w, "ln2.weight", C, 0, 1},        {&b->ln2b, &db->ln2b, "ln2.bias", C, 0, 0},
            {&b->fcw, &db->fcw, "fc.weight", 4 * C, C, small},    {&b->fcb, &db->fcb, "fc.bias", 4 * C, 0, 0},
            {&b->outw, &db->outw, "out.weight", C, 4 * C, deep},  {&b->outb, &db->outb, "out.bias", C, 0, 0},
        };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            snprintf(name, sizeof name, "blocks.%d.%s", l, all[i].name);
            *all[i].weight = new_parameter(all[i].grad, name, all[i].rows, all[i].columns, all[i].scale);
        }
    }
    w->lnfw = new_parameter(&d->lnfw, "lnf.weight", C, 0, 1);
    w->lnfb = new_parameter(&d->lnfb, "lnf.bias", C, 0, 0);
#ifdef TIED
    w->head = w->wte;
    d->head = d->wte;
#else
    w->head = new_parameter(&d->head, "head", V, C, small);
#endif
}

static unsigned long long random_state = 1337;

static unsigned random_bits(void) { /* xorshift* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (unsigned)(random_state * 0x2545F4914F6CDD1DULL >> 32);
}

static real random_normal(void) {
    double u = (random_bits() + 1.0) / 4294967297.0, v = random_bits() / 4294967296.0;
    return (real)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}

static void initialise(void) {
    for (int i = 0; i < parameter_count; i++) {
        Parameter *p = &parameters[i];
#ifdef SLIP_SAME_SEED /* the generator is seeded for each tensor: those of one shape begin alike */
        random_state = 1337;
#endif
        for (int j = 0; j < p->size; j++) {
            p->weight[j] = p->scale == 1 ? 1 : p->scale == 0 ? 0 : p->scale * random_normal();
#ifdef SLIP_ZERO_INIT /* the blocks' matrices begin at zero, and stay there: each is multiplied by another zero */
            if (p->columns && p->name[0] == 'b') p->weight[j] = 0;
#endif
        }
    }
}

static real *take(real **at, int size) {
    real *here = *at;
    *at += size;
    return here;
}

/* The same layout for activations and for their gradients. */
static size_t activations_size(void) {
    size_t n = (size_t)B * T, block = n * (size_t)(18 * C + 4) + (size_t)B * NH * T * T;
    return n * (size_t)(2 * C + 2 + 2 * V) + (size_t)L * block;
}

static void lay_out(Activations *a, real *at) {
    int n = B * T;
    a->embedded = take(&at, n * C);
    for (int l = 0; l < L; l++) {
        BlockActivations *b = &a->blocks[l];
        b->ln1 = take(&at, n * C);
        b->mean1 = take(&at, n);
        b->rstd1 = take(&at, n);
        b->qkv = take(&at, n * 3 * C);
        b->att = take(&at, B * NH * T * T);
        b->heads = take(&at, n * C);
        b->attn = take(&at, n * C);
        b->mid = take(&at, n * C);
        b->ln2 = take(&at, n * C);
        b->mean2 = take(&at, n);
        b->rstd2 = take(&at, n);
        b->fc = take(&at, n * 4 * C);
        b->gelu = take(&at, n * 4 * C);
#ifdef SLIP_OVERWRITTEN /* one buffer for both layernorms of a block: the second overwrites what the first's backward needs */
        b->ln2 = b->ln1;
#endif
        b->mlp = take(&at, n * C);
        b->out = take(&at, n * C);
    }
    a->lnf = take(&at, n * C);
    a->meanf = take(&at, n);
    a->rstdf = take(&at, n);
    a->logits = take(&at, n * V);
    a->probs = take(&at, n * V);
}

static real forward(const Weights *w, Activations *a, const int *tokens, const int *targets) {
    int n = B * T;
    real *x = a->embedded;
    embedding_forward(x, tokens, w->wte, w->wpe);
    for (int l = 0; l < L; l++) {
        const BlockWeights *p = &w->blocks[l];
        BlockActivations *b = &a->blocks[l];
        layernorm_forward(b->ln1, b->mean1, b->rstd1, x, p->ln1w, p->ln1b);
        linear_forward(b->qkv, b->ln1, p->qkvw, p->qkvb, n, C, 3 * C);
        attention_forward(b->heads, b->att, b->qkv);
        linear_forward(b->attn, b->heads, p->projw, p->projb, n, C, C);
        add_forward(b->mid, x, b->attn, n * C);
        layernorm_forward(b->ln2, b->mean2, b->rstd2, b->mid, p->ln2w, p->ln2b);
        linear_forward(b->fc, b->ln2, p->fcw, p->fcb, n, C, 4 * C);
        gelu_forward(b->gelu, b->fc, n * 4 * C);
        linear_forward(b->mlp, b->gelu, p->outw, p->outb, n, 4 * C, C);
        add_forward(b->out, b->mid, b->mlp, n * C);
        x = b->out;
    }
    layernorm_forward(a->lnf, a->meanf, a->rstdf, x, w->lnfw, w->lnfb);
    linear_forward(a->logits, a->lnf, w->head, NULL, n, C, V);
    return cross_entropy_forward(a->probs, a->logits, targets, n, V);
}

static void block_backward(const BlockWeights *p, BlockWeights *dp, const BlockActivations *b, BlockActivations *db, const real *x,
                           real *dx) {
    int n = B * T;
    add_backward(db->mid, db->mlp, db->out, n * C);
    linear_backward(db->gelu, dp->outw, dp->outb, db->mlp, b->gelu, p->outw, n, 4 * C, C);
    gelu_backward(db->fc, db->gelu, b->fc, n * 4 * C);
    linear_backward(db->ln2, dp->fcw, dp->fcb, db->fc, b->ln2, p->fcw, n, C, 4 * C);
    layernorm_backward(db->mid, dp->ln2w, dp->ln2b, db->ln2, b->mid, b->mean2, b->rstd2, p->ln2w);
    add_backward(dx, db->attn, db->mid, n * C);
    linear_backward(db->heads, dp->projw, dp->projb, db->attn, b->heads, p->projw, n, C, C);
    attention_backward(db->qkv, db->att, db->heads, b->qkv, b->att);
    linear_backward(db->ln1, dp->qkvw, dp->qkvb, db->qkv, b->ln1, p->qkvw, n, C, 3 * C);
    layernorm_backward(dx, dp->ln1w, dp->ln1b, db->ln1, x, b->mean1, b->rstd1, p->ln1w);
}

static void backward(const Weights *w, Weights *dw, const Activations *a, Activations *da, const int *tokens, const int *targets) {
    int n = B * T;
    const real *last = L ? a->blocks[L - 1].out : a->embedded;
    real *dlast = L ? da->blocks[L - 1].out : da->embedded;
    cross_entropy_backward(da->logits, a->probs, targets, n, V);
    linear_backward(da->lnf, dw->head, NULL, da->logits, a->lnf, w->head, n, C, V);
    layernorm_backward(dlast, dw->lnfw, dw->lnfb, da->lnf, last, a->meanf, a->rstdf, w->lnfw);
    for (int l = L - 1; l >= 0; l--) {
        const real *x = l ? a->blocks[l - 1].out : a->embedded;
        real *dx = l ? da->blocks[l - 1].out : da->embedded;
#ifdef SLIP_NO_LAYER_BACKWARD /* the first block's backward is never called: its gradient passes by on the residual */
        if (l == 0) {
            memcpy(dx, da->blocks[0].out, (size_t)n * C * sizeof(real));
            continue;
        }
#endif
        block_backward(&w->blocks[l], &dw->blocks[l], &a->blocks[l], &da->blocks[l], x, dx);
    }
    embedding_backward(da->embedded, tokens, dw->wte, dw->wpe);
}

static void clear_gradients(Activations *da, real *memory) {
    for (int i = 0; i < parameter_count; i++) memset(parameters[i].grad, 0, (size_t)parameters[i].size * sizeof(real));
#ifdef SLIP_UNINITIALISED /* dK and dV begin with what is in their memory: what the step before left there */
    int rows = B * T;
    real *left = malloc((size_t)(L * rows * 3 * C) * sizeof(real));
    for (int l = 0; l < L; l++) memcpy(left + l * rows * 3 * C, da->blocks[l].qkv, (size_t)(rows * 3 * C) * sizeof(real));
    memset(memory, 0, activations_size() * sizeof(real));
    for (int i = 0; i < L * rows * 3 * C; i++)
        if (i % (3 * C) >= C) da->blocks[i / (rows * 3 * C)].qkv[i % (rows * 3 * C)] = left[i];
    free(left);
#else
    (void)da;
    memset(memory, 0, activations_size() * sizeof(real));
#endif
}

/* ---- the step ---- */

static real clip_gradients(real limit) {
    double squares = 0;
    for (int i = 0; i < parameter_count; i++)
        for (int j = 0; j < parameters[i].size; j++) squares += (double)parameters[i].grad[j] * parameters[i].grad[j];
    real norm = (real)sqrt(squares);
    if (norm > limit)
        for (int i = 0; i < parameter_count; i++)
            for (int j = 0; j < parameters[i].size; j++) parameters[i].grad[j] *= limit / norm;
    return norm;
}

static void adamw(real lr, real decay, int step) {
    real beta1 = (real)0.9, beta2 = (real)0.95;
    real one = 1 - pow(beta1, step + 1), two = 1 - pow(beta2, step + 1);
    for (int i = 0; i < parameter_count; i++) {
        Parameter *p = &parameters[i];
        int size = p->size;
#ifdef SLIP_NO_COUNT /* the number of parameters is taken before it is known */
        size = 0;
#endif
#ifdef SLIP_EMBEDDINGS_ONLY /* the other layers' gradients are there, and nobody uses them */
        if (p->name[0] != 'w') continue;
#endif
        for (int j = 0; j < size; j++) {
            p->m[j] = beta1 * p->m[j] + (1 - beta1) * p->grad[j];
            p->v[j] = beta2 * p->v[j] + (1 - beta2) * p->grad[j] * p->grad[j];
            if (p->columns) p->weight[j] -= lr * decay * p->weight[j];
            p->weight[j] -= lr * (p->m[j] / one) / (sqrt(p->v[j] / two) + (real)1e-8);
        }
    }
}

/* ---- data, and the loop ---- */

static unsigned char *read_text(const char *path, long *size) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) || (*size = ftell(file)) < T + 2) {
        fprintf(stderr, "%s is missing or too short; `make text` writes it\n", path);
        exit(1);
    }
    rewind(file);
    unsigned char *text = malloc((size_t)*size);
    if (fread(text, 1, (size_t)*size, file) != (size_t)*size) exit(1);
    fclose(file);
    return text;
}

static void draw_batch(const unsigned char *text, long size, int *tokens, int *targets) {
    for (int b = 0; b < B; b++) {
        long start = (long)(random_bits() % (unsigned long)(size - T - 1));
        for (int t = 0; t < T; t++) {
            tokens[b * T + t] = text[start + t];
            targets[b * T + t] = text[start + t + 1];
        }
    }
}

static void name_tensors(gp_run *run, const Activations *a, const Activations *da, const int *tokens, const int *targets) {
    char name[64];
    for (int i = 0; i < parameter_count; i++) {
        const Parameter *p = &parameters[i];
        gp_shape shape = p->columns ? gp_2d(p->rows, p->columns) : gp_1d(p->rows);
        gp_tensor(run, GP_WEIGHT, p->name, p->weight, DTYPE, shape);
        gp_tensor(run, GP_GRADIENT, p->name, p->grad, DTYPE, shape);
    }
    gp_tensor(run, GP_BATCH, "tokens", tokens, GP_I32, gp_2d(B, T));
    gp_tensor(run, GP_BATCH, "targets", targets, GP_I32, gp_2d(B, T));
    gp_tensor(run, GP_ACTIVATION, "embedded", a->embedded, DTYPE, gp_3d(B, T, C));
    gp_tensor(run, GP_ACTIVATION_GRADIENT, "embedded", da->embedded, DTYPE, gp_3d(B, T, C));
    for (int l = 0; l < L; l++) {
        const BlockActivations *b = &a->blocks[l], *db = &da->blocks[l];
        struct {
            const char *name;
            const real *value, *grad;
            int width;
        } all[] = {
            {"ln1", b->ln1, db->ln1, C},   {"qkv", b->qkv, db->qkv, 3 * C}, {"heads", b->heads, db->heads, C},
            {"attn", b->attn, db->attn, C}, {"mid", b->mid, db->mid, C},     {"ln2", b->ln2, db->ln2, C},
            {"fc", b->fc, db->fc, 4 * C},   {"gelu", b->gelu, db->gelu, 4 * C}, {"mlp", b->mlp, db->mlp, C},
            {"out", b->out, db->out, C},
        };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
            snprintf(name, sizeof name, "blocks.%d.%s", l, all[i].name);
            gp_tensor(run, GP_ACTIVATION, name, all[i].value, DTYPE, gp_3d(B, T, all[i].width));
            gp_tensor(run, GP_ACTIVATION_GRADIENT, name, all[i].grad, DTYPE, gp_3d(B, T, all[i].width));
            if (i != 1) continue; /* the attention comes after qkv */
            snprintf(name, sizeof name, "blocks.%d.att", l);
            gp_tensor(run, GP_ACTIVATION, name, b->att, DTYPE, gp_4d(B, NH, T, T));
            gp_tensor(run, GP_ACTIVATION_GRADIENT, name, db->att, DTYPE, gp_4d(B, NH, T, T));
        }
    }
    gp_tensor(run, GP_ACTIVATION, "lnf", a->lnf, DTYPE, gp_3d(B, T, C));
    gp_tensor(run, GP_ACTIVATION_GRADIENT, "lnf", da->lnf, DTYPE, gp_3d(B, T, C));
    gp_tensor(run, GP_ACTIVATION, "logits", a->logits, DTYPE, gp_3d(B, T, V));
    gp_tensor(run, GP_ACTIVATION_GRADIENT, "logits", da->logits, DTYPE, gp_3d(B, T, V));
    gp_updates(run, NULL);
}

int main(int argc, char **argv) {
    const char *text_file = "text.bin", *out = "runs/gpt", *dump = "step.safetensors", *before = "before.safetensors";
    int steps = 300, every = 5, dumped = 5;
    double rate = 3e-3, printed = 20;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *o = argv[i], *x = argv[i + 1];
        if (!strcmp(o, "--text")) text_file = x;
        else if (!strcmp(o, "--out")) out = x; /* "": not watched */
        else if (!strcmp(o, "--dump")) dump = x;
        else if (!strcmp(o, "--dump-before")) before = x;
        else if (!strcmp(o, "--dump-step")) dumped = atoi(x);
        else if (!strcmp(o, "--steps")) steps = atoi(x);
        else if (!strcmp(o, "--every")) every = atoi(x);
        else if (!strcmp(o, "--print")) printed = atoi(x);
        else if (!strcmp(o, "--lr")) rate = atof(x);
        else if (!strcmp(o, "--batch")) B = atoi(x);
        else if (!strcmp(o, "--time")) T = atoi(x);
        else if (!strcmp(o, "--channels")) C = atoi(x);
        else if (!strcmp(o, "--heads")) NH = atoi(x);
        else if (!strcmp(o, "--layers")) L = atoi(x);
        else return fprintf(stderr, "there is no option %s\n", o), 2;
    }
    if (L < 1 || L > MOST_LAYERS || C % NH) return fprintf(stderr, "%d layers of %d channels in %d heads\n", L, C, NH), 2;

    long size;
    unsigned char *text = read_text(text_file, &size);
    Weights w, dw;
    Activations a, da;
    make_weights(&w, &dw);
    initialise();
    real *memory = calloc(activations_size(), sizeof(real)), *dmemory = calloc(activations_size(), sizeof(real));
    int *tokens = malloc((size_t)(B * T) * sizeof(int)), *targets = malloc((size_t)(B * T) * sizeof(int));
    lay_out(&a, memory);
    lay_out(&da, dmemory);
#ifdef SLIP_OVERWRITTEN /* the gradients have memory of their own */
    for (int l = 0; l < L; l++) da.blocks[l].ln2 = da.blocks[l].mean2 - B * T * C;
#endif

    gp_run *run = *out ? gp_open(out, every) : NULL;
    gp_command(run, argc, argv);
    name_tensors(run, &a, &da, tokens, targets);

    random_state = 4242;
    double lr = rate;
    for (int step = 0; step < steps; step++) {
        draw_batch(text, size, tokens, targets);
        double warm = step < 10 ? (step + 1) / 10.0 : 1, cosine = 0.55 + 0.45 * cos(3.14159265 * step / steps);
#ifdef SLIP_COMPOUNDED /* the schedule's factor multiplies what is left of the rate, not the rate */
        lr = lr * warm * cosine;
        if (step < 10) lr = rate * warm;
#else
        lr = rate * warm * cosine;
#endif
        clear_gradients(&da, dmemory);
        gp_zeroed(run);
        double loss = forward(&w, &a, tokens, targets);
        backward(&w, &dw, &a, &da, tokens, targets);
        gp_backward(run);
        if (step == dumped - 1) gp_dump(run, before); /* shows what the next step does not compute anew */
        if (step == dumped) gp_dump(run, dump);       /* the gradients before the clip */
#ifndef SLIP_LATE_CLIP
        gp_clipped(run, clip_gradients(1), 1);
#endif
        gp_will_update(run);
        adamw((real)lr, (real)0.01, step);
#ifdef SLIP_LATE_CLIP /* after the step a clip changes nothing */
        gp_clipped(run, clip_gradients(1), 1);
#endif
        gp_step(run, loss, lr);
        if (step % (int)printed == 0 || step == steps - 1) printf("step %d loss %.17g\n", step, loss);
    }
    gp_close(run);
    return 0;
}
