/* quota.h - how many CPUs the control group of this process may use.

   A container limits its CPUs by time: OpenMP still counts every core of the host and starts a thread on each
   of them, which then wait for each other. Control groups of version 2 say "QUOTA PERIOD" in cpu.max, with
   "max" for no limit; those of version 1 have two files, and -1 for no limit. Limits of the groups above
   count, too. A test sets MTT_SYSTEM_ROOT to a folder in place of /. */
#ifndef QUOTA_H_INCLUDED
#define QUOTA_H_INCLUDED

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { QUOTA_PATH = 4096 };

/* Reads one or two whole numbers of a file. Returns how many there are. */
static inline int quota_read(const char *folder, const char *file, long long *first, long long *second)
{
    char path[2 * QUOTA_PATH];
    FILE *f = NULL;
    int count = 0;
    if (snprintf(path, sizeof(path), "%s/%s", folder, file) < (int)sizeof(path)) f = fopen(path, "r");
    if (f) count = fscanf(f, "%lld %lld", first, second);
    if (f) fclose(f);
    return count;
}

/* The least limit of a group and of those above it, up to the folder `top`. */
static inline double quota_of(const char *top, const char *group)
{
    char folder[2 * QUOTA_PATH - 64];
    double least = HUGE_VAL;
    size_t end = strlen(top);
    if (snprintf(folder, sizeof(folder), "%s%s", top, group) >= (int)sizeof(folder)) folder[end] = 0;
    for (;;) {
        long long quota = 0, period = 0, none;
        if (quota_read(folder, "cpu.max", &quota, &period) == 0 &&
            quota_read(folder, "cpu.cfs_quota_us", &quota, &none) > 0)
            quota_read(folder, "cpu.cfs_period_us", &period, &none);
        if (quota > 0 && period > 0) least = fmin(least, (double)quota / (double)period);
        if (!folder[end]) return least;
        *strrchr(folder, '/') = 0;
    }
}

/* CPUs that this process may use, perhaps a fraction; HUGE_VAL: no limit is known. */
static inline double quota_cpus(void)
{
    const char *root = getenv("MTT_SYSTEM_ROOT") ? getenv("MTT_SYSTEM_ROOT") : "";
    char line[QUOTA_PATH], top[QUOTA_PATH], kinds[QUOTA_PATH + 2];
    double least = HUGE_VAL;
    FILE *f = NULL;
    if (snprintf(top, sizeof(top), "%s/proc/self/cgroup", root) < (int)sizeof(top)) f = fopen(top, "r");
    while (f && fgets(line, sizeof(line), f)) { /* number:controllers:path; version 2 has no controllers */
        char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;
        if (!group) continue;
        *group++ = 0;
        group[strcspn(group, "\n")] = 0;
        if (*group != '/' || !group[1] || strstr(group, "/..")) *group = 0; /* the topmost one */
        snprintf(kinds, sizeof(kinds), ",%s,", list + 1);
        if (list[1] && !strstr(kinds, ",cpu,")) continue;
        if (snprintf(top, sizeof(top), "%s/sys/fs/cgroup%s", root, list[1] ? "/cpu" : "") < (int)sizeof(top))
            least = fmin(least, quota_of(top, group));
        if (snprintf(top, sizeof(top), "%s/sys/fs/cgroup/%s", root, list + 1) < (int)sizeof(top) && list[1])
            least = fmin(least, quota_of(top, group));
    }
    if (f) fclose(f);
    return least;
}
#endif
