/* launch.h - the rank that torchrun, mpirun or srun has made of this process, by the variables that they set.

   Include it after mtt.h. */
#ifndef LAUNCH_H
#define LAUNCH_H
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "alone.h"
#include "failure.h"

enum { LAUNCH_RANKS = 1024 }; /* at most, as mtt.h */

/* A rank that a launcher has started, for mtt_ranks_connect. */
typedef struct launch {
    mtt_ranks_desc desc;
    int local;      /* number of the rank on its host, for the choice of a device; -1 = unknown */
    char host[256]; /* what desc.address points to, if the launcher names a host */
} launch;

/* The variables by which a launcher describes a rank. `sign` is set only if it started this process. Where
   `sign` is NULL, `rank` or `ranks` shows that. */
typedef struct launcher {
    const char *sign, *rank, *ranks, *local, *locals, *run, *hosts;
    int mpi; /* 1 = an mpirun */
} launcher;

/* Launchers that srun may have started come before it. */
static const launcher launchers[] = {
    {NULL, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "", 0},
    {NULL, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "", 1},
    {NULL, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", "", 1},
    {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID",
     "SLURM_STEP_NODELIST", 0},
};

/* Reads a number of low..high. A variable that is not set leaves *value, but fails if there is a `need`: the
   variable that is set and needs it. */
static mtt_status launch_variable(mtt_env *env, const char *name, const char *need, int low, int high,
                                int *value)
{
    const char *text = getenv(name);
    char *end;
    long number;
    if (!text && !need) return MTT_OK;
    if (!text) return failure(env, MTT_E_ARGUMENT, "%s is not set, but %s is: set both", name, need);
    errno = 0;
    number = strtol(text, &end, 10);
    if (end == text || *end || errno || number < low || number > high)
        return failure(env, MTT_E_ARGUMENT, "%s=%s: it must be a number of %d..%d", name, text, low, high);
    *value = (int)number;
    return MTT_OK;
}

/* The first host of a list of SLURM's: node7,node9 is node7, and rack[03-05,9]-gpu[1,2] is rack03-gpu1. */
static mtt_status launch_first_host(mtt_env *env, const char *name, char *host, size_t capacity)
{
    const char *at = getenv(name);
    size_t size = 0;
    int inside = 0;
    for (; *at && (inside || *at != ',') && size < capacity - 1; at++) {
        if (*at == '[' || *at == ']') inside = *at == '[';
        else if (inside && (*at == '-' || *at == ',')) at += strcspn(at, "]") - 1;
        else host[size++] = *at;
    }
    host[size] = 0;
    if (size && !inside && (!*at || *at == ',')) return MTT_OK;
    return failure(env, MTT_E_ARGUMENT, "%s=%s does not begin with a host: set MASTER_ADDR to the host of "
                   "rank 0", name, getenv(name));
}

/* Finds the host of rank 0. If all ranks are on this one, the default will do. */
static mtt_status launch_find_host(mtt_env *env, const launcher *l, launch *here)
{
    const char *address = getenv("MASTER_ADDR"), *hosts = getenv(l->hosts) ? l->hosts : "SLURM_JOB_NODELIST";
    int locals = 0;
    mtt_status status = launch_variable(env, l->locals, NULL, 1, here->desc.ranks, &locals);
    if (status || (!address && (locals == here->desc.ranks || (!locals && !getenv(hosts))))) return status;
    here->desc.address = here->host;
    if (!address && getenv(hosts)) return launch_first_host(env, hosts, here->host, sizeof(here->host));
    if (!address || !*address || strlen(address) >= sizeof(here->host))
        return failure(env, MTT_E_ARGUMENT, "MASTER_ADDR=%s: it must be the host of rank 0, in 1..%d bytes",
                       address ? address : "", (int)sizeof(here->host) - 1);
    memcpy(here->host, address, strlen(address) + 1);
    return MTT_OK;
}

/* Describes this rank by the variables of its launcher. The first of these that is there counts:
      torchrun   RANK, WORLD_SIZE, LOCAL_RANK; the run is TORCHELASTIC_RUN_ID
      mpirun     OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK, or PMI_RANK, PMI_SIZE and MPI_LOCALRANKID
      srun       SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, if there is SLURM_STEP_ID: a batch script has the
                 others, too, but is one process; the run is SLURM_JOB_ID
   Without any, `ranks` is 1. The address is MASTER_ADDR, or else the first host of SLURM_STEP_NODELIST or
   SLURM_JOB_NODELIST, where rank 0 runs. The port is MASTER_PORT + 1. The secret is MTT_SECRET. Texts of the
   description point into the environment and into `here`. `mpi` is set for mpirun's ranks if this build has
   MTT_MPI. MTT_E_ARGUMENT: the error names the variable that is malformed, missing or in contradiction. */
static mtt_status launch_find(mtt_env *env, launch *here)
{
    const launcher *l = launchers, *end = l + sizeof(launchers) / sizeof(*launchers);
    mtt_ranks_desc *d = &here->desc;
    int port = 0;
    mtt_status status;
    memset(here, 0, sizeof(*here));
    d->ranks = 1;
    while (l < end && !getenv(l->sign ? l->sign : l->rank) && (l->sign || !getenv(l->ranks))) l++;
    if (l == end) return MTT_OK;
    status = launch_variable(env, l->ranks, l->sign ? l->sign : l->rank, 1, LAUNCH_RANKS, &d->ranks);
    if (!status) status = launch_variable(env, l->rank, l->ranks, 0, d->ranks - 1, &d->rank);
    here->local = d->ranks > 1 ? -1 : 0;
    if (!status) status = launch_variable(env, l->local, NULL, 0, d->ranks - 1, &here->local);
    if (!status) status = launch_variable(env, "MASTER_PORT", NULL, 1, 65534, &port);
    if (!status) status = launch_find_host(env, l, here);
    if (port) d->port = port + 1;
    d->run = getenv(l->run);
    d->secret = getenv("MTT_SECRET");
    if (!status && d->secret && !*d->secret)
        status = failure(env, MTT_E_ARGUMENT, "MTT_SECRET is empty: give all ranks a secret, or unset it");
#ifdef MTT_MPI
    d->mpi = l->mpi;
#endif
    return status;
}
#endif
