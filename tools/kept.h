/* kept.h - what the forward pass keeps for the backward pass, layer by layer, and what a forward pass alone
   would need. Include it after mtt.h, with MTT_BACKEND_API. */
#ifndef KEPT_H_INCLUDED
#define KEPT_H_INCLUDED

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 1 = on the card, made by the forward pass, read by a later one. */
static int kept_is(const mtt_op *ops, const mtt_tensor *t)
{
    return t->place == MTT_CARD && !t->persistent && ops[t->first].phase == MTT_FORWARD &&
           ops[t->last].phase != MTT_FORWARD;
}

/* A layer's bytes; with `text` also its tensors, without their prefix h.N. Layer -1: what is outside. */
static size_t kept_bytes(const mtt_schedule *schedule, int layer, int text)
{
    const int layers = mtt_schedule_model(schedule)->layers;
    int count, i;
    const mtt_op *ops = mtt_schedule_ops(schedule, &count);
    const mtt_tensor *const *tensors = mtt_schedule_tensors(schedule, &count);
    size_t sum = 0;
    for (i = 0; i < count; i++) {
        const mtt_tensor *t = tensors[i];
        const char *name = t->name;
        if ((t->layer < layers ? t->layer : -1) != layer || !kept_is(ops, t)) continue;
        if (layer >= 0) name += 2 + strspn(name + 2, "0123456789") + 1;
        if (text) printf("%s %s %.2f", sum ? "," : "", name, (double)t->bytes / 1048576);
        sum += t->bytes;
    }
    if (text) puts(sum ? "" : " nothing");
    return sum;
}

/* The most bytes that live at once in a forward pass which keeps nothing for later, and of them the weights.
   0 and no weights: out of memory. */
static size_t kept_forward(const mtt_schedule *schedule, size_t *weights)
{
    int count, op_count, i, k;
    const mtt_op *ops = mtt_schedule_ops(schedule, &op_count);
    const mtt_tensor *const *tensors = mtt_schedule_tensors(schedule, &count);
    int *last = calloc((size_t)count, sizeof(*last));
    size_t most = 0;
    *weights = 0;
    if (!last) return 0;
    for (i = 0; i < count; i++)
        if (tensors[i]->persistent && tensors[i]->category == MTT_WEIGHTS && tensors[i]->place == MTT_CARD)
            *weights += tensors[i]->bytes;
    for (i = 0; i < op_count && ops[i].phase == MTT_FORWARD; i++)
        for (k = 0; k < ops[i].inputs + ops[i].outputs; k++)
            if (ops[i].operands[k]) last[ops[i].operands[k]->index] = i;
    for (i = 0; i < op_count && ops[i].phase == MTT_FORWARD; i++) {
        size_t live = *weights;
        for (k = 0; k < count; k++) {
            const mtt_tensor *t = tensors[k];
            if (t->place == MTT_CARD && !t->persistent && t->first <= i && last[k] >= i) live += t->bytes;
        }
        if (live > most) most = live;
    }
    free(last);
    return most;
}

/* Prints a line for layers that keep the same, then what is outside of layers and the forward pass alone. */
static void kept_print(const mtt_schedule *schedule)
{
    const int layers = mtt_schedule_model(schedule)->layers;
    size_t all = 0, weights, forward;
    int from, to;
    puts("kept for the backward pass, MiB");
    for (from = 0; from < layers; from = to) {
        const size_t bytes = kept_bytes(schedule, from, 0);
        for (to = from + 1; to < layers && kept_bytes(schedule, to, 0) == bytes; to++) continue;
        if (to - from > 1) printf("  layers %d to %d, each", from, to - 1);
        else printf("  layer %d,", from);
        printf(" %.2f:", (double)bytes / 1048576);
        kept_bytes(schedule, from, 1);
        all += bytes * (size_t)(to - from);
    }
    printf("  outside of layers:");
    all += kept_bytes(schedule, -1, 1);
    printf("  in all %.2f\n", (double)all / 1048576);
    if (mtt_schedule_policy(schedule)->recompute > MTT_RECOMPUTE_SELECTIVE)
        puts("the last layers keep more if that does not raise the peak: they are needed first");
    forward = kept_forward(schedule, &weights);
    printf("a forward pass alone, which keeps nothing: at most %.2f at once, of them weights %.2f\n",
           (double)forward / 1048576, (double)weights / 1048576);
}

#endif
