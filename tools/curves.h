/* curves.h - the numbers of a training log as a table for spreadsheets (CSV), or as a file for TensorBoard.

   run.h writes one row for each line of its log. CSV has a line for each row; a number that the row does not
   have is empty. An event file is a sequence of records (TFRecord), each a protocol buffer with a time, a
   step, and a tag and a value for each number of the row. */
#ifndef CURVES_H_INCLUDED
#define CURVES_H_INCLUDED

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { CURVES_NONE, CURVES_CSV, CURVES_TENSORBOARD };

/* A number: its key in the log, which is also its column, and its tag in TensorBoard. */
#define CURVES(X)                                                                                            \
    X(loss, "loss/train")                                                                                    \
    X(val_loss, "loss/validation")                                                                           \
    X(bits_per_byte, "bits_per_byte/validation")                                                             \
    X(accuracy, "accuracy/validation")                                                                       \
    X(lr, "learning_rate")                                                                                   \
    X(grad_norm, "gradient_norm")                                                                            \
    X(tokens_per_s, "tokens_per_second")
#define CURVES_ENUM(key, tag) CURVE_##key,
#define CURVES_KEY(key, tag) "\"" #key "\": ",
#define CURVES_COLUMN(key, tag) "," #key
#define CURVES_TAG(key, tag) tag,
enum { CURVES(CURVES_ENUM) CURVE_COUNT };
static const char *const curve_keys[] = {CURVES(CURVES_KEY)}; /* as they are in a line of the log */
static const char *const curve_tags[] = {CURVES(CURVES_TAG)};

/* ---- event files ---- */

typedef struct curve_bytes {
    unsigned char at[512]; /* the largest event has about 300 */
    size_t size;
} curve_bytes;

static void curves_put(curve_bytes *b, const void *data, size_t size)
{
    memcpy(b->at + b->size, data, size);
    b->size += size;
}

/* 7 bits a byte, the lowest first. The upper bit says that more follow. */
static void curves_put_varint(curve_bytes *b, uint64_t number)
{
    for (; number >> 7; number >>= 7) b->at[b->size++] = (unsigned char)(number | 0x80);
    b->at[b->size++] = (unsigned char)number;
}

/* A member of a message: its number and kind, then its size and bytes. */
static void curves_put_block(curve_bytes *b, int member, const void *data, size_t size)
{
    curves_put_varint(b, (uint64_t)member << 3 | 2);
    curves_put_varint(b, size);
    curves_put(b, data, size);
}

/* CRC-32C, masked as TFRecord requires. */
static uint32_t curves_crc(const void *data, size_t size)
{
    const unsigned char *at = (const unsigned char *)data, *end = at + size;
    uint32_t crc = 0xffffffffu;
    int bit;
    for (; at < end; at++)
        for (crc ^= *at, bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    crc = ~crc;
    return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

/* Writes an event with its time, its step and one more member. */
static void curves_event(FILE *f, double seconds, int64_t step, int member, const void *data, size_t size)
{
    curve_bytes event = {{0}, 0};
    uint64_t length;
    uint32_t crc;
    curves_put(&event, "\x09", 1);
    curves_put(&event, &seconds, 8);
    curves_put(&event, "\x10", 1);
    curves_put_varint(&event, (uint64_t)step);
    curves_put_block(&event, member, data, size);
    length = event.size;
    fwrite(&length, 1, 8, f);
    crc = curves_crc(&length, 8);
    fwrite(&crc, 1, 4, f);
    fwrite(event.at, 1, event.size, f);
    crc = curves_crc(event.at, event.size);
    fwrite(&crc, 1, 4, f);
}

/* ---- both kinds ---- */

/* The header of the table, or the first two events. */
static void curves_begin(FILE *f, int kind, double seconds)
{
    if (kind == CURVES_CSV) fputs("step,time" CURVES(CURVES_COLUMN) "\n", f);
    else {
        curves_event(f, seconds, 0, 3, "brain.Event:2", 13); /* the version */
        curves_event(f, seconds, 0, 7, "\x08\x01", 2); /* a start: the steps of earlier files are void */
    }
}

/* A row; NAN = it does not have the number. */
static void curves_row(FILE *f, int kind, double seconds, int64_t step, const double values[CURVE_COUNT])
{
    curve_bytes summary = {{0}, 0}, pair;
    int k;
    if (kind == CURVES_CSV) {
        fprintf(f, "%lld,%.3f", (long long)step, seconds);
        for (k = 0; k < CURVE_COUNT; k++) fprintf(f, isnan(values[k]) ? "," : ",%.15g", values[k]);
        fputc('\n', f);
        return;
    }
    for (k = 0; k < CURVE_COUNT; k++) {
        float value = (float)values[k];
        if (isnan(values[k])) continue;
        pair.size = 0;
        curves_put_block(&pair, 1, curve_tags[k], strlen(curve_tags[k]));
        curves_put(&pair, "\x15", 1);
        curves_put(&pair, &value, 4);
        curves_put_block(&summary, 1, pair.at, pair.size);
    }
    curves_event(f, seconds, step, 5, summary.at, summary.size);
}
#endif
