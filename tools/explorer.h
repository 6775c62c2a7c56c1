/* explorer.h - the memory of a training step, operation by operation, as one page for a browser.

   Include it after mtt.h, in one file:

      explorer_plan plan;
      if (!explorer_open(&env, &model, &policy, batch, seq_len, "bf16_flash", &plan)) {
          explorer_list(&plan, stdout);
          explorer_save(&env, "memory.html", &plan, 1);
          explorer_close(&plan);
      }

   mtt.h gives operations and tensors only to a backend. So the explorer is a backend: it makes a trainer,
   runs one step, and notes the operations instead of computing them. No arena is allocated, whatever its
   size. The trainer does compute its initial weights, which takes 4 s for 100 million. */
#ifndef EXPLORER_H_INCLUDED
#define EXPLORER_H_INCLUDED

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct explorer_plan {
    char name[256];             /* of the technique */
    int batch, seq_len;
    mtt_model_desc model;       /* with every default filled in */
    mtt_plan_report report;
    mtt_trainer *trainer;
    const mtt_schedule *schedule;
    const mtt_op **ops;         /* of the schedule, in its order */
    const mtt_tensor **tensors; /* which they use, by first operation, offset and name */
    int op_count, tensor_count;
} explorer_plan;

/* ---- a backend that notes operations ---- */

static mtt_status explorer_begin(mtt_env *env, const mtt_backend *b, const mtt_policy *policy, void **context)
{
    (void)env;
    (void)policy;
    *context = b->user;
    return MTT_OK;
}

static void explorer_end(void *context)
{
    (void)context;
}

/* An address that nothing reads or writes, as a device's address is to the host. */
static mtt_status explorer_alloc(void *context, size_t bytes, void **block)
{
    (void)context;
    (void)bytes;
    *block = (void *)(uintptr_t)4096;
    return MTT_OK;
}

static void explorer_release(void *context, void *block)
{
    (void)context;
    (void)block;
}

static mtt_status explorer_memory(void *context, size_t *free_bytes, size_t *all_bytes)
{
    (void)context;
    *free_bytes = *all_bytes = 0;
    return MTT_OK;
}

static mtt_status explorer_upload(void *context, void *to, const void *from, size_t bytes)
{
    (void)context;
    (void)to;
    (void)from;
    (void)bytes;
    return MTT_OK;
}

static mtt_status explorer_download(void *context, void *to, const void *from, size_t bytes)
{
    (void)context;
    (void)from;
    memset(to, 0, bytes);
    return MTT_OK;
}

/* Later micro-batches repeat the first one's operations. The schedule lists them once. */
static mtt_status explorer_run(void *context, const mtt_op *ops, int count)
{
    explorer_plan *plan = (explorer_plan *)context;
    int i;
    for (i = 0; i < count && plan->op_count < plan->report.ops; i++)
        if (!ops[i].later) plan->ops[plan->op_count++] = &ops[i];
    return MTT_OK;
}

static mtt_status explorer_fail(mtt_env *env, mtt_status status, const char *verb, const char *path)
{
    snprintf(env->error, sizeof(env->error), "cannot %s %.500s: %s", verb, path, strerror(errno));
    return status;
}

/* One step over as many zeros as it takes ids. */
static mtt_status explorer_record(mtt_env *env, explorer_plan *plan, int accumulate)
{
    size_t rows = (size_t)plan->batch * (size_t)plan->seq_len;
    int32_t *ids = (int32_t *)calloc(rows * (size_t)accumulate, sizeof(*ids));
    mtt_status status = MTT_E_MEMORY;
    plan->ops = (const mtt_op **)calloc((size_t)plan->report.ops, sizeof(*plan->ops));
    if (ids && plan->ops) status = mtt_train_step(plan->trainer, ids, ids, NULL);
    else explorer_fail(env, status, "hold", "a batch of ids");
    free(ids);
    return status;
}

/* ---- tensors ---- */

enum { EXPLORER_READS, EXPLORER_WRITES, EXPLORER_SCRATCH, EXPLORER_ROLES };

/* The tensors of an operation in one role. Returns tensor k, or NULL if it is absent. */
static int explorer_count(const mtt_op *op, int role)
{
    if (role == EXPLORER_SCRATCH) return 1;
    return (role == EXPLORER_READS ? op->inputs : op->outputs) + op->parameters;
}

static const mtt_tensor *explorer_operand(const mtt_op *op, int role, int k)
{
    int own = role == EXPLORER_READS ? op->inputs : op->outputs;
    mtt_tensor **parameters = role == EXPLORER_READS ? op->gradients : op->weights;
    if (role == EXPLORER_SCRATCH) return op->workspace;
    if (k < own) return op->operands[role == EXPLORER_READS ? k : op->inputs + k];
    return parameters ? parameters[k - own] : NULL;
}

static int explorer_order(const void *a, const void *b)
{
    const mtt_tensor *x = *(const mtt_tensor *const *)a, *y = *(const mtt_tensor *const *)b;
    if (x->first != y->first) return x->first < y->first ? -1 : 1;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int explorer_index(const explorer_plan *plan, const mtt_tensor *tensor)
{
    size_t count = (size_t)plan->tensor_count;
    const void *at = bsearch(&tensor, plan->tensors, count, sizeof(tensor), explorer_order);
    return (int)((const mtt_tensor *const *)at - plan->tensors);
}

/* Every tensor that an operation uses, once. */
static mtt_status explorer_collect(mtt_env *env, explorer_plan *plan)
{
    size_t all = 0, kept = 0, n;
    int i, role, k;
    for (i = 0; i < plan->op_count; i++)
        for (role = 0; role < EXPLORER_ROLES; role++) all += (size_t)explorer_count(plan->ops[i], role);
    plan->tensors = (const mtt_tensor **)calloc(all, sizeof(*plan->tensors));
    if (!plan->tensors) return explorer_fail(env, MTT_E_MEMORY, "hold", "the tensors of the plan");
    for (i = 0, n = 0; i < plan->op_count; i++)
        for (role = 0; role < EXPLORER_ROLES; role++)
            for (k = 0; k < explorer_count(plan->ops[i], role); k++) {
                plan->tensors[n] = explorer_operand(plan->ops[i], role, k);
                n += plan->tensors[n] != NULL;
            }
    qsort(plan->tensors, n, sizeof(*plan->tensors), explorer_order);
    for (i = 0; i < (int)n; i++)
        if (!kept || plan->tensors[kept - 1] != plan->tensors[i]) plan->tensors[kept++] = plan->tensors[i];
    plan->tensor_count = (int)kept;
    return MTT_OK;
}

static void explorer_close(explorer_plan *plan)
{
    free(plan->ops);
    free(plan->tensors);
    mtt_trainer_destroy(plan->trainer);
    memset(plan, 0, sizeof(*plan));
}

/* Plans a step. The plan holds pointers into its trainer until explorer_close. */
static mtt_status explorer_open(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                int batch, int seq_len, const char *name, explorer_plan *plan)
{
    const mtt_backend backend = {"explorer", policy->device, 0, explorer_begin, explorer_end, explorer_alloc,
                                 explorer_release, explorer_memory, explorer_upload, explorer_download,
                                 explorer_run, NULL, NULL, NULL, plan};
    const mtt_optim_desc optim = {0};
    mtt_status status;
    memset(plan, 0, sizeof(*plan));
    snprintf(plan->name, sizeof(plan->name), "%s", name);
    plan->batch = batch;
    plan->seq_len = seq_len;
    status = mtt_model_resolve(env, model, &plan->model);
    if (!status)
        status = mtt_trainer_create(env, model, policy, &optim, &backend, batch, seq_len, &plan->trainer);
    if (!status) plan->schedule = mtt_trainer_schedule(plan->trainer);
    if (!status) mtt_schedule_report(plan->schedule, &plan->report);
    if (!status) status = explorer_record(env, plan, policy->accumulate > 1 ? policy->accumulate : 1);
    if (!status) status = explorer_collect(env, plan);
    if (status) explorer_close(plan);
    return status;
}

/* ---- the listing ---- */

typedef struct explorer_lines {
    const explorer_plan *plan;
    FILE *file;
    int op; /* of the next line */
} explorer_lines;

/* 1 = nothing uses the tensor after operation `op`, and its bytes are free from there on. */
static int explorer_frees(const mtt_tensor *tensor, int op)
{
    return tensor && !tensor->persistent && tensor->last == op;
}

static void explorer_list_freed(const mtt_op *op, int index, FILE *file)
{
    const char *before = "  frees ";
    int i, gradients = 0;
    for (i = 0; i < op->inputs + op->outputs; i++) {
        if (!explorer_frees(op->operands[i], index)) continue;
        fprintf(file, "%s%s", before, op->operands[i]->name);
        before = " ";
    }
    for (i = 0; op->gradients && i < op->parameters; i++)
        gradients += explorer_frees(op->gradients[i], index);
    if (gradients) fprintf(file, "%s%d gradients", before, gradients);
}

/* mtt_schedule_print writes a line, an operation, at a time. */
static void explorer_line(void *user, const char *text, size_t bytes)
{
    explorer_lines *lines = (explorer_lines *)user;
    fwrite(text, 1, bytes - 1, lines->file);
    explorer_list_freed(lines->plan->ops[lines->op], lines->op, lines->file);
    fputc('\n', lines->file);
    lines->op++;
}

/* The operations as mtt_schedule_print lists them, and the tensors that each is the last to use. */
static void explorer_list(const explorer_plan *plan, FILE *file)
{
    explorer_lines lines = {plan, file, 0};
    mtt_schedule_print(plan->schedule, explorer_line, &lines);
}

/* ---- data of the page, as JSON ---- */

/* Quoted. What could end a string or a script element, and what is not ASCII, is written as \u00xx. */
static void explorer_text(FILE *f, const char *text)
{
    fputc('"', f);
    for (; *text; text++)
        if (*text < ' ' || *text > '~' || strchr("\"\\<>&", *text)) fprintf(f, "\\u%04x", *text & 255);
        else fputc(*text, f);
    fputc('"', f);
}

/* The model's sizes. */
static void explorer_model(FILE *f, const explorer_plan *plan)
{
    const char *before = "{";
    const mtt_field *field;
    int value;
    for (field = mtt_model_fields(); field->name; field++) {
        if (field->kind != MTT_FIELD_INT) continue;
        memcpy(&value, (const char *)&plan->model + field->offset, sizeof(value));
        fprintf(f, "%s\"%s\": %d", before, field->name, value);
        before = ", ";
    }
    fputc('}', f);
}

static void explorer_tensor(FILE *f, const mtt_tensor *t)
{
#define EXPLORER_DTYPE(dtype, bytes, name) name,
    static const char *const types[] = {MTT_DTYPES(EXPLORER_DTYPE)};
    int i;
    fprintf(f, "{\"name\": ");
    explorer_text(f, t->name);
    fprintf(f, ", \"type\": \"%s\", \"category\": %d, \"shape\": [", types[t->dtype], (int)t->category);
    for (i = 0; i < t->rank; i++) fprintf(f, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    fprintf(f, "], \"bytes\": %zu, \"offset\": %zu, \"first\": %d, \"last\": %d, \"state\": %d}", t->bytes,
            t->offset, t->first, t->last, t->persistent);
}

static void explorer_operands(FILE *f, const explorer_plan *plan, const mtt_op *op)
{
    static const char *const names[EXPLORER_ROLES] = {"reads", "writes", "scratch"};
    int role, k, shown;
    for (role = 0; role < EXPLORER_ROLES; role++) {
        fprintf(f, ", \"%s\": [", names[role]);
        for (k = shown = 0; k < explorer_count(op, role); k++)
            if (explorer_operand(op, role, k))
                fprintf(f, "%s%d", shown++ ? ", " : "", explorer_index(plan, explorer_operand(op, role, k)));
        fputc(']', f);
    }
}

static void explorer_op(FILE *f, const explorer_plan *plan, int index)
{
    mtt_op_info op;
    int i;
    mtt_schedule_op(plan->schedule, index, &op);
    fprintf(f, "{\"op\": ");
    explorer_text(f, op.name);
    fprintf(f, ", \"phase\": \"%s\", \"layer\": %d, \"recomputed\": %d, \"live_bytes\": %zu, \"flops\": %.0f",
            mtt_phase_name(op.phase), op.layer, op.recomputed, op.live_bytes, op.flops);
    fprintf(f, ", \"traffic_bytes\": %.0f, \"bytes\": [", op.traffic_bytes);
    for (i = 0; i < MTT_CATEGORY_COUNT; i++) fprintf(f, "%s%zu", i ? ", " : "", op.bytes[i]);
    fputc(']', f);
    explorer_operands(f, plan, plan->ops[index]);
    fputc('}', f);
}

static void explorer_json(FILE *f, const explorer_plan *plan)
{
    char report[2048];
    int i;
    mtt_plan_json(&plan->report, report, sizeof(report));
    fprintf(f, "{\"technique\": ");
    explorer_text(f, plan->name);
    fprintf(f, ", \"batch\": %d, \"seq_len\": %d, \"model\": ", plan->batch, plan->seq_len);
    explorer_model(f, plan);
    fprintf(f, ", \"peak_op\": %d, \"plan\": %s,\n\"categories\": [", plan->report.peak_op, report);
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        fprintf(f, "%s\"%s\"", i ? ", " : "", mtt_category_name((mtt_category)i));
    fprintf(f, "],\n\"tensors\": [");
    for (i = 0; i < plan->tensor_count; i++) {
        fprintf(f, i ? ",\n" : "\n");
        explorer_tensor(f, plan->tensors[i]);
    }
    fprintf(f, "],\n\"ops\": [");
    for (i = 0; i < plan->op_count; i++) {
        fprintf(f, i ? ",\n" : "\n");
        explorer_op(f, plan, i);
    }
    fprintf(f, "]}");
}

/* ---- the page ---- */

/* A string for each line. It needs nothing from a network. NULL: the plans come here. */
static const char *const explorer_page[] = {
"<!doctype html>",
"<html lang='en'>",
"<meta charset='utf-8'>",
"<meta name='viewport' content='width=device-width'>",
"<title>Memory of a training step</title>",
"<style>",
":root {",
"  color-scheme: light dark;",
"  --page: #fff; --ink: #1b2330; --faint: #596273; --line: #d3d8e0; --panel: #f4f6f9; --again: #c2410c;",
"  --c0: #4477aa; --c1: #66b8dd; --c2: #2f9e5b; --c3: #e3b341; --c4: #e8697a; --c5: #a54a8c; --c6: #8a8f99;",
"  --c7: #7a5c3e;",
"}",
"@media (prefers-color-scheme: dark) {",
"  :root { --page: #14181f; --ink: #e6e9ee; --faint: #9aa4b2; --line: #343b47; --panel: #1d232c;",
"    --again: #fb923c; }",
"}",
"body { margin: 0; padding: 1rem 1.5rem; background: var(--page); color: var(--ink);",
"  font: 14px/1.45 system-ui, sans-serif; }",
"h1 { font-size: 1.3rem; margin: 0; }",
"h2 { font-size: 1.1rem; margin: 0; }",
"h3 { font-size: 1rem; margin: .5rem 0 .2rem; }",
"p { margin: .2rem 0; color: var(--faint); }",
"kbd { border: 1px solid var(--line); border-radius: 3px; padding: 0 .3em; font: inherit; }",
"mark { background: none; color: var(--again); }",
"main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 2rem;",
"  margin-top: 1rem; }",
"section { min-width: 0; }",
".legend { display: flex; flex-wrap: wrap; gap: 0 1.2em; margin: .3rem 0; padding: 0; list-style: none; }",
".swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }",
".plot { display: grid; grid-template-columns: 5.5rem 1fr; row-gap: 3px; padding: .3rem 1.5rem .6rem 0;",
"  cursor: crosshair; touch-action: pan-y; }",
".plot:focus-visible { outline: 2px solid var(--ink); }",
".title { grid-column: 2; margin-top: .5rem; }",
".name, .axis, .strip, .note { font-size: 12px; white-space: nowrap; }",
".name { text-align: right; padding-right: .5rem; color: var(--faint); }",
".chart, .axis, .strip { position: relative; }",
".axis span { position: absolute; right: .5rem; transform: translateY(50%); color: var(--faint); }",
".memory { height: 15rem; }",
".map { height: 20rem; }",
".chart { border: solid var(--line); border-width: 0 0 1px 1px; }",
".chart svg { position: absolute; width: 100%; height: 100%; }",
".chart * { vector-effect: non-scaling-stroke; }",
".shade { fill: var(--again); opacity: .12; }",
".grid { stroke: var(--line); }",
".peak { stroke: var(--ink); stroke-dasharray: 4 3; }",
".cursor { stroke: var(--ink); stroke-width: 1.5; }",
".held .cursor { stroke-width: 3; }",
".block { stroke: var(--page); paint-order: stroke; }",
".picked { fill: none; stroke: var(--ink); stroke-width: 2.5; }",
".note { position: absolute; background: var(--page); padding: 0 .3em; }",
".strip { height: 1.25rem; }",
".strip span { position: absolute; height: 100%; box-sizing: border-box; overflow: hidden;",
"  text-indent: .3em; background: var(--panel); border-left: 1px solid var(--line); }",
".strip span:last-child { overflow: visible; }",
".strip .again { background: var(--again); border: 0; }",
".scroll { max-height: 24rem; overflow: auto; margin-top: .4rem; border: 1px solid var(--line); }",
"table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }",
"th { position: sticky; top: 0; background: var(--panel); text-align: left; }",
"th, td { padding: .1rem .5rem; white-space: nowrap; }",
"td:nth-child(4), th:nth-child(4) { text-align: right; }",
"tr.on { background: var(--line); }",
"</style>",
"<h1>Memory of a training step</h1>",
"<p id='model'></p>",
"<p>Point at a figure, or focus it and press <kbd>&larr;</kbd> <kbd>&rarr;</kbd> for an operation,",
"<kbd>Page Up</kbd> <kbd>Page Down</kbd> for ten, <kbd>Home</kbd> <kbd>End</kbd>, <kbd>P</kbd> for the peak,",
"<kbd>&uarr;</kbd> <kbd>&darr;</kbd> for a tensor. A click holds the operation; another releases it.</p>",
"<main></main>",
"<script type='application/json' id='plans'>",
NULL,
"</script>",
"<script>",
"'use strict';",
"const plans = JSON.parse(document.getElementById('plans').textContent);",
"// Bytes at the top of all figures: the largest arena, and room for a label.",
"const highest = 1.1 * Math.max(...plans.map(p => p.plan.arena_bytes));",
"const views = [];",
"// A slot in the arena is a multiple of 256 bytes.",
"const slot = t => Math.ceil(t.bytes / 256) * 256;",
"",
"function scaled(n, base, units) {",
"  const power = Math.max(0, units.findLastIndex((_, k) => n >= base ** k));",
"  return (n / base ** power).toFixed(power ? 2 : 0) + ' ' + units[power];",
"}",
"const bytes = n => scaled(n, 1024, ['B', 'KiB', 'MiB', 'GiB']);",
"const flops = n => scaled(n, 1000, ['FLOP', 'KFLOP', 'MFLOP', 'GFLOP', 'TFLOP']);",
"",
"function set(element, attributes) {",
"  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);",
"  return element;",
"}",
"",
"// A new HTML element. Text goes in as text, never as HTML.",
"function make(tag, attributes, ...children) {",
"  const element = set(document.createElement(tag), attributes);",
"  element.append(...children);",
"  return element;",
"}",
"",
"function draw(parent, tag, attributes) {",
"  return parent.appendChild(set(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes));",
"}",
"",
"const swatch = c => make('span', {class: 'swatch', style: `background: var(--c${c})`});",
"",
"// x counts operations. y goes from 1000 at the bottom to 0 at the top.",
"const height = n => 1000 * (1 - n / highest);",
"",
"// Four to nine round numbers up to the top.",
"function ticks() {",
"  const step = 2 ** Math.ceil(Math.log2(highest / 9));",
"  return Array.from({length: Math.floor(highest / step) + 1}, (_, k) => k * step);",
"}",
"",
"function axis(kind) {",
"  const label = n => make('span', {style: `bottom: ${100 * n / highest}%`}, bytes(n).replace('.00', ''));",
"  return make('div', {class: `axis ${kind}`, 'aria-hidden': 'true'}, ...ticks().map(label));",
"}",
"",
"// A figure without its data: lines at the ticks, and a shade over recomputed operations.",
"function figure(plan, kind) {",
"  const count = plan.ops.length, chart = make('div', {class: `chart ${kind}`});",
"  const svg = draw(chart, 'svg', {viewBox: `0 0 ${count} 1000`, preserveAspectRatio: 'none'});",
"  const shade = plan.ops.map((op, i) => op.recomputed ? `M${i},0 h1 V1000 h-1 Z` : '').join(' ');",
"  draw(svg, 'path', {class: 'grid', d: ticks().map(n => `M0,${height(n)} H${count}`).join(' ')});",
"  draw(svg, 'path', {class: 'shade', d: shade});",
"  return {chart, svg};",
"}",
"",
"// The categories from the bottom up: first state, which never becomes less.",
"const least = plans[0].categories.map((_, c) => Math.min(...plans[0].ops.map(op => op.bytes[c])));",
"const stack = least.map((_, c) => c).sort((a, b) => least[b] - least[a] || a - b);",
"",
"function drawMemory(plan, svg) {",
"  const base = plan.ops.map(() => 0);",
"  for (const c of stack) {",
"    const lower = base.map((n, i) => `H${i + 1} V${height(n)} H${i}`).reverse().join(' ');",
"    plan.ops.forEach((op, i) => base[i] += op.bytes[c]);",
"    const upper = base.map((n, i) => `V${height(n)} H${i + 1}`).join(' ');",
"    draw(svg, 'path', {d: `M0,${height(base[0])} ${upper} ${lower} Z`, fill: `var(--c${c})`});",
"  }",
"}",
"",
"function drawPeak(plan, chart, svg) {",
"  const at = plan.peak_op, n = plan.plan.peak_bytes, count = plan.ops.length;",
"  const side = at < count / 2 ? `left: ${100 * (at + 1) / count}%` : `right: ${100 - 100 * at / count}%`;",
"  draw(svg, 'path', {class: 'peak', d: `M${at + .5},1000 V0`});",
"  chart.append(make('span', {class: 'note', style: `bottom: calc(${100 * n / highest}% + 2px); ${side}`},",
"    `peak ${bytes(n)}`));",
"}",
"",
"// A tensor's rectangle in the map.",
"const place = t => ({x: t.first, width: t.last - t.first + 1, y: height(t.offset + slot(t)),",
"  height: 1000 * slot(t) / highest});",
"",
"function drawArena(plan, svg) {",
"  for (const t of plan.tensors) {",
"    const rect = draw(svg, 'rect', {fill: `var(--c${t.category})`, ...place(t)});",
"    if (slot(t) > highest / 100) set(rect, {class: 'block'}); // an outline would hide a thinner one",
"  }",
"}",
"",
"// A row of labels: one for each run of operations with the same label.",
"function strip(plan, label, kind) {",
"  const row = make('div', {class: 'strip', 'aria-hidden': 'true'}), count = plan.ops.length;",
"  for (let i = 0, end; i < count; i = end) {",
"    for (end = i; end < count && label(plan.ops[end]) === label(plan.ops[i]); end++);",
"    if (label(plan.ops[i]) === '') continue;",
"    const place = `left: ${100 * i / count}%; width: ${100 * (end - i) / count}%`;",
"    row.append(make('span', {class: kind, style: place}, kind ? '' : label(plan.ops[i])));",
"  }",
"  return row;",
"}",
"",
"function plot(plan, view) {",
"  const [title, name] = ['title', 'name'].map(kind => text => make('div', {class: kind}, text));",
"  const memory = figure(plan, 'memory'), arena = figure(plan, 'map');",
"  drawMemory(plan, memory.svg);",
"  drawPeak(plan, memory.chart, memory.svg);",
"  drawArena(plan, arena.svg);",
"  view.map = arena.chart;",
"  view.cursors = [memory, arena].map(f => draw(f.svg, 'path', {class: 'cursor'}));",
"  view.picked = draw(arena.svg, 'rect', {class: 'picked'});",
"  const box = make('div', {class: 'plot', tabindex: 0, role: 'slider', 'aria-valuemin': 0,",
"    'aria-valuemax': plan.ops.length - 1, 'aria-label': `operation of ${plan.technique}`});",
"  box.append(title('Memory during each operation'), axis('memory'), memory.chart,",
"    name('phase'), strip(plan, op => op.phase, ''),",
"    name('layer'), strip(plan, op => op.layer < 0 ? '' : String(op.layer), ''),",
"    name('recomputed'), strip(plan, op => op.recomputed ? 'again' : '', 'again'),",
"    title('Arena: the place of each tensor, from its first to its last operation'), axis('map'),",
"    arena.chart);",
"  return box;",
"}",
"",
"function summary(plan) {",
"  const p = plan.plan, again = plan.ops.filter(op => op.recomputed).length;",
"  const parts = p.micro_batches > 1 ? `, in ${p.micro_batches} micro-batches` : '';",
"  return `${plan.batch} sequences of ${plan.seq_len} tokens${parts}. Arena ${bytes(p.arena_bytes)}. ` +",
"    `Peak ${bytes(p.peak_bytes)}, in operation ${plan.peak_op}. ${p.ops} operations, ` +",
"    `${again} of them recomputed: ${flops(p.recompute_flops)} of ${flops(p.flops)}.`;",
"}",
"",
"// The tensors in memory during an operation: its own first, then the others, the largest first.",
"function alive(plan, i) {",
"  const op = plan.ops[i], own = [...new Set([...op.reads, ...op.writes, ...op.scratch])];",
"  const others = plan.tensors.map((_, k) => k).filter(k => !own.includes(k))",
"    .filter(k => plan.tensors[k].first <= i && i <= plan.tensors[k].last)",
"    .sort((a, b) => plan.tensors[b].bytes - plan.tensors[a].bytes);",
"  return [...own, ...others];",
"}",
"",
"function role(op, k) {",
"  const reads = op.reads.includes(k), writes = op.writes.includes(k);",
"  if (reads && writes) return 'changes';",
"  if (reads || writes) return reads ? 'reads' : 'writes';",
"  return op.scratch.includes(k) ? 'scratch' : '';",
"}",
"",
"const life = (t, i) => t.state ? 'state' : `${t.first} to ${t.last}` + (t.last === i ? ', freed' : '');",
"",
"function tensorRow(view, k) {",
"  const t = view.plan.tensors[k], name = make('span', {}, swatch(t.category), t.name);",
"  const cells = [role(view.plan.ops[view.op], k), name, `${t.type} ${t.shape.join(' x ')}`, bytes(t.bytes),",
"    life(t, view.op)];",
"  const row = make('tr', {}, ...cells.map(cell => make('td', {}, cell)));",
"  row.onpointerenter = () => pick(view, k);",
"  return row;",
"}",
"",
"// Marks a tensor in the map and in the table; null marks none.",
"function pick(view, k) {",
"  const at = view.alive.indexOf(k), t = view.plan.tensors[k];",
"  view.tensor = at < 0 ? null : k;",
"  [...view.rows.children].forEach((row, r) => row.classList.toggle('on', r === at));",
"  set(view.picked, at < 0 ? {width: 0} : place(t));",
"  const kind = at < 0 ? '' : view.plan.categories[t.category];",
"  view.says.textContent = at < 0 ? '' : `${t.name}: ${kind}, ${bytes(t.bytes)}, ${life(t, view.op)}`;",
"}",
"",
"function select(view, i) {",
"  const {plan} = view, op = plan.ops[view.op = Math.max(0, Math.min(plan.ops.length - 1, i))];",
"  const where = [op.phase, op.layer < 0 ? 'outside the layers' : `layer ${op.layer}`].join(', ');",
"  const again = op.recomputed ? ', recomputed' : '', share = 100 * op.live_bytes / plan.plan.peak_bytes;",
"  const text = `${view.op}: ${op.op}, ${where}${again}, ${bytes(op.live_bytes)}`;",
"  view.cursors.forEach(c => set(c, {d: `M${view.op + .5},0 V1000`}));",
"  set(view.box, {'aria-valuenow': view.op, 'aria-valuetext': text});",
"  view.heading.replaceChildren(`Operation ${view.op}: ${op.op} (${where})`);",
"  if (again) view.heading.append(make('mark', {}, again));",
"  view.cost.textContent = `${bytes(op.live_bytes)} in memory, ${share.toFixed(0)} % of the peak. ` +",
"    `${flops(op.flops)}, moves ${bytes(op.traffic_bytes)}.`;",
"  view.values.forEach((value, c) => value.textContent = bytes(op.bytes[c]));",
"  view.alive = alive(plan, view.op);",
"  view.rows.replaceChildren(...view.alive.map(k => tensorRow(view, k)));",
"  pick(view, view.tensor);",
"}",
"",
"// Selects an operation, and the same one in the other plan if that has it.",
"function go(view, i) {",
"  select(view, i);",
"  const key = (plan, i) => JSON.stringify([plan.ops[i].op, plan.ops[i].phase, plan.ops[i].recomputed,",
"    plan.ops[i].writes.map(k => plan.tensors[k].name)]);",
"  for (const other of views.filter(v => v !== view)) {",
"    const at = other.plan.ops.findIndex((_, i) => key(other.plan, i) === key(view.plan, view.op));",
"    if (at >= 0) select(other, at);",
"  }",
"}",
"",
"function onKey(view, event) {",
"  const {plan} = view, last = plan.ops.length - 1, at = view.alive.indexOf(view.tensor);",
"  const moves = {ArrowLeft: view.op - 1, ArrowRight: view.op + 1, PageUp: view.op - 10,",
"    PageDown: view.op + 10, Home: 0, End: last, p: plan.peak_op, P: plan.peak_op};",
"  const steps = {ArrowUp: Math.max(at - 1, 0), ArrowDown: Math.min(at + 1, view.alive.length - 1)};",
"  if (event.ctrlKey || event.altKey || event.metaKey) return;",
"  if (event.key in moves) go(view, moves[event.key]);",
"  else if (event.key in steps) {",
"    pick(view, view.alive[steps[event.key]]);",
"    view.rows.children[steps[event.key]].scrollIntoView({block: 'nearest'});",
"  } else return;",
"  event.preventDefault();",
"}",
"",
"function onPointer(view, event) {",
"  const box = view.map.getBoundingClientRect(), {plan} = view;",
"  const x = (event.clientX - box.left) / box.width;",
"  const y = (box.bottom - event.clientY) / box.height * highest;",
"  if (view.box.classList.contains('held') || x < 0 || x >= 1) return;",
"  const i = Math.floor(x * plan.ops.length);",
"  if (i !== view.op) go(view, i);",
"  const under = t => t.offset <= y && y < t.offset + slot(t);",
"  const k = view.alive.find(a => under(plan.tensors[a]));",
"  if (view.map.contains(event.target)) pick(view, k ?? null);",
"}",
"",
"function show(plan) {",
"  const view = {plan, op: 0, tensor: null, heading: make('h3', {}), cost: make('p', {}),",
"    values: plan.categories.map(() => make('span', {})), rows: make('tbody', {}),",
"    says: make('p', {'aria-live': 'polite'})};",
"  const legend = plan.categories.map((name, c) => make('li', {}, swatch(c), `${name} `, view.values[c]));",
"  const heads = ['', 'tensor in memory', 'type and shape', 'bytes', 'operations']",
"    .map(t => make('th', {}, t));",
"  const table = make('table', {}, make('thead', {}, make('tr', {}, ...heads)), view.rows);",
"  view.box = plot(plan, view);",
"  view.box.onkeydown = event => onKey(view, event);",
"  view.box.onpointermove = event => onPointer(view, event);",
"  view.box.onclick = event => { view.box.classList.toggle('held'); onPointer(view, event); };",
"  views.push(view);",
"  document.querySelector('main').append(make('section', {'aria-label': plan.technique},",
"    make('h2', {}, plan.technique), make('p', {}, summary(plan)), view.box, view.heading, view.cost,",
"    make('ul', {class: 'legend'}, ...legend),",
"    make('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'tensors'}, table),",
"    view.says));",
"  select(view, plan.peak_op);",
"}",
"",
"document.getElementById('model').textContent =",
"  Object.entries(plans[0].model).map(([name, value]) => `${name.replace('_', ' ')} ${value}`).join(', ');",
"plans.forEach(show);",
"</script>",
"</html>",
};

static mtt_status explorer_save(mtt_env *env, const char *path, const explorer_plan *plans, int count)
{
    FILE *f = fopen(path, "w");
    int i, k, failed;
    if (!f) return explorer_fail(env, MTT_E_FILE, "write", path);
    for (i = 0; i < (int)(sizeof(explorer_page) / sizeof(explorer_page[0])); i++) {
        if (explorer_page[i]) fprintf(f, "%s\n", explorer_page[i]);
        for (k = 0; !explorer_page[i] && k < count; k++) {
            fprintf(f, k ? ",\n" : "[");
            explorer_json(f, &plans[k]);
        }
        if (!explorer_page[i]) fprintf(f, "]\n");
    }
    failed = ferror(f);
    if (fclose(f) || failed) return explorer_fail(env, MTT_E_FILE, "write", path);
    return MTT_OK;
}
#endif
