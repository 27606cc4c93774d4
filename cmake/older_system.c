/* What glibc has had since 2.29, for programs that run on older ones (scripts/older_system). Linked
 * in and hidden; nothing of it is in a build that is not told so. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* 2.32. A process with libtorch has threads. */
char __libc_single_threaded = 0;

/* 2.33: inline in the headers before. The kernel's structure is the C library's on x86-64. */
int fstatat(int folder, const char* path, struct stat* to, int flags) {
  return (int)syscall(SYS_newfstatat, folder, path, to, flags);
}
int stat(const char* path, struct stat* to) { return fstatat(AT_FDCWD, path, to, 0); }
int lstat(const char* path, struct stat* to) {
  return fstatat(AT_FDCWD, path, to, AT_SYMLINK_NOFOLLOW);
}
int fstat(int file, struct stat* to) { return (int)syscall(SYS_fstat, file, to); }

static struct timespec now(clockid_t clock) {
  struct timespec time;
  clock_gettime(clock, &time);
  return time;
}

/* 2.30: the system's own where it is there. Else the wait is until that time of the wall clock:
 * who waits compares the clock that it meant, and waits again. */
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* until) {
  typedef int wait_function(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static wait_function* own;
  wait_function* known = __atomic_load_n(&own, __ATOMIC_RELAXED);
  if (!known) {
    known = (wait_function*)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    __atomic_store_n(&own, known, __ATOMIC_RELAXED);
  }
  if (known) return known(condition, mutex, clock, until);
  const struct timespec here = now(clock), wall = now(CLOCK_REALTIME);
  struct timespec limit = {until->tv_sec - here.tv_sec + wall.tv_sec,
                           until->tv_nsec - here.tv_nsec + wall.tv_nsec};
  for (; limit.tv_nsec < 0; limit.tv_nsec += 1000000000) --limit.tv_sec;
  for (; limit.tv_nsec >= 1000000000; limit.tv_nsec -= 1000000000) ++limit.tv_sec;
  return pthread_cond_timedwait(condition, mutex, &limit);
}

/* 2.34: from then on the C library runs a program's constructors, before the program brought the
 * function that does. Only programs are linked with --wrap=__libc_start_main. */
typedef int main_function(int, char**, char**);
typedef void start_function(int, char**, char**);
extern start_function* const __init_array_start[] __attribute__((weak, visibility("hidden")));
extern start_function* const __init_array_end[] __attribute__((weak, visibility("hidden")));
extern int __real___libc_start_main(main_function*, int, char**, start_function*, void (*)(void),
                                    void (*)(void), void*) __attribute__((weak));

static void construct(int count, char** words, char** environment) {
  for (start_function* const* each = __init_array_start; each != __init_array_end; ++each)
    (*each)(count, words, environment);
}

int __wrap___libc_start_main(main_function* program, int count, char** words, start_function* init,
                             void (*fini)(void), void (*loader_fini)(void), void* stack) {
  return __real___libc_start_main(program, count, words, init ? init : construct, fini, loader_fini,
                                  stack);
}
