/* A stand-in for libnvidia-ml.so.1: as many GPUs as a test wants, in whatever state it wants them.
 *
 * Every process that loads it reads commands from one file, $FAKE_NVML/commands, to which a test appends lines.  Each
 * call first applies what is new there, so a command that was written before a call is in force in it, in every
 * process, and a process that starts later finds the same state.  A waiting call is woken by inotify.
 * What is called is appended to $FAKE_NVML/calls where that file exists: `PID FUNCTION GPU`.
 *
 * Written from the documented interface; holds no code of NVIDIA's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define ALL (-1)

enum { GPUS = 64, SETS = 16, QUEUE = 1024, RULES = 64, FIELDS = 16, NAME = 64 };
enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25, UNKNOWN = 999,
};
static const unsigned long long XID = 0x8, NO_INSTANCE = 0xffffffffu;

/* --- state -------------------------------------------------------------------------------------- */

typedef struct { unsigned id; long long value; int known; } Field;

typedef struct {
    int index, lost, pending, failed, ecc, sram, temperature, links, pages_pending;
    unsigned long long events, links_down;
    unsigned domain, bus, device;
    char uuid[96], name[96];
    Field fields[FIELDS];
} Gpu;

typedef struct { Gpu *gpu; unsigned long long type, data; unsigned gi, ci; } Event;

typedef struct {
    int used;
    unsigned long long wanted[GPUS];
    Event queue[QUEUE];
    unsigned first, count;
} Set;

typedef struct { char function[NAME]; int gpu, code; long delay_ms; } Rule;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Gpu gpus[GPUS];
static Set sets[SETS];
static Rule rules[RULES];
static int count = 0, initialized = 0, ready = 0;
static char driver[64] = "580.95.05";
static off_t applied = 0;

static void fresh(void) {
    memset(rules, 0, sizeof rules);
    for (int i = 0; i < GPUS; i++) {
        Gpu *gpu = &gpus[i];
        memset(gpu, 0, sizeof *gpu);
        gpu->index = i;
        gpu->temperature = 40 + i;
        gpu->events = 0xffff;
        gpu->pages_pending = -1; /* a GPU that remaps rows retires no pages */
        gpu->bus = 0x10 + (unsigned)i;
        snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-00000000-0000-4000-8000-%012x", i);
        snprintf(gpu->name, sizeof gpu->name, "Fake H100 80GB");
        gpu->fields[0] = (Field){.id = 230, .value = 0, .known = 1};
    }
    count = 0;
}

static void queue_event(int index, Event event) {
    for (int i = 0; i < SETS; i++) {
        Set *set = &sets[i];
        if (!set->used || !(set->wanted[index] & event.type) || set->count == QUEUE) continue;
        set->queue[(set->first + set->count++) % QUEUE] = event;
    }
}

static void set_field(Gpu *gpu, unsigned id, const char *value) {
    for (int i = 0; i < FIELDS; i++) {
        Field *field = &gpu->fields[i];
        if (field->id && field->id != id) continue;
        *field = (Field){.id = id, .value = atoll(value), .known = strcmp(value, "none") != 0};
        return;
    }
}

static void set_value(Gpu *gpu, const char *key, const char *value) {
    int number = (int)strtol(value, NULL, 0);
    if (!strcmp(key, "temperature")) gpu->temperature = number;
    else if (!strcmp(key, "rows_pending")) gpu->pending = number;
    else if (!strcmp(key, "pages_pending")) gpu->pages_pending = number;
    else if (!strcmp(key, "rows_failed")) gpu->failed = number;
    else if (!strcmp(key, "ecc_uncorrected")) gpu->ecc = number;
    else if (!strcmp(key, "sram_threshold")) gpu->sram = number;
    else if (!strcmp(key, "links")) gpu->links = number;
    else if (!strcmp(key, "links_down")) gpu->links_down = strtoull(value, NULL, 0);
    else if (!strcmp(key, "events")) gpu->events = strtoull(value, NULL, 0);
    else if (!strcmp(key, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", value);
    else if (!strcmp(key, "pci")) sscanf(value, "%x:%x:%x", &gpu->domain, &gpu->bus, &gpu->device);
    else if (!strncmp(key, "field:", 6)) set_field(gpu, (unsigned)atoi(key + 6), value);
    else fprintf(stderr, "fake nvml: no such value: %s\n", key);
}

static Rule *rule_of(const char *function, int gpu) {
    Rule *free_one = NULL;
    for (int i = 0; i < RULES; i++) {
        if (!strcmp(rules[i].function, function) && rules[i].gpu == gpu) return &rules[i];
        if (!free_one && !rules[i].function[0]) free_one = &rules[i];
    }
    if (free_one) {
        snprintf(free_one->function, NAME, "%s", function);
        free_one->gpu = gpu;
    }
    return free_one;
}

static void apply(char *line) {
    char *words[8] = {0}, *rest = NULL;
    int n = 0;
    for (char *word = strtok_r(line, " ", &rest); word && n < 8; word = strtok_r(NULL, " ", &rest)) words[n++] = word;
    if (!n) return;
    const char *verb = words[0];
    int index = n > 1 && strcmp(words[1], "*") ? atoi(words[1]) : ALL;
    int one = index >= 0 && index < GPUS;
    if (!strcmp(verb, "count") && n == 2) count = index < GPUS ? index : GPUS;
    else if (!strcmp(verb, "driver") && n == 2) snprintf(driver, sizeof driver, "%s", words[1]);
    else if (!strcmp(verb, "set") && n == 4 && one) set_value(&gpus[index], words[2], words[3]);
    else if (!strcmp(verb, "lost") && n == 3 && one) gpus[index].lost = atoi(words[2]);
    else if (!strcmp(verb, "reset") && n == 1) fresh();
    else if (!strcmp(verb, "event") && n == 6 && one)
        queue_event(index, (Event){.gpu = &gpus[index], .type = strtoull(words[2], NULL, 0),
                                   .data = strtoull(words[3], NULL, 0), .gi = (unsigned)strtoul(words[4], NULL, 0),
                                   .ci = (unsigned)strtoul(words[5], NULL, 0)});
    else if ((!strcmp(verb, "answer") || !strcmp(verb, "delay")) && n == 4) {
        Rule *rule = rule_of(words[1], strcmp(words[2], "*") ? atoi(words[2]) : ALL);
        if (rule && verb[0] == 'a') rule->code = atoi(words[3]);
        else if (rule) rule->delay_ms = atol(words[3]);
    } else
        fprintf(stderr, "fake nvml: not understood: %s\n", verb);
}

static int path_of(const char *name, char *path) {
    const char *directory = getenv("FAKE_NVML"), *node = getenv("SLURMD_NODENAME");
    if (!directory) return 0;
    const char *mark = strstr(directory, "%N"); /* the processes of a job have one environment on all its nodes */
    if (!mark || !node) return snprintf(path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX;
    return snprintf(path, PATH_MAX, "%.*s%s%s/%s", (int)(mark - directory), directory, node, mark + 2, name) < PATH_MAX;
}

/* Apply the whole lines that are new in the file. */
static void catch_up(void) {
    char path[PATH_MAX];
    if (!ready) {
        fresh();
        ready = 1;
    }
    if (!path_of("commands", path)) return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    struct stat now;
    if (!fstat(file, &now) && now.st_size > applied) {
        size_t size = (size_t)(now.st_size - applied);
        char *text = malloc(size + 1);
        ssize_t got = text ? pread(file, text, size, applied) : -1;
        if (got > 0) {
            text[got] = 0;
            char *line = text;
            for (char *end; (end = strchr(line, '\n')); line = end + 1) {
                *end = 0;
                apply(line);
            }
            applied += line - text;
        }
        free(text);
    }
    close(file);
}

static void note_call(const char *function, int gpu) {
    char path[PATH_MAX], line[128];
    if (!path_of("calls", path)) return;
    int file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0) return;
    int size = snprintf(line, sizeof line, "%d %s %d\n", (int)getpid(), function, gpu);
    if (write(file, line, (size_t)size) != size) perror("fake nvml: calls");
    close(file);
}

static void sleep_ms(long milliseconds) {
    struct timespec wait = {.tv_sec = milliseconds / 1000, .tv_nsec = milliseconds % 1000 * 1000000};
    while (nanosleep(&wait, &wait) && errno == EINTR) {}
}

static long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Begin a call: returns with the lock held and OK, or without it and the answer.  A delay ends early when a test
 * shortens it, so that a hung call can come back. */
static int enter(const char *function, int gpu, int needs_init) {
    long began = now_ms();
    note_call(function, gpu);
    for (;;) {
        pthread_mutex_lock(&lock);
        catch_up();
        long delay = 0;
        int code = OK;
        for (int i = 0; i < RULES; i++) {
            Rule *rule = &rules[i];
            if (strcmp(rule->function, function) && strcmp(rule->function, "*")) continue;
            if (rule->gpu != ALL && rule->gpu != gpu) continue;
            if (rule->delay_ms > delay) delay = rule->delay_ms;
            if (rule->code) code = rule->code;
        }
        if (now_ms() - began >= delay) {
            if (!code && needs_init && !initialized) code = UNINITIALIZED;
            if (!code && gpu >= 0 && gpus[gpu].lost) code = GPU_IS_LOST;
            if (code) pthread_mutex_unlock(&lock);
            return code;
        }
        pthread_mutex_unlock(&lock);
        sleep_ms(5);
    }
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(gpu)                                     \
    do {                                               \
        int refused = enter(__func__, gpu, 1);         \
        if (refused) return refused;                   \
    } while (0)
#define ENTER_GPU                                      \
    do {                                               \
        if (!gpu) return INVALID_ARGUMENT;             \
        ENTER(gpu->index);                             \
    } while (0)

static int copy(char *to, unsigned size, const char *from) {
    if (!to) return INVALID_ARGUMENT;
    if (strlen(from) >= size) return INSUFFICIENT_SIZE;
    strcpy(to, from);
    return OK;
}

/* --- library and devices ------------------------------------------------------------------------ */

EXPORT int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int refused = enter(__func__, ALL, 0);
    if (refused) return refused;
    initialized++;
    return leave(OK);
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    ENTER(ALL);
    initialized--;
    return leave(OK);
}

EXPORT const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    ENTER(ALL);
    return leave(copy(version, size, driver));
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *answer) {
    ENTER(ALL);
    *answer = (unsigned)count;
    return leave(OK);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **answer) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    ENTER((int)index);
    if ((int)index >= count) return leave(INVALID_ARGUMENT);
    *answer = &gpus[index];
    return leave(OK);
}

EXPORT int nvmlDeviceGetIndex(Gpu *gpu, unsigned *answer) {
    ENTER_GPU;
    *answer = (unsigned)gpu->index;
    return leave(OK);
}

EXPORT int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned size) {
    ENTER_GPU;
    return leave(copy(uuid, size, gpu->uuid));
}

EXPORT int nvmlDeviceGetName(Gpu *gpu, char *name, unsigned size) {
    ENTER_GPU;
    return leave(copy(name, size, gpu->name));
}

typedef struct {
    char short_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;

EXPORT int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci) {
    ENTER_GPU;
    memset(pci, 0, sizeof *pci);
    pci->domain = gpu->domain;
    pci->bus = gpu->bus;
    pci->device = gpu->device;
    pci->device_id = 0x233010de;
    snprintf(pci->short_id, sizeof pci->short_id, "%04X:%02X:%02X.0", gpu->domain & 0xffff, gpu->bus & 0xff,
             gpu->device & 0xff);
    snprintf(pci->id, sizeof pci->id, "%08X:%02X:%02X.0", gpu->domain, gpu->bus, gpu->device);
    return leave(OK);
}

/* --- health ------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetTemperature(Gpu *gpu, int sensor, unsigned *answer) {
    (void)sensor;
    ENTER_GPU;
    *answer = (unsigned)gpu->temperature;
    return leave(OK);
}

EXPORT int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int type, int counter, unsigned long long *answer) {
    ENTER_GPU;
    *answer = type == 1 && counter == 0 ? (unsigned long long)gpu->ecc : 0;
    return leave(OK);
}

EXPORT int nvmlDeviceGetNvLinkState(Gpu *gpu, unsigned link, unsigned *answer) {
    ENTER_GPU;
    if (!gpu->links) return leave(NOT_SUPPORTED);
    if (link >= (unsigned)gpu->links) return leave(INVALID_ARGUMENT);
    *answer = !(gpu->links_down >> link & 1);
    return leave(OK);
}

typedef struct {
    unsigned id, scope;
    long long at, took;
    unsigned type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
} FieldValue;

EXPORT int nvmlDeviceGetFieldValues(Gpu *gpu, int wanted, FieldValue *values) {
    ENTER_GPU;
    for (int i = 0; i < wanted; i++) {
        values[i].code = NOT_SUPPORTED;
        for (int k = 0; k < FIELDS; k++) {
            const Field *field = &gpu->fields[k];
            if (field->id != values[i].id || !field->known) continue;
            values[i].code = OK;
            values[i].type = 1; /* unsigned int */
            values[i].value.ull = 0;
            values[i].value.u = (unsigned)field->value;
        }
    }
    return leave(OK);
}

EXPORT int nvmlDeviceGetRetiredPagesPendingStatus(Gpu *gpu, unsigned *pending) {
    ENTER_GPU;
    if (gpu->pages_pending < 0) return leave(NOT_SUPPORTED);
    *pending = (unsigned)gpu->pages_pending;
    return leave(OK);
}

#ifndef FAKE_OLD /* a library of the driver 440 lacks what follows */

EXPORT int nvmlDeviceGetRemappedRows(Gpu *gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                                     unsigned *failed) {
    ENTER_GPU;
    *correctable = *uncorrectable = 0;
    *pending = (unsigned)gpu->pending;
    *failed = (unsigned)gpu->failed;
    return leave(OK);
}

typedef struct {
    unsigned version;
    unsigned long long counts[11];
    unsigned exceeded;
} Sram;

EXPORT int nvmlDeviceGetSramEccErrorStatus(Gpu *gpu, Sram *sram) {
    ENTER_GPU;
    if (sram->version != (0x1000000u | (unsigned)sizeof *sram)) return leave(VERSION_MISMATCH);
    memset(sram->counts, 0, sizeof sram->counts);
    sram->exceeded = (unsigned)gpu->sram;
    return leave(OK);
}

typedef struct { unsigned version; int sensor, temperature; } Temperature;

EXPORT int nvmlDeviceGetTemperatureV(Gpu *gpu, Temperature *temperature) {
    ENTER_GPU;
    if (temperature->version != (0x1000000u | (unsigned)sizeof *temperature)) return leave(VERSION_MISMATCH);
    temperature->temperature = gpu->temperature;
    return leave(OK);
}

#endif

/* --- events ------------------------------------------------------------------------------------- */

EXPORT int nvmlDeviceGetSupportedEventTypes(Gpu *gpu, unsigned long long *answer) {
    ENTER_GPU;
    *answer = gpu->events;
    return leave(OK);
}

EXPORT int nvmlEventSetCreate(Set **answer) {
    ENTER(ALL);
    for (int i = 0; i < SETS; i++) {
        if (sets[i].used) continue;
        memset(&sets[i], 0, sizeof sets[i]);
        sets[i].used = 1;
        *answer = &sets[i];
        return leave(OK);
    }
    return leave(UNKNOWN);
}

EXPORT int nvmlDeviceRegisterEvents(Gpu *gpu, unsigned long long types, Set *set) {
    ENTER_GPU;
    if (types & ~gpu->events) return leave(NOT_SUPPORTED);
    set->wanted[gpu->index] |= types;
    return leave(OK);
}

EXPORT int nvmlEventSetFree(Set *set) {
    ENTER(ALL);
    set->used = 0;
    return leave(OK);
}

typedef struct {
    Gpu *gpu;
    unsigned long long type, data;
    unsigned gi, ci;
} EventData;

EXPORT int nvmlEventSetWait_v2(Set *set, EventData *data, unsigned timeout_ms) {
    char path[PATH_MAX];
    long until = now_ms() + timeout_ms;
    ENTER(ALL);
    leave(OK);
    struct pollfd waiting = {.fd = -1, .events = POLLIN};
    int code;
    for (;;) {
        pthread_mutex_lock(&lock);
        catch_up();
        if (set->count) {
            Event event = set->queue[set->first];
            set->first = (set->first + 1) % QUEUE;
            set->count--;
            *data = (EventData){event.gpu, event.type, event.data, event.gi, event.ci};
            if (event.type != XID) data->gi = data->ci = (unsigned)NO_INSTANCE;
            code = leave(OK);
            break;
        }
        pthread_mutex_unlock(&lock);
        if (waiting.fd < 0) { /* only now: closing it takes the kernel 10 ms */
            waiting.fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
            if (path_of("commands", path)) inotify_add_watch(waiting.fd, path, IN_MODIFY);
            continue; /* something may have come in between */
        }
        long left = until - now_ms();
        if (left <= 0) {
            code = TIMEOUT;
            break;
        }
        if (poll(&waiting, 1, (int)left) > 0) {
            char drop[4096];
            while (read(waiting.fd, drop, sizeof drop) > 0) {}
        }
    }
    if (waiting.fd >= 0) close(waiting.fd);
    return code;
}
