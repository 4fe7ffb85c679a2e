// SPDX-License-Identifier: Apache-2.0
// To preload: the wall clock is ahead by so many seconds (int64) as the file
// $WALL_CLOCK_SHIFT says at that moment. Other clocks stay as they are.
//
// Who waits for a time of the wall clock does so in slices, and so notices, as in the
// kernel, that it was set meanwhile.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { kSliceNs = 50000000, kSecondNs = 1000000000 };

static volatile int64_t no_shift = 0;
static volatile int64_t *shift = &no_shift;

// Old versions of a symbol would come first for dlsym.
#define REAL(name, version)                                    \
  static typeof(&name) real = NULL;                            \
  if (real == NULL) real = dlvsym(RTLD_NEXT, #name, version);  \
  if (real == NULL) real = dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void read_shift(void) {
  const char *path = getenv("WALL_CLOCK_SHIFT");
  int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return;
  void *found = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, fd, 0);
  if (found != MAP_FAILED) shift = found;
  close(fd);
}

static int kernels_time(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime, "GLIBC_2.17");
  return real(clock, now);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int status = kernels_time(clock, now);
  int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
  if (status == 0 && is_wall) now->tv_sec += *shift;
  return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  REAL(gettimeofday, "GLIBC_2.2.5");
  int status = real(now, zone);
  if (status == 0) now->tv_sec += *shift;
  return status;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now != NULL) *now = found.tv_sec;
  return found.tv_sec;
}

static int is_before(const struct timespec *a, const struct timespec *b) {
  return a->tv_sec != b->tv_sec ? a->tv_sec < b->tv_sec : a->tv_nsec < b->tv_nsec;
}

// Machines have not been up for thirty years: this is no time of a monotonic clock.
static int is_wall_time(const struct timespec *deadline) {
  return deadline != NULL && deadline->tv_sec > kSecondNs;
}

static int is_past(const struct timespec *deadline) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return !is_before(&now, deadline);
}

// Returns until when to wait before the next look, in the kernel's time.
static struct timespec slice(const struct timespec *deadline) {
  struct timespec until = *deadline, look;
  until.tv_sec -= *shift;
  kernels_time(CLOCK_REALTIME, &look);
  look.tv_nsec += kSliceNs;
  look.tv_sec += look.tv_nsec / kSecondNs;
  look.tv_nsec %= kSecondNs;
  return is_before(&until, &look) ? until : look;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond,
                           pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  REAL(pthread_cond_timedwait, "GLIBC_2.3.2");
  if (!is_wall_time(deadline)) return real(cond, mutex, deadline);
  for (;;) {
    struct timespec until = slice(deadline);
    int status = real(cond, mutex, &until);
    if (status != ETIMEDOUT || is_past(deadline)) return status;
  }
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict deadline) {
  REAL(sem_timedwait, "GLIBC_2.34");
  for (;;) {
    struct timespec until = slice(deadline);
    int status = real(sem, &until);
    if (status == 0 || errno != ETIMEDOUT || is_past(deadline)) return status;
  }
}

// Abseil's locks, and so gRPC's, call the kernel's futex by its number.
long syscall(long number, ...) {
  REAL(syscall, "GLIBC_2.2.5");
  va_list list;
  long a[6];
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  const struct timespec *deadline = (const struct timespec *)a[3];
  if (number != SYS_futex || !((int)a[1] & FUTEX_CLOCK_REALTIME) ||
      !is_wall_time(deadline)) {
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  }
  for (;;) {
    struct timespec until = slice(deadline);
    long status = real(number, a[0], a[1], a[2], &until, a[4], a[5]);
    if (status == 0 || errno != ETIMEDOUT || is_past(deadline)) return status;
  }
}
