/* Tells on stdout which mode the file of a Unix socket has when the socket is bound, and when it begins to listen. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static void tell(int fd, const char *what)
{
    struct sockaddr_un name = {0};
    socklen_t size = sizeof(name) - 1;
    struct stat found;
    if (!getsockname(fd, (struct sockaddr *)&name, &size) && name.sun_family == AF_UNIX && !stat(name.sun_path, &found))
        dprintf(1, "%s %s %o\n", name.sun_path, what, found.st_mode & 07777);
}

int bind(int fd, const struct sockaddr *name, socklen_t size)
{
    int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    int done = next(fd, name, size);
    if (!done)
        tell(fd, "bound");
    return done;
}

int listen(int fd, int backlog)
{
    int (*next)(int, int) = dlsym(RTLD_NEXT, "listen");
    tell(fd, "listens");
    return next(fd, backlog);
}
