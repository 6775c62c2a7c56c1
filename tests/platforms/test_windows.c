/* test_windows.c - what differs on Windows: paths in UTF-8 with both separators and drives, files that are
   replaced while others read them, locks. tests/windows.sh runs it. */
#define MTT_IMPLEMENTATION
#include "../../mtt.h"
#include "../test.h"
#define END_OF_TEXT ((mtt_slice){"<|endoftext|>", 13})

static mtt_env env;
static char place[400]; /* the folder, with names that no code page has */

static const char *at(const char *format, const char *name)
{
    static char path[8][1024];
    static int turn;
    char *p = path[turn++ % 8];
    snprintf(p, sizeof(path[0]), format, place, name);
    return p;
}

static void make_text(const char *path)
{
    mtt_writer *w;
    int i;
    check(!mtt_writer_open(&env, path, 0, &w), "%s", env.error);
    for (i = 0; i < 3000; i++) {
        char word[32];
        int size = snprintf(word, sizeof(word), "%s%d ", below(3) ? "ab" : "cde", below(40));
        mtt_writer_put(w, word, (size_t)size);
    }
    check(!mtt_writer_commit(w), "%s", env.error);
    mtt_writer_close(w);
}

static mtt_trainer *open_trainer(const mtt_dataset *data)
{
    mtt_model_desc model = {.layers = 1, .heads = 2, .d_model = 32};
    mtt_policy policy = {.precision = MTT_BF16, .attention = MTT_ATTENTION_FLASH};
    mtt_optim_desc optim = {.lr = 1e-3f};
    mtt_trainer *t = NULL;
    model.vocab = mtt_tokens_vocab(data->train);
    check(!mtt_trainer_create(&env, &model, &policy, &optim, mtt_cpu_backend(), 2, 16, &t), "%s", env.error);
    return t;
}

static double step(mtt_trainer *t, mtt_batches *b)
{
    int32_t tokens[32], targets[32];
    mtt_step_info info;
    memset(&info, 0, sizeof(info));
    check(!mtt_batches_next(b, tokens, targets) && !mtt_train_step(t, tokens, targets, &info), "%s",
          env.error);
    return info.loss;
}

/* A checkpoint that a model has open is replaced, and the model goes on with what it opened. */
static void replaced(const mtt_dataset *data)
{
    const char *path = at("%s/%s", "модель.safetensors");
    mtt_trainer *t = open_trainer(data), *other = open_trainer(data);
    mtt_batches b, again;
    mtt_model *model = NULL;
    double after;
    int fd;
    mtt_batches_init(&env, &b, data->train, 2, 16, 1, 0);
    again = b;
    step(t, &b);
    check(!mtt_save(t, path, &b), "%s", env.error);
    check(!mtt_model_open(&env, path, &model), "%s", env.error);
    fd = mtt__os_open(path, MTT__READ);
    check(fd >= 0, "the checkpoint cannot be opened");
    step(t, &b);
    /* Wine and Windows before 10 do not replace a file that somebody has open. */
    check(!mtt_save(t, path, &b) || strstr(env.error, "close what has it open"), "%s", env.error);
    check(!mtt_resume(other, path, &again), "after a checkpoint that is open was saved: %s", env.error);
    if (fd >= 0) mtt__os_close(fd);
    check(!mtt_save(t, path, &b), "saving over a checkpoint that a model has: %s", env.error);
    check(!mtt_trainer_load(other, model), "the model that was opened before: %s", env.error);
    mtt_model_close(model);
    after = step(t, &b);
    check(!mtt_resume(other, path, &again), "%s", env.error);
    check(step(other, &again) == after, "the resumed step has another loss");
    mtt_trainer_destroy(other);
    mtt_trainer_destroy(t);
}

/* One writer at a time. What an earlier one has left does not stop the next, even if somebody reads it. */
static void locked(void)
{
    const char *path = at("%s\\%s", "lock.txt"), *left = at("%s\\%s", ".lock.txt.tmp");
    mtt_writer *w = NULL, *second = NULL;
    mtt__map map;
    int fd;
    check(!mtt_writer_open(&env, path, 0, &w), "%s", env.error);
    check(mtt_writer_open(&env, path, 0, &second) == MTT_E_FILE &&
              strstr(env.error, "another process is writing"), "two writers: %s", env.error);
    mtt_writer_put(w, "1\n2", 3);
    check(!mtt_writer_commit(w), "%s", env.error);
    mtt_writer_close(w);
    check(!mtt__map_open(&env, path, &map), "%s", env.error);
    check(map.bytes == 3 && !memcmp(map.data, "1\n2", 3), "the file has %d bytes", (int)map.bytes);
    mtt__map_close(&map);
    fd = mtt__os_open(left, MTT__WRITE_NEW);
    check(fd >= 0, "a temporary cannot be left");
    if (fd >= 0) mtt__os_close(fd);
    fd = mtt__os_open(left, MTT__READ);
    check(!mtt_writer_open(&env, path, 0, &w), "a temporary was left: %s", env.error);
    mtt_writer_put(w, "3", 1);
    check(!mtt_writer_commit(w), "%s", env.error);
    mtt_writer_close(w);
    if (fd >= 0) mtt__os_close(fd);
    check(!mtt__map_open(&env, path, &map), "%s", env.error);
    check(map.bytes == 1 && *map.data == '3', "the file has %d bytes", (int)map.bytes);
    mtt__map_close(&map);
}

/* Names that cannot be, with what to do. */
static void refused(void)
{
    static const struct {
        const char *format, *name, *why;
    } names[] = {{"%s/%s", "none/x.txt", "find this folder"}, {"%s%s", "", "regular file"},
                 {"%s\\%s", "none\\x.txt", "find this folder"}, {"%s/%s", "", "regular file"},
                 {"%s/%s", "\xff\xfe.txt", "cannot create it"}, {"%s\\%s", "a<b>.txt", "find this folder"}};
    size_t i;
    mtt_writer *w;
    mtt__corpus *c;
    for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        new_case();
        check(mtt_writer_open(&env, at(names[i].format, names[i].name), 0, &w) == MTT_E_FILE && !w &&
                  strstr(env.error, names[i].why), "%s: %s", names[i].name, env.error);
    }
    check(mtt__corpus_open(&env, place, NULL, END_OF_TEXT, &c) == MTT_E_FILE && !c, "a folder as a text: %s",
          env.error);
    check(strlen(mtt__os_name("C:\\a/b\\c.txt")) == 5 && strlen(mtt__os_name("C:x")) == 1 &&
              strlen(mtt__os_name("x")) == 1 && !*mtt__os_name("a\\"), "names of files");
}

int main(void)
{
    mtt_prepare_desc job = {.vocab = 300};
    mtt_prepare_report report;
    mtt_dataset data;
    char whole[1024], drive[1024];
    wchar_t wide[512];
    int i;
    if (!open_folder()) return finish();
    snprintf(place, sizeof(place), "%s\\фолд 日", folder);
    MultiByteToWideChar(CP_UTF8, 0, place, -1, wide, 512);
    check(CreateDirectoryW(wide, NULL), "%s cannot be made", place);
    GetFullPathNameW(wide, 512, wide, NULL);
    WideCharToMultiByte(CP_UTF8, 0, wide, -1, whole, sizeof(whole), NULL, NULL);
    check(whole[1] == ':', "%s has no drive", whole);
    make_text(at("%s/%s", "text é.txt"));
    job.input = at("%s\\%s", "text é.txt");
    job.output = at("%s/%s", "d");
    for (i = 0; i < 2; i++) {
        check(!mtt_prepare(&env, &job, &report) && report.reused == i, "prepare %d: %s", i, env.error);
        snprintf(drive, sizeof(drive), "%s\\d", whole); /* the second time with the drive */
        job.output = drive;
    }
    check(!mtt_dataset_open(&env, drive, NULL, &data), "%s", env.error);
    replaced(&data);
    mtt_dataset_close(&data);
    locked();
    refused();
    return finish();
}
