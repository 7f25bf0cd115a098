#include "loss.h"

#include <tgmath.h>

real cross_entropy_forward(real *probs, const real *logits, const int *targets, int rows, int V) {
    double loss = 0;
    for (int r = 0; r < rows; r++, probs += V, logits += V) {
        real most = logits[0];
        double sum = 0;
        for (int v = 1; v < V; v++) most = logits[v] > most ? logits[v] : most;
        for (int v = 0; v < V; v++) sum += probs[v] = exp(logits[v] - most);
        for (int v = 0; v < V; v++) probs[v] = (real)(probs[v] / sum);
        loss += (log(sum) - (logits[targets[r]] - most)) / rows;
    }
    return (real)loss;
}

void cross_entropy_backward(real *dlogits, const real *probs, const int *targets, int rows, int V) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < V; v++) dlogits[r * V + v] = (probs[r * V + v] - (v == targets[r])) / rows;
}
