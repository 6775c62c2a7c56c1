/* alone.h - the calls on ranks of a build without them, as MTT_NO_SOCKETS makes it, and always on Windows:
   there is one process, and more are refused.

   Include it after mtt.h. */
#ifndef ALONE_H_INCLUDED
#define ALONE_H_INCLUDED
#ifdef MTT_NO_SOCKETS
#include <stdio.h>

typedef struct mtt_ranks_desc { /* as in mtt.h */
    int rank, ranks;
    const char *address;
    int port;
    const char *run, *secret;
    double timeout;
    int mpi;
} mtt_ranks_desc;

static inline mtt_status mtt_ranks_connect(mtt_env *env, const mtt_ranks_desc *desc, mtt_ranks **out)
{
    *out = NULL;
    snprintf(env->error, sizeof(env->error), "this program trains in one process, and not in %d: build it "
             "without MTT_NO_SOCKETS, on Windows under WSL2", desc->ranks);
    return MTT_E_ARGUMENT;
}

static inline mtt_status mtt_ranks_fork(mtt_env *env, int ranks, double timeout, mtt_ranks **out)
{
    const mtt_ranks_desc desc = {.ranks = ranks, .timeout = timeout};
    *out = NULL;
    return ranks == 1 ? MTT_OK : mtt_ranks_connect(env, &desc, out);
}

static inline int mtt_ranks_rank(const mtt_ranks *ranks) { return (void)ranks, 0; }
static inline int mtt_ranks_count(const mtt_ranks *ranks) { return (void)ranks, 1; }
static inline mtt_status mtt_ranks_any(mtt_ranks *ranks, int *flag)
{
    *flag = *flag != 0;
    return (void)ranks, MTT_OK;
}
static inline mtt_status mtt_ranks_agree(mtt_ranks *ranks, const char *what, uint64_t value)
{
    return (void)ranks, (void)what, (void)value, MTT_OK;
}
static inline mtt_status mtt_ranks_busy(mtt_ranks *ranks) { return (void)ranks, MTT_OK; }
static inline void mtt_ranks_fail(mtt_ranks *ranks, const char *reason) { (void)ranks, (void)reason; }
static inline void mtt_ranks_close(mtt_ranks *ranks) { (void)ranks; }
#endif
#endif
