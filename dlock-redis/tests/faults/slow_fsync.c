/* Preloaded into a server, a disk that takes its time: no fdatasync ends while the file that SLOW_FSYNC names is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

int fdatasync(int fd) {
  int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
  while (access(getenv("SLOW_FSYNC"), F_OK) == 0) usleep(1000);
  return real(fd);
}
