/* away.h - a pass of the tests that sends an activation of each layer to the host after its last use in the
   forward pass, and back before its first use in the backward pass. Before mtt.h:

      #define MTT__EXTRA_PASSES(EMIT, RULE) RULE(away, sends_away)

   Include this after mtt.h. */
#ifndef AWAY_H_INCLUDED
#define AWAY_H_INCLUDED

static int away; /* 1 = the pass applies */

/* Of a tensor: the operations around its time on the host, the tensor that is there, and the one it comes
   back to. By tensor and not by role: recursion makes other tensors of the same role. */
typedef struct journey {
    const mtt_op *leave, *arrive;
    mtt_tensor *gone, *back;
} journey;

static int mtt__sends_away(const mtt__builder *b)
{
    return b->trains && away;
}

/* Finds the largest tensor of each layer that the backward pass reads. */
static void away_choose(mtt__builder *b, journey *of, const mtt_op *op, const mtt_op *end)
{
    for (; op < end; op++)
        for (int k = 0; k < op->inputs + op->outputs; k++) {
            const mtt_tensor *t = op->operands[k];
            if (!t || t->persistent || t->role < 0 || t->layer >= b->program->shape.layers) continue;
            if (op->phase == MTT_FORWARD) of[t->index].leave = op;
            else if (!of[t->index].arrive) of[t->index].arrive = op;
        }
    for (int layer = 0; layer < b->program->shape.layers; layer++) {
        const mtt_tensor *most = NULL;
        for (int i = 0; i < b->program->tensor_count; i++) {
            const mtt_tensor *t = b->program->tensors[i];
            if (!of[i].arrive || (t->layer == layer && most && most->bytes >= t->bytes)) of[i].leave = NULL;
            if (t->layer != layer || !of[i].leave) continue;
            if (most) of[most->index].leave = NULL;
            most = t;
        }
    }
}

static mtt_tensor *away_copy(mtt__builder *b, const mtt_tensor *t, const char *ending)
{
    const int64_t *n = t->shape;
    mtt_tensor *copy = mtt__add_tensor(b, t->dtype, t->category, -1, t->name, ending, n[0], n[1], n[2]);
    copy->entry = t->entry;
    return copy;
}

static int mtt__rule_away(mtt__builder *b, mtt_op *op, const mtt_op *end)
{
    int fresh = !b->own, tensors = b->program->tensor_count, k;
    journey *of = (journey *)mtt__own(b, (size_t)tensors * sizeof(*of)), *j;
    if (fresh && of) away_choose(b, of, op, end);
    for (k = 0; op < end && k < op->inputs + op->outputs && of; k++) {
        mtt_tensor *t = op->operands[k];
        if (!t || !of[t->index].gone) continue;
        j = &of[t->index];
        if (!j->back) {
            j->back = away_copy(b, t, ".back");
            j->back->layer = t->layer;
            MTT__EMIT(b, op->layer, 0, move, j->gone, j->back);
        }
        op->operands[k] = j->back;
    }
    if (op < end) mtt__append(b, op);
    for (k = 0; op < end && op->phase == MTT_FORWARD && k < op->inputs + op->outputs && of; k++) {
        mtt_tensor *t = op->operands[k];
        if (!t || of[t->index].leave != op || of[t->index].gone) continue;
        j = &of[t->index];
        j->gone = away_copy(b, t, ".gone");
        j->gone->place = MTT_HOST;
        MTT__EMIT(b, op->layer, 0, move, t, j->gone);
    }
    return op < end;
}

#endif
