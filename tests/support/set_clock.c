/* A clock that somebody sets: preloaded into a process, its wall clock is off by what a file says. Time that passes is not touched.
 *
 *   SET_CLOCK    a file of 8 bytes: nanoseconds, signed, in the byte order of this host; it may be written while we run
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *ahead;

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("SET_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *shown = fd < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (shown == MAP_FAILED)
        _exit(98);
    close(fd);
    ahead = shown;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int done = (int)syscall(SYS_clock_gettime, clock, now);
    if (done == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) && ahead) {
        int64_t all = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + *ahead;
        now->tv_sec = all / 1000000000;
        now->tv_nsec = all % 1000000000;
    }
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out)
        *out = exact.tv_sec;
    return exact.tv_sec;
}
