/* The loss of the GPT: loss.c, or, with nvcc, loss.cu. */
#ifndef LOSS_H
#define LOSS_H

#ifdef GPT_DOUBLE
typedef double real;
#else
typedef float real;
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The mean over rows of -log softmax(logits)[target]; probs (rows, V) are kept for the backward. */
real cross_entropy_forward(real *probs, const real *logits, const int *targets, int rows, int V);

/* dlogits = (probs - one_hot(target)) / rows */
void cross_entropy_backward(real *dlogits, const real *probs, const int *targets, int rows, int V);

#ifdef __cplusplus
}
#endif

#endif
