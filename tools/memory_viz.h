/* memory_viz.h - the plan of a training step as a memory snapshot of PyTorch, to be looked at beside one that
   torch.cuda.memory._dump_snapshot has written: https://pytorch.org/memory_viz, or without a network
   python -m torch.cuda._memory_viz trace_plot FILE -o page.html

   Include it after mtt.h, with MTT_BACKEND_API. The arena is a segment, a tensor an allocation in it. Its
   frame has the tensor's name, and for file and line the operation that first uses it and its number. The
   file is a pickle of protocol 2: https://docs.python.org/3/library/pickletools.html */
#ifndef MEMORY_VIZ_H_INCLUDED
#define MEMORY_VIZ_H_INCLUDED

#include <stdio.h>
#include <string.h>

enum { VIZ_BASE = 1 << 28 }; /* the arena's address, which says nothing */

static void viz_put(mtt_writer *w, const char *text) { mtt_writer_put(w, text, strlen(text)); }

static void viz_text(mtt_writer *w, const char *text)
{
    const uint32_t size = (uint32_t)strlen(text);
    viz_put(w, "X");
    mtt_writer_put(w, &size, 4); /* little-endian, as all processors that mtt runs on */
    mtt_writer_put(w, text, size);
}

/* Up to 2^63. */
static void viz_number(mtt_writer *w, uint64_t number)
{
    mtt_writer_put(w, "\x8a\x08", 2);
    mtt_writer_put(w, &number, 8);
}

static void viz_member(mtt_writer *w, const char *key, uint64_t number)
{
    viz_text(w, key);
    viz_number(w, number);
}

static void viz_word(mtt_writer *w, const char *key, const char *text)
{
    viz_text(w, key);
    viz_text(w, text);
}

/* A slot in the card's arena, which is rounded up. */
static uint64_t viz_slot(const mtt_tensor *t)
{
    return t->place == MTT_CARD ? (t->bytes + 255) / 256 * 256 : 0;
}

static void viz_frames(mtt_writer *w, const mtt_op *ops, const mtt_tensor *t)
{
    const mtt_op *op = &ops[t->first];
    char place[96];
    if (t->persistent) snprintf(place, sizeof(place), "state, %s", mtt_category_name(t->category));
    else snprintf(place, sizeof(place), "%s %s, %s", mtt_phase_name(op->phase), mtt_op_name(op->kind),
                  mtt_category_name(t->category));
    viz_text(w, "frames");
    viz_put(w, "](}(");
    viz_word(w, "filename", place);
    viz_member(w, "line", (uint64_t)(t->persistent ? 0 : t->first));
    viz_word(w, "name", t->name);
    viz_put(w, "ue");
}

static void viz_event(mtt_writer *w, const char *action, uint64_t address, uint64_t size, int time,
                      const mtt_op *ops, const mtt_tensor *t)
{
    viz_put(w, "}(");
    viz_word(w, "action", action);
    viz_member(w, "addr", address);
    viz_member(w, "size", size);
    viz_member(w, "stream", 0);
    viz_member(w, "time_us", (uint64_t)time);
    if (t) viz_frames(w, ops, t);
    else viz_text(w, "frames"), viz_put(w, "]");
    viz_put(w, "u");
}

/* The tensors that are first used by operation `op`, or last; op -1: the state. */
static void viz_events(mtt_writer *w, const mtt_schedule *schedule, int op, int last)
{
    int count, op_count, i;
    const mtt_tensor *const *tensors = mtt_schedule_tensors(schedule, &count);
    const mtt_op *ops = mtt_schedule_ops(schedule, &op_count);
    for (i = 0; i < count; i++) {
        const mtt_tensor *t = tensors[i];
        if (!viz_slot(t) || t->persistent != (op < 0)) continue;
        if (op >= 0 && (last ? t->last : t->first) != op) continue;
        if (last) viz_event(w, "free_requested", VIZ_BASE + t->offset, viz_slot(t), op + 1, ops, t);
        viz_event(w, last ? "free_completed" : "alloc", VIZ_BASE + t->offset, viz_slot(t), op + 1, ops, t);
    }
}

/* What is left after the step: the state. Blocks are in the order of their addresses, with what is free
   between them. */
static void viz_segment(mtt_writer *w, const mtt_schedule *schedule, const mtt_plan_report *report)
{
    int count, op_count, i;
    const mtt_tensor *const *tensors = mtt_schedule_tensors(schedule, &count);
    const mtt_op *ops = mtt_schedule_ops(schedule, &op_count);
    uint64_t at = 0, used = 0;
    for (i = 0; i < count; i++) used += tensors[i]->persistent ? viz_slot(tensors[i]) : 0;
    viz_put(w, "}(");
    viz_member(w, "address", VIZ_BASE);
    viz_member(w, "total_size", report->arena_bytes);
    viz_member(w, "allocated_size", used);
    viz_member(w, "active_size", used);
    viz_member(w, "requested_size", used);
    viz_member(w, "stream", 0);
    viz_member(w, "device", 0);
    viz_word(w, "segment_type", "large");
    viz_text(w, "is_expandable"), viz_put(w, "\x89"); /* False */
    viz_text(w, "segment_pool_id");
    mtt_writer_put(w, "(K\0K\0t", 6); /* (0, 0) */
    viz_text(w, "frames"), viz_put(w, "]");
    viz_text(w, "blocks"), viz_put(w, "](");
    while (at < report->arena_bytes) {
        const mtt_tensor *next = NULL;
        uint64_t size = report->arena_bytes - at;
        for (i = 0; i < count; i++)
            if (tensors[i]->persistent && viz_slot(tensors[i]) && tensors[i]->offset >= at &&
                (!next || tensors[i]->offset < next->offset)) next = tensors[i];
        if (next && next->offset > at) size = next->offset - at, next = NULL;
        else if (next) size = viz_slot(next);
        viz_put(w, "}(");
        viz_member(w, "address", VIZ_BASE + at);
        viz_member(w, "size", size);
        viz_member(w, "requested_size", next ? next->bytes : size);
        viz_word(w, "state", next ? "active_allocated" : "inactive");
        if (next) viz_frames(w, ops, next);
        else viz_text(w, "frames"), viz_put(w, "]");
        viz_put(w, "u");
        at += size;
    }
    viz_put(w, "eu");
}

/* A failure leaves the path as it was. */
static mtt_status viz_save(mtt_env *env, const char *path, const mtt_schedule *schedule)
{
    mtt_plan_report report;
    mtt_writer *w;
    mtt_status status = mtt_writer_open(env, path, 0, &w);
    int op_count, i;
    if (status) return status;
    mtt_schedule_ops(schedule, &op_count);
    mtt_schedule_report(schedule, &report);
    mtt_writer_put(w, "\x80\x02}(", 4); /* protocol 2, a dictionary */
    viz_text(w, "segments"), viz_put(w, "](");
    viz_segment(w, schedule, &report);
    viz_put(w, "e");
    viz_text(w, "device_traces"), viz_put(w, "](](");
    viz_event(w, "segment_alloc", VIZ_BASE, report.arena_bytes, 0, NULL, NULL);
    viz_events(w, schedule, -1, 0);
    for (i = 0; i < op_count; i++) {
        viz_events(w, schedule, i, 0);
        viz_events(w, schedule, i, 1);
    }
    viz_put(w, "ee");
    viz_put(w, "u.");
    status = mtt_writer_commit(w);
    mtt_writer_close(w);
    return status;
}

#endif
