/* explorer.h - the memory of a training step, operation by operation, as one page for a browser.

   Include it after mtt.h, in one file:

      explorer_plan plan;
      if (!explorer_open(&env, &model, &policy, batch, seq_len, "bf16_flash", &plan)) {
          explorer_save(&env, "memory.html", NULL, "", &plan, 1);
          explorer_close(&plan);
      } */
#ifndef EXPLORER_H_INCLUDED
#define EXPLORER_H_INCLUDED

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "failure.h"

typedef struct explorer_plan {
    char name[256];       /* of the technique */
    int batch, seq_len;
    mtt_model_desc model; /* with every default filled in */
    mtt_schedule *schedule;
} explorer_plan;

/* Plans a step. explorer_close frees the plan; a failed one holds nothing. */
static mtt_status explorer_open(mtt_env *env, const mtt_model_desc *model, const mtt_policy *policy,
                                int batch, int seq_len, const char *name, explorer_plan *plan)
{
    mtt_status status;
    memset(plan, 0, sizeof(*plan));
    snprintf(plan->name, sizeof(plan->name), "%s", name);
    plan->batch = batch;
    plan->seq_len = seq_len;
    status = mtt_model_resolve(env, model, &plan->model);
    if (!status) status = mtt_schedule_create(env, model, policy, batch, seq_len, &plan->schedule);
    return status;
}

static void explorer_close(explorer_plan *plan)
{
    mtt_schedule_destroy(plan->schedule);
    plan->schedule = NULL;
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

/* Writes an argument of a command line to `at`, where there is room for three times its bytes and two, with a
   blank behind it. What could end a word or a script element is written as %XX. Returns the end. */
static inline char *explorer_word(char *at, const char *word)
{
    static const char digits[] = "0123456789ABCDEF";
    for (; *word; word++) {
        const unsigned char c = (unsigned char)*word;
        const int letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (letter || strchr("_.,*=+:/-", c)) *at++ = (char)c;
        else *at++ = '%', *at++ = digits[c >> 4], *at++ = digits[c & 15];
    }
    *at++ = ' ';
    *at = 0;
    return at;
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
    int i;
    fprintf(f, "{\"name\": ");
    explorer_text(f, t->name);
    fprintf(f, ", \"type\": \"%s\", \"category\": %d, \"shape\": [", mtt_dtype_name(t->dtype),
            (int)t->category);
    for (i = 0; i < t->dims; i++) fprintf(f, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
    fprintf(f, "], \"bytes\": %zu, \"offset\": %zu, \"first\": %d, \"last\": %d, \"state\": %d%s}", t->bytes,
            t->offset, t->first, t->last, t->persistent, t->place == MTT_HOST ? ", \"host\": 1" : "");
}

/* The indices of tensors, and of `more` unless that is NULL. An absent operand is left out. */
static void explorer_list(FILE *f, const char *name, mtt_tensor *const *tensors, int count,
                          mtt_tensor *const *more, int more_count)
{
    const char *before = "";
    int i;
    fprintf(f, ", \"%s\": [", name);
    for (i = 0; i < count + (more ? more_count : 0); i++) {
        const mtt_tensor *t = i < count ? tensors[i] : more[i - count];
        if (!t) continue;
        fprintf(f, "%s%d", before, t->index);
        before = ", ";
    }
    fputc(']', f);
}

static void explorer_op(FILE *f, const mtt_op *op)
{
    int i;
    fprintf(f, "{\"op\": \"%s\", \"phase\": \"%s\", \"layer\": %d, \"recomputed\": %d", mtt_op_name(op->kind),
            mtt_phase_name(op->phase), op->layer, op->recomputed);
    fprintf(f, ", \"live_bytes\": %zu, \"flops\": %.0f, \"traffic_bytes\": %.0f, \"bytes\": [",
            op->live_bytes, op->flops, op->traffic_bytes);
    for (i = 0; i < MTT_CATEGORY_COUNT; i++) fprintf(f, "%s%zu", i ? ", " : "", op->bytes[i]);
    fputc(']', f);
    explorer_list(f, "reads", op->operands, op->inputs, op->gradients, op->parameters);
    explorer_list(f, "writes", op->operands + op->inputs, op->outputs, op->weights, op->parameters);
    fprintf(f, ", \"scratch\": [");
    if (op->workspace) fprintf(f, "%d", op->workspace->index);
    fprintf(f, "]}");
}

static void explorer_json(FILE *f, const explorer_plan *plan)
{
    mtt_plan_report report;
    const mtt_tensor *const *tensors;
    const mtt_op *ops;
    char text[2048];
    int i, count;
    mtt_schedule_report(plan->schedule, &report);
    mtt_plan_json(&report, text, sizeof(text));
    fprintf(f, "{\"technique\": ");
    explorer_text(f, plan->name);
    fprintf(f, ", \"batch\": %d, \"seq_len\": %d, \"model\": ", plan->batch, plan->seq_len);
    explorer_model(f, plan);
    fprintf(f, ", \"plan\": %s,\n\"categories\": [", text);
    for (i = 0; i < MTT_CATEGORY_COUNT; i++)
        fprintf(f, "%s\"%s\"", i ? ", " : "", mtt_category_name((mtt_category)i));
    fprintf(f, "],\n\"tensors\": [");
    tensors = mtt_schedule_tensors(plan->schedule, &count);
    for (i = 0; i < count; i++) {
        fprintf(f, i ? ",\n" : "\n");
        explorer_tensor(f, tensors[i]);
    }
    fprintf(f, "],\n\"ops\": [");
    ops = mtt_schedule_ops(plan->schedule, &count);
    for (i = 0; i < count; i++) {
        fprintf(f, i ? ",\n" : "\n");
        explorer_op(f, &ops[i]);
    }
    fprintf(f, "]}");
}

/* ---- the page ---- */

/* A string for each line. It needs nothing from a network. Plans follow the line with id='plans'. */
static const char *const explorer_page[] = {
"<!doctype html>",
"<html lang='en'>",
"<meta charset='utf-8'>",
"<meta name='viewport' content='width=device-width'>",
"<title>Memory of a training step</title>",
"<style>",
":root {",
"  color-scheme: light dark;",
"  /* The categories have the colours of the plots. In the dark, black and white change places. */",
"  --page: #fff; --ink: #1b2330; --faint: #596273; --line: #d3d8e0; --panel: #f4f6f9; --again: #9f1239;",
"  --c0: #202020; --c1: #56b4e9; --c2: #d55e00; --c3: #a4dccb; --c4: #7a4a9c; --c5: #e0ac00; --c6: #909090;",
"  --c7: #fff;",
"}",
"@media (prefers-color-scheme: dark) {",
"  :root { --page: #14181f; --ink: #e6e9ee; --faint: #9aa4b2; --line: #343b47; --panel: #1d232c;",
"    --again: #fb7185; --c0: #f2f2f2; --c4: #a67fc4; --c7: #14181f; }",
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
".legend { display: grid; grid-template-columns: repeat(auto-fill, minmax(12rem, 1fr)); margin: .3rem 0;",
"  padding: 0; list-style: none; }",
".swatch { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px;",
"  outline: 1px solid var(--faint); }",
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
".limit { stroke: var(--again); stroke-width: 2; }",
"button { font: inherit; }",
".cursor { stroke: var(--ink); stroke-width: 1.5; }",
".held .cursor { stroke-width: 3; }",
".block { stroke: var(--page); }",
".area { stroke: var(--faint); stroke-width: .5; }",
".picked { fill: none; stroke: var(--ink); stroke-width: 2.5; }",
".note { position: absolute; background: var(--page); padding: 0 .3em; }",
".strip { height: 1.25rem; }",
"/* A label that does not fit wraps to a second line, which is hidden. */",
".strip span { position: absolute; height: 100%; box-sizing: border-box; display: flex; flex-wrap: wrap;",
"  overflow: hidden; background: var(--panel); border-left: 1px solid var(--line); }",
".strip span::before { content: ''; flex: none; width: .3em; height: 100%; }",
".strip span:last-child { overflow: visible; flex-wrap: nowrap; justify-content: flex-end; }",
".numbers span:nth-child(n) { background: none; border: 0; color: var(--faint); overflow: visible; }",
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
"<kbd>&uarr;</kbd> <kbd>&darr;</kbd> for a tensor. A click holds the operation.</p>",
"<main></main>",
"<script type='application/json' id='plans'>",
"</script>",
"<script>",
"'use strict';",
"// What render sets: bytes at the top of all figures, and categories from the bottom up.",
"let highest, stack;",
"// A device's memory, {name, bytes}, which is drawn as a line; or null.",
"let limit = null;",
"const views = [];",
"// A slot in the arena is a multiple of 256 bytes.",
"const slot = t => Math.ceil(t.bytes / 256) * 256;",
"",
"function scaled(n, base, units) {",
"  const power = Math.max(0, units.findLastIndex((_, k) => n >= base ** k));",
"  return (n / base ** power).toFixed(power ? 2 : 0) + '\\u00a0' + units[power];",
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
"function stacked(plan) {",
"  const least = plan.categories.map((_, c) => Math.min(...plan.ops.map(op => op.bytes[c])));",
"  return least.map((_, c) => c).sort((a, b) => least[b] - least[a] || a - b);",
"}",
"",
"function drawMemory(plan, svg) {",
"  const base = plan.ops.map(() => 0);",
"  for (const c of stack) {",
"    const lower = base.map((n, i) => `H${i + 1} V${height(n)} H${i}`).reverse().join(' ');",
"    plan.ops.forEach((op, i) => base[i] += op.bytes[c]);",
"    const upper = base.map((n, i) => `V${height(n)} H${i + 1}`).join(' ');",
"    const d = `M0,${height(base[0])} ${upper} ${lower} Z`;",
"    draw(svg, 'path', {d, class: 'area', fill: `var(--c${c})`});",
"  }",
"}",
"",
"function drawPeak(plan, chart, svg) {",
"  const at = plan.plan.peak_op, n = plan.plan.peak_bytes, count = plan.ops.length;",
"  const side = at < count / 2 ? `left: ${100 * (at + 1) / count}%` : `right: ${100 - 100 * at / count}%`;",
"  draw(svg, 'path', {class: 'peak', d: `M${at + .5},1000 V0`});",
"  chart.append(make('span', {class: 'note', style: `bottom: calc(${100 * n / highest}% + 2px); ${side}`},",
"    `peak ${bytes(n)}`));",
"}",
"",
"function drawLimit(plan, chart, svg) {",
"  if (!limit || limit.bytes > highest) return;",
"  draw(svg, 'path', {class: 'limit', d: `M0,${height(limit.bytes)} H${plan.ops.length}`});",
"  chart.append(make('span', {class: 'note', style: `bottom: ${100 * limit.bytes / highest}%; left: 0`},",
"    limit.name));",
"}",
"",
"// A tensor's rectangle in the map.",
"const place = t => ({x: t.first, width: t.last - t.first + 1, y: height(t.offset + slot(t)),",
"  height: 1000 * slot(t) / highest});",
"",
"// A path for each category: rectangles do not overlap, and thousands of elements would take longer.",
"function drawArena(plan, svg) {",
"  const paths = new Map();",
"  for (const t of plan.tensors.filter(t => !t.host)) {",
"    const {x, y, width, height} = place(t), outlined = slot(t) > highest / 100; // would hide a thinner one",
"    const key = `${t.category} ${outlined}`;",
"    if (!paths.has(key)) paths.set(key, {category: t.category, outlined, d: []});",
"    paths.get(key).d.push(`M${x},${y}h${width}v${height}h${-width}Z`);",
"  }",
"  for (const {category, outlined, d} of paths.values())",
"    draw(svg, 'path', {fill: `var(--c${category})`, class: outlined ? 'block' : '', d: d.join('')});",
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
"// Numbers of operations, at most eight.",
"function numbers(plan) {",
"  const row = make('div', {class: 'strip numbers', 'aria-hidden': 'true'}), count = plan.ops.length;",
"  let step = 1;",
"  for (let k = 0; count / step > 8; k++) step *= k % 3 === 1 ? 2.5 : 2;",
"  for (let i = 0; i < count; i += step)",
"    row.append(make('span', {style: `left: ${100 * i / count}%`}, String(i)));",
"  return row;",
"}",
"",
"function plot(plan, view) {",
"  const [title, name] = ['title', 'name'].map(kind => text => make('div', {class: kind}, text));",
"  const memory = figure(plan, 'memory'), arena = figure(plan, 'map');",
"  drawMemory(plan, memory.svg);",
"  drawPeak(plan, memory.chart, memory.svg);",
"  drawLimit(plan, memory.chart, memory.svg);",
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
"    arena.chart, name('operation'), numbers(plan));",
"  return box;",
"}",
"",
"function summary(plan) {",
"  const p = plan.plan, again = plan.ops.filter(op => op.recomputed).length;",
"  const parts = p.micro_batches > 1 ? `, in ${p.micro_batches} micro-batches` : '';",
"  const share = again ? `, ${again} of them recomputed, with ${flops(p.recompute_flops)}` : '';",
"  const host = p.host_bytes ? `, on the host ${bytes(p.host_bytes)}` : '';",
"  return `${plan.batch} sequences of ${plan.seq_len} tokens${parts}. ` +",
"    `Arena ${bytes(p.arena_bytes)}${host}. Peak ${bytes(p.peak_bytes)}, in operation ${p.peak_op}. ` +",
"    `${flops(p.flops)} in ${p.ops} operations${share}.`;",
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
"const life = (t, i) => (t.state ? 'state' : `${t.first} to ${t.last}` + (t.last === i ? ', freed' : '')) +",
"  (t.host ? ', on the host' : '');",
"",
"// Who writes a tensor first, and who reads it last.",
"function origin(plan, k) {",
"  const name = i => `${plan.ops[i].op} (${i})`, t = plan.tensors[k];",
"  const writer = plan.ops.findIndex(op => op.writes.includes(k) || op.scratch.includes(k));",
"  const reader = plan.ops.findLastIndex(op => op.reads.includes(k));",
"  const parts = [writer < 0 ? 'no operation writes it' : `${name(writer)} writes it`,",
"    reader < 0 ? 'no operation reads it' : `${name(reader)} reads it last`];",
"  return parts.join(', ') + (t.state ? '; it stays from step to step.' : '.');",
"}",
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
"  set(view.picked, at < 0 || t.host ? {width: 0} : place(t));",
"  const kind = at < 0 ? '' : view.plan.categories[t.category];",
"  view.says.textContent = at < 0 ? '' : `${t.name}: ${kind}, ${bytes(t.bytes)}. ${origin(view.plan, k)}`;",
"}",
"",
"// Lists the tensors in memory: SHOWN of them, until the others are asked for.",
"const SHOWN = 100;",
"function list(view, all = false) {",
"  const shown = all ? view.alive : view.alive.slice(0, SHOWN), rest = view.alive.slice(shown.length);",
"  view.rows.replaceChildren(...shown.map(k => tensorRow(view, k)));",
"  if (rest.length) {",
"    const sum = rest.reduce((sum, k) => sum + view.plan.tensors[k].bytes, 0);",
"    const more = make('button', {type: 'button'}, `${rest.length} more, ${bytes(sum)}`);",
"    more.onclick = () => list(view, true);",
"    view.rows.append(make('tr', {}, make('td', {colspan: 5}, more)));",
"  }",
"  pick(view, view.tensor);",
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
"}",
"",
"// Selects an operation, and the same one in the other plan if that has it.",
"function go(view, i) {",
"  select(view, i);",
"  list(view);",
"  const key = (plan, i) => JSON.stringify([plan.ops[i].op, plan.ops[i].phase, plan.ops[i].recomputed,",
"    plan.ops[i].writes.map(k => plan.tensors[k].name)]);",
"  for (const other of views.filter(v => v !== view)) {",
"    const at = other.plan.ops.findIndex((_, i) => key(other.plan, i) === key(view.plan, view.op));",
"    if (at < 0) continue;",
"    select(other, at);",
"    list(other);",
"  }",
"}",
"",
"function onKey(view, event) {",
"  const {plan} = view, last = plan.ops.length - 1, peak = plan.plan.peak_op;",
"  const at = view.alive.indexOf(view.tensor);",
"  const moves = {ArrowLeft: view.op - 1, ArrowRight: view.op + 1, PageUp: view.op - 10,",
"    PageDown: view.op + 10, Home: 0, End: last, p: peak, P: peak};",
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
"  const under = t => !t.host && t.offset <= y && y < t.offset + slot(t);",
"  const k = view.alive.find(a => under(plan.tensors[a]));",
"  if (view.map.contains(event.target)) pick(view, k ?? null);",
"}",
"",
"// ---- files ----",
"",
"function save(name, type, text) {",
"  const link = make('a', {download: name, href: URL.createObjectURL(new Blob([text], {type}))});",
"  link.click();",
"  URL.revokeObjectURL(link.href);",
"}",
"",
"// The operations, with the bytes of each category.",
"function csv(plan) {",
"  const head = ['number', 'operation', 'phase', 'layer', 'recomputed', ...plan.categories, 'total'];",
"  const rows = plan.ops.map((op, i) => [i, op.op, op.phase, op.layer, op.recomputed, ...op.bytes,",
"    op.live_bytes]);",
"  return [head, ...rows].map(row => row.join(',') + '\\n').join('');",
"}",
"",
"// The memory figure as a file of its own, 960 x 480: colours as on a white page, text as text.",
"function svgFile(plan) {",
"  const [left, top, width, tall] = [90, 40, 850, 360], count = plan.ops.length;",
"  const light = ['#202020', '#56b4e9', '#d55e00', '#a4dccb', '#7a4a9c', '#e0ac00', '#909090', '#fff'];",
"  const x = i => (left + width * i / count).toFixed(1);",
"  const y = n => (top + tall * (1 - n / highest)).toFixed(1);",
"  const label = (x, y, anchor, text) => `<text x='${x}' y='${y}' text-anchor='${anchor}'>${text}</text>`;",
"  const base = plan.ops.map(() => 0), parts = [];",
"  for (const n of ticks())",
"    parts.push(`<path d='M${left},${y(n)} h${width}' stroke='#ccc'/>`,",
"      label(left - 6, +y(n) + 4, 'end', bytes(n).replace('.00', '')));",
"  for (const c of stack) {",
"    const low = base.map((n, i) => `H${x(i + 1)} V${y(n)} H${x(i)}`).reverse().join(' ');",
"    plan.ops.forEach((op, i) => base[i] += op.bytes[c]);",
"    const high = base.map((n, i) => `V${y(n)} H${x(i + 1)}`).join(' ');",
"    parts.push(`<path d='M${left},${y(base[0])} ${high} ${low} Z' fill='${light[c]}' stroke='#596273' ` +",
"      `stroke-width='.5'/>`);",
"  }",
"  plan.categories.forEach((name, c) => parts.push(",
"    `<rect x='${left + 106 * c}' y='430' width='12' height='12' fill='${light[c]}' stroke='#596273'/>`,",
"    label(left + 106 * c + 17, 441, 'start', name)));",
"  parts.push(label(left, 24, 'start', `${plan.technique}: peak ${bytes(plan.plan.peak_bytes)}`),",
"    label(left + width / 2, 420, 'middle', 'operations of a training step'));",
"  return `<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 960 480' font-family='sans-serif' ` +",
"    `font-size='13'><rect width='960' height='480' fill='#fff'/>${parts.join('\\n')}</svg>\\n`;",
"}",
"",
"function files(plan) {",
"  const button = (kind, type, text) => {",
"    const b = make('button', {type: 'button'}, `Save ${kind.toUpperCase()}`);",
"    b.onclick = () => save(`${plan.technique}.${kind}`, type, text(plan));",
"    return b;",
"  };",
"  return make('p', {}, button('svg', 'image/svg+xml', svgFile), ' ', button('csv', 'text/csv', csv));",
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
"    make('h2', {}, plan.technique), make('p', {}, summary(plan)), make('ul', {class: 'legend'}, ...legend),",
"    view.box, view.heading, view.cost, view.says,",
"    make('div', {class: 'scroll', tabindex: 0, role: 'region', 'aria-label': 'tensors'}, table),",
"    files(plan)));",
"  select(view, plan.plan.peak_op);",
"  setTimeout(() => views.includes(view) && list(view)); // figures first: the list takes as long",
"}",
"",
"// Draws plans side by side, in place of those before.",
"function render(plans) {",
"  const top = Math.max(...plans.map(p => p.plan.arena_bytes)); // and room for a label",
"  highest = 1.1 * (limit && limit.bytes < 4 * top ? Math.max(top, limit.bytes) : top);",
"  stack = stacked(plans[0]);",
"  views.length = 0;",
"  document.querySelector('main').replaceChildren();",
"  document.getElementById('model').textContent =",
"    Object.entries(plans[0].model).map(([name, n]) => `${name.replaceAll('_', ' ')} ${n}`).join(', ');",
"  plans.forEach(show);",
"}",
"",
"render(JSON.parse(document.getElementById('plans').textContent));",
"</script>",
"</html>",
};

/* Writes a line of a page, and after those with the marks the plans, or the options they come of. Lines of an
   element that has other plans are left out. */
static void explorer_line(FILE *f, const char *line, int *skips, const char *words,
                          const explorer_plan *plans, int count)
{
    int k;
    if (!strncmp(line, "</script>", 9)) *skips = 0;
    if (*skips) return;
    fputs(line, f);
    if (strstr(line, "id='planned'>")) fprintf(f, "%s\n", words);
    if (!strstr(line, "id='plans'>")) return;
    for (k = 0; k < count; k++) {
        fprintf(f, k ? ",\n" : "[");
        explorer_json(f, &plans[k]);
    }
    fprintf(f, "]\n");
    *skips = 1;
}

/* Writes a page with `count` plans. `planner` is the page that plans by itself, of tools/planner/make.sh; it
   then begins with the options in `words`, which explorer_word has written. NULL, or a file that is not
   there: a page of these plans. A failure leaves the path as it was. */
static mtt_status explorer_save(mtt_env *env, const char *path, const char *planner, const char *words,
                                const explorer_plan *plans, int count)
{
    char *page = NULL, line[4096];
    size_t size = 0;
    FILE *from = planner ? fopen(planner, "r") : NULL, *f = open_memstream(&page, &size);
    int i, skips = 0, failed = !f;
    mtt_writer *w;
    mtt_status status;
    while (f && from && fgets(line, sizeof(line), from))
        explorer_line(f, line, &skips, words, plans, count);
    for (i = 0; i < (int)(sizeof(explorer_page) / sizeof(explorer_page[0])) && f && !from; i++) {
        snprintf(line, sizeof(line), "%s\n", explorer_page[i]);
        explorer_line(f, line, &skips, words, plans, count);
    }
    if (from) failed |= ferror(from), fclose(from);
    if (f) failed |= ferror(f), failed |= fclose(f);
    size = page ? strlen(page) : 0; /* the size that Windows lacks */
    status = failed ? failure(env, MTT_E_FILE, "cannot write %.500s: %s", path, strerror(errno))
                    : mtt_writer_open(env, path, size, &w);
    if (!status) {
        mtt_writer_put(w, page, size);
        status = mtt_writer_commit(w);
        mtt_writer_close(w);
    }
    free(page);
    return status;
}
#endif
