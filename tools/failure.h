/* failure.h - the reason of a failure, as the library says its own. Include it after mtt.h. */
#ifndef FAILURE_H_INCLUDED
#define FAILURE_H_INCLUDED
#include <stdarg.h>
#include <stdio.h>

/* Formats the reason into env->error, and returns the status. */
static inline mtt_status failure(mtt_env *env, mtt_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(env->error, sizeof(env->error), format, arguments);
    va_end(arguments);
    return status;
}
#endif
