/* SIGKILL at a chosen call on a chosen file: preloaded into the ranks, which know nothing of it.
 *
 * TEST_KILL is "CALL:PATH", PATH with the wildcards of a shell.  `open`: before the file is made.  `write`: after half
 * of the first bytes.  `rename`: before it.  `fsync`: before it.  Threads and processes that a rank has started count too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

static int wanted(const char *call, const char *path)
{
    const char *kill_at = getenv("TEST_KILL");
    size_t length = strlen(call);
    return kill_at && path && !strncmp(kill_at, call, length) && kill_at[length] == ':' && !fnmatch(kill_at + length + 1, path, 0);
}

static void die(void)
{
    killpg(getpgrp(), SIGKILL);
    pause();
}

static int of(const char *call, int fd)
{
    char link[64], path[4096];
    if (!getenv("TEST_KILL"))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return wanted(call, path);
}

#define NEXT(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))
#define OPENS(path, flags) if (((flags) & O_CREAT) && wanted("open", path)) die()
#define MODE(flags, mode) mode_t mode = 0; if ((flags) & O_CREAT) { va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); }

int open(const char *path, int flags, ...) { MODE(flags, mode) OPENS(path, flags); return NEXT(open)(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, mode) OPENS(path, flags); return NEXT(open64)(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, mode) OPENS(path, flags); return NEXT(openat)(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, mode) OPENS(path, flags); return NEXT(openat64)(at, path, flags, mode); }
FILE *fopen(const char *path, const char *mode) { if (mode[0] != 'r' && wanted("open", path)) die(); return NEXT(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { if (mode[0] != 'r' && wanted("open", path)) die(); return NEXT(fopen64)(path, mode); }

ssize_t write(int fd, const void *data, size_t count)
{
    if (of("write", fd)) {
        NEXT(write)(fd, data, count / 2);
        die();
    }
    return NEXT(write)(fd, data, count);
}

ssize_t writev(int fd, const struct iovec *parts, int count)
{
    if (of("write", fd)) {
        NEXT(writev)(fd, parts, 1);
        die();
    }
    return NEXT(writev)(fd, parts, count);
}

ssize_t sendfile(int out, int in, off_t *offset, size_t count)
{
    if (of("write", out)) {
        NEXT(sendfile)(out, in, offset, 4096);
        die();
    }
    return NEXT(sendfile)(out, in, offset, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count)
{
    if (of("write", out)) {
        NEXT(sendfile64)(out, in, offset, 4096);
        die();
    }
    return NEXT(sendfile64)(out, in, offset, count);
}

int fsync(int fd) { if (of("fsync", fd)) die(); return NEXT(fsync)(fd); }
int rename(const char *from, const char *to) { if (wanted("rename", from)) die(); return NEXT(rename)(from, to); }
