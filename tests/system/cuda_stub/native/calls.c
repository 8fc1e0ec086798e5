/* Counts, faults, and failures on request. See core.h. */

#define _GNU_SOURCE
#include "core.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

pthread_mutex_t stub_lock = PTHREAD_MUTEX_INITIALIZER;
static struct call *calls;

struct text {
    char *said;
    unsigned long count;
    struct text *next;
};
static struct text *faults;

/* Of what is to fail: after so many calls, so many times. */
struct failure {
    char *name;
    int status;
    long after, times;
    struct failure *next;
};
static struct failure *failures;

int called(struct call *call) {
    int status = 0;
    pthread_mutex_lock(&stub_lock);
    if (!call->next && call->count == 0) {
        call->next = calls ? calls : call; /* the last points at itself */
        calls = call;
    }
    call->count++;
    for (struct failure *one = failures; one; one = one->next) {
        if (one->times == 0 || strcmp(one->name, call->name) != 0) continue;
        if (one->after > 0) {
            one->after--;
        } else {
            one->times--;
            status = one->status;
        }
    }
    pthread_mutex_unlock(&stub_lock);
    return status;
}

void fault(const char *format, ...) {
    char said[512];
    va_list values;
    va_start(values, format);
    vsnprintf(said, sizeof said, format, values);
    va_end(values);
    pthread_mutex_lock(&stub_lock);
    struct text *text = faults;
    while (text && strcmp(text->said, said) != 0) text = text->next;
    if (!text) {
        text = calloc(1, sizeof *text);
        text->said = strdup(said);
        text->next = faults;
        faults = text;
    }
    text->count++;
    pthread_mutex_unlock(&stub_lock);
}

/* Have calls of a function fail with a status: skip the first `after`, then fail `times`. */
void stub_fail(const char *name, int status, long after, long times) {
    struct failure *one = calloc(1, sizeof *one);
    *one = (struct failure){strdup(name), status, after, times, NULL};
    pthread_mutex_lock(&stub_lock);
    one->next = failures;
    failures = one;
    pthread_mutex_unlock(&stub_lock);
}

void reset_calls(void) {
    for (struct call *call = calls; call; call = call->next == call ? NULL : call->next) call->count = 0;
    while (faults) {
        struct text *text = faults;
        faults = text->next;
        free(text->said);
        free(text);
    }
}

void dump_calls(FILE *file) {
    for (struct call *call = calls; call; call = call->next == call ? NULL : call->next)
        if (call->count) fprintf(file, "call\t%s\t%lu\n", call->name, call->count);
    for (struct text *text = faults; text; text = text->next) fprintf(file, "fault\t%s\t%lu\n", text->said, text->count);
}
