/* techniques.h - the techniques that the tests on a GPU go through: test_cuda.c for bits, sanitize_cuda.c for
   memory. */
typedef struct technique {
    const char *name;
    mtt_policy policy;
    float dropout;
    int heads, seq_len; /* 0: 2 heads of 32, 40 tokens */
    int heads_kv, d_head, qk_norm;
    mtt_positions positions;
} technique;

static const technique TECHNIQUES[] = {
    {"fp32", {.precision = MTT_FP32, .loss = MTT_LOSS_FULL}, .dropout = 0},
    {"tf32", {.precision = MTT_TF32}, .dropout = 0},
    {"bf16", {.precision = MTT_BF16, .loss = MTT_LOSS_FULL}, .dropout = 0},
    {"fp16", {.precision = MTT_FP16}, .dropout = 0},
    {"bf16_flash", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, .dropout = 0},
    /* several tiles of keys, of a width that warpgroups take */
    {"bf16_flash_wide_head", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, .heads = 1,
     .seq_len = 300},
    {"fp32_flash", {.precision = MTT_FP32, .attention = MTT_ATTENTION_FLASH}, .dropout = 0},
    {"bf16_flash_groups", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, .dropout = 0.1f,
     .heads = 6, .heads_kv = 2, .d_head = 64, .seq_len = 300, .positions = MTT_POSITIONS_ROTARY},
    {"bf16_groups_norm", {.precision = MTT_BF16}, .heads = 4, .heads_kv = 1, .qk_norm = 1,
     .positions = MTT_POSITIONS_ROTARY},
    {"fp32_flash_groups_norm", {.precision = MTT_FP32, .attention = MTT_ATTENTION_FLASH,
     .recompute = MTT_RECOMPUTE_LAYER}, .heads = 4, .heads_kv = 2, .qk_norm = 1},
    {"bf16_window16", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH, .window = 16}, .dropout = 0},
    {"fp32_checkpointing", {.precision = MTT_FP32, .recompute = MTT_RECOMPUTE_LAYER}, .dropout = 0},
    {"bf16_selective", {.precision = MTT_BF16, .recompute = MTT_RECOMPUTE_SELECTIVE}, .dropout = 0},
    {"bf16_flash_chunked", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH,
     .loss = MTT_LOSS_CHUNKED, .loss_chunk_rows = 50}, .dropout = 0},
    {"bf16_dropout", {.precision = MTT_BF16}, .dropout = 0.1f},
    {"bf16_flash_dropout", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH}, .dropout = 0.1f},
    {"bf16_accumulate_dropout", {.precision = MTT_BF16, .accumulate = 2}, .dropout = 0.1f},
    {"bf16_flash_compact_dropout", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH,
     .state = MTT_STATE_COMPACT}, .dropout = 0.1f},
    {"bf16_flash_compact_early", {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH,
     .state = MTT_STATE_COMPACT, .early_update = 1}, .dropout = 0.1f},
    {"fp16_compact_checkpointing", {.precision = MTT_FP16, .recompute = MTT_RECOMPUTE_LAYER,
     .state = MTT_STATE_COMPACT, .accumulate = 2}, .dropout = 0},
    {"fp8", {.precision = MTT_FP8, .loss_chunk_rows = 48}, .dropout = 0},
    {"fp8_layers_checkpointing", {.precision = MTT_FP8, .fp8_products = MTT_FP8_LAYERS,
     .recompute = MTT_RECOMPUTE_LAYER, .accumulate = 2}, .dropout = 0.1f},
    {"fp8_flash_selective", {.precision = MTT_FP8, .attention = MTT_ATTENTION_FLASH,
     .recompute = MTT_RECOMPUTE_SELECTIVE}, .dropout = 0.1f},
    {"fp8_flash_groups", {.precision = MTT_FP8, .attention = MTT_ATTENTION_FLASH}, .heads = 4, .heads_kv = 2,
     .d_head = 32, .qk_norm = 1, .positions = MTT_POSITIONS_ROTARY},
    {"fp8_flash_segments_compact", {.precision = MTT_FP8, .attention = MTT_ATTENTION_FLASH,
     .recompute = MTT_RECOMPUTE_SEGMENTS, .state = MTT_STATE_COMPACT}, .dropout = 0},
};
enum { TECHNIQUE_COUNT = sizeof(TECHNIQUES) / sizeof(TECHNIQUES[0]) };
