/* A disk that loses power: preloaded into a store, it takes back what no sync covered and ends the process.
 *
 *   LOSSY_DIR    the directory it watches; nothing else is touched
 *   LOSSY_SIDE   a directory of the same file system, outside of LOSSY_DIR: unlinked files wait here
 *   LOSSY_AT     n: the power goes just before the nth change of a watched file or directory (0: never)
 *   LOSSY_KEEP   a seed: of what no sync covered some stays, torn or as zeros, as disks may do; 0: nothing stays
 *   LOSSY_LIE    1: syncs do nothing, so what was synced goes too (the control run: it has to be noticed)
 *   SIGUSR2      the power goes at the next change, or LOSSY_AFTER changes later
 *
 * The model is POSIX at its strictest. fsync and fdatasync of a file cover its bytes and its length, O_SYNC and O_DSYNC every
 * write; a name that was made, renamed or removed lasts once its directory was synced, and not before. sync_file_range covers
 * nothing: it writes neither the length nor the disk's own cache. A watched file that is mapped for shared writing ends
 * the process with 99, since such writes cannot be seen. What was there when the process started lasts.
 *
 * Of a file it keeps the length that lasts, and the former bytes of what was overwritten below it; of directories a journal
 * of changes, undone from the last to the first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define EXIT_POWER 137
#define EXIT_UNSEEN 99
#define MAX_FDS 65536

/* System calls, so that nothing of this file comes back to it. */
static int sys_open(const char *path, int flags, int mode) { return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode); }
static ssize_t sys_pwrite(int fd, const void *data, size_t size, off_t at) { return syscall(SYS_pwrite64, fd, data, size, at); }
static ssize_t sys_write(int fd, const void *data, size_t size) { return syscall(SYS_write, fd, data, size); }
static int sys_truncate(int fd, off_t size) { return (int)syscall(SYS_ftruncate, fd, size); }
static int sys_close(int fd) { return (int)syscall(SYS_close, fd); }
static int sys_rename(const char *from, const char *to) { return (int)syscall(SYS_rename, from, to); }
static int sys_unlink(const char *path) { return (int)syscall(SYS_unlink, path); }
static int sys_link(const char *from, const char *to) { return (int)syscall(SYS_link, from, to); }

struct undo { off_t at; size_t size; struct undo *before; char data[]; };
struct file { dev_t device; ino_t inode; int fd; off_t lasting; int dirty; struct undo *undo; struct file *next; };
struct open_file { struct file *file; int append, synced; };
enum change { MADE, REMOVED, RENAMED, MADE_DIR, REMOVED_DIR };
struct entry { enum change what; int lasts; char *path, *to, *saved; mode_t mode; struct entry *before; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct open_file fds[MAX_FDS];
static struct file *files;
static struct entry *entries;
static char root[PATH_MAX], side[PATH_MAX];
static size_t root_size;
static long at_change, after, changes, saves;
static uint64_t keep;
static int lie;
static volatile sig_atomic_t power_goes;

static void on_signal(int number) { (void)number; power_goes = 1; }

static void die(const char *why) {
    dprintf(2, "{\"event\": \"lossy_disk\", \"error\": \"%s\", \"errno\": %d}\n", why, errno);
    _exit(EXIT_UNSEEN);
}

__attribute__((constructor)) static void start(void) {
    const char *dir = getenv("LOSSY_DIR"), *aside = getenv("LOSSY_SIDE"), *value;
    if (!dir || !aside || !realpath(dir, root) || !realpath(aside, side)) { root_size = 0; return; }
    root_size = strlen(root);
    at_change = (value = getenv("LOSSY_AT")) ? atol(value) : 0;
    after = (value = getenv("LOSSY_AFTER")) ? atol(value) : 0;
    keep = (value = getenv("LOSSY_KEEP")) ? strtoull(value, NULL, 10) : 0;
    lie = (value = getenv("LOSSY_LIE")) ? atoi(value) : 0;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGUSR2, &action, NULL);
}

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = (keep += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* -- where things are ------------------------------------------------------------------------------------- */

/* The absolute path without links of what `path` names, or 0 if it is not watched. The last part need not exist. */
static int watched(int dirfd, const char *path, char *out) {
    char joined[PATH_MAX], parent[PATH_MAX], here[64];
    if (!root_size || !path) return 0;
    if (path[0] == '/' || dirfd == AT_FDCWD) snprintf(joined, sizeof joined, "%s", path);
    else {
        snprintf(here, sizeof here, "/proc/self/fd/%d", dirfd);
        ssize_t n = readlink(here, parent, sizeof parent - 1);
        if (n < 0) return 0;
        parent[n] = 0;
        if ((size_t)snprintf(joined, sizeof joined, "%s/%s", parent, path) >= sizeof joined) return 0;
    }
    size_t n = strlen(joined);
    while (n > 1 && joined[n - 1] == '/') joined[--n] = 0;
    char *slash = strrchr(joined, '/');
    const char *name = slash ? slash + 1 : joined;
    if (!slash) { if (!realpath(".", parent)) return 0; }
    else if (slash == joined) snprintf(parent, sizeof parent, "/");
    else { *slash = 0; if (!realpath(joined, parent)) return 0; }
    if ((size_t)snprintf(out, PATH_MAX, "%s/%s", parent, name) >= PATH_MAX) return 0;
    return !strncmp(out, root, root_size) && (out[root_size] == '/' || !out[root_size]);
}

static int in_dir(const char *path, const char *dir) {
    const char *slash = strrchr(path, '/');
    return slash && (size_t)(slash - path) == strlen(dir) && !strncmp(path, dir, (size_t)(slash - path));
}

static struct file *find_file(int fd, int created) {
    struct stat st;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) return NULL;
    for (struct file *f = files; f; f = f->next)
        if (f->device == st.st_dev && f->inode == st.st_ino) return f;
    struct file *f = calloc(1, sizeof *f);
    char self[64];
    snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
    f->device = st.st_dev;
    f->inode = st.st_ino;
    f->lasting = created ? 0 : st.st_size;
    /* Never closed: that would free the locks of this process on the file, and the inode's number for another. */
    f->fd = sys_open(self, O_RDWR | O_CLOEXEC, 0);
    if (f->fd < 0) die("cannot keep a file open");
    f->next = files;
    return files = f;
}

/* -- losing power ------------------------------------------------------------------------------------------ */

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *ftw) {
    (void)st; (void)ftw;
    return kind == FTW_DP ? (int)syscall(SYS_rmdir, path) : sys_unlink(path);
}

static void take_back(struct file *f) {
    struct stat st;
    if (!f->dirty || fstat(f->fd, &st)) return;
    int how = keep ? (int)(draw() % 4) : 0; /* 0, 1: all goes; 2: the end is torn off; 3: the end is zeros */
    off_t grown = st.st_size - f->lasting;
    if (how < 2 || !(draw() & 1)) { /* what was overwritten: old or new */
        if (sys_truncate(f->fd, grown > 0 && how >= 2 ? st.st_size : f->lasting)) die("cannot truncate");
        for (struct undo *u = f->undo; u; u = u->before)
            if (sys_pwrite(f->fd, u->data, u->size, u->at) != (ssize_t)u->size) die("cannot write back");
    }
    if (how >= 2 && grown > 0) {
        off_t torn = f->lasting + (off_t)(draw() % (uint64_t)(grown + 1));
        if (sys_truncate(f->fd, torn)) die("cannot truncate");
        if (how == 3 && sys_truncate(f->fd, st.st_size)) die("cannot extend");
    }
}

static void lose_power(void) {
    for (struct file *f = files; f; f = f->next) take_back(f);
    for (struct entry *e = entries; e; e = e->before) {
        if (e->lasts) continue;
        switch (e->what) {
        case MADE: sys_unlink(e->path); break;
        case REMOVED: if (sys_link(e->saved, e->path)) die("cannot bring a file back"); break;
        case RENAMED:
            if (sys_rename(e->to, e->path)) die("cannot rename back");
            if (e->saved && sys_link(e->saved, e->to)) die("cannot bring a file back");
            break;
        case MADE_DIR: nftw(e->path, remove_one, 16, FTW_DEPTH | FTW_PHYS); break;
        case REMOVED_DIR: if (syscall(SYS_mkdir, e->path, 0700)) die("cannot bring a directory back"); break;
        }
    }
    dprintf(2, "{\"event\": \"lossy_disk\", \"changes\": %ld}\n", changes);
    _exit(EXIT_POWER);
}

static void change(void) {
    changes++;
    if (power_goes) { power_goes = 0; at_change = changes + after; }
    if (changes == at_change) lose_power();
}

/* -- what lasts -------------------------------------------------------------------------------------------- */

static void file_lasts(struct file *f) {
    struct stat st;
    if (lie || fstat(f->fd, &st)) return;
    f->lasting = st.st_size;
    f->dirty = 0;
    while (f->undo) { struct undo *u = f->undo; f->undo = u->before; free(u); }
}

/* A rename lasts: what happened before within a directory of that name, and does not last yet, is undone under the new name. */
static void move_paths(struct entry *before, const char *from, const char *to) {
    size_t n = strlen(from);
    for (struct entry *e = before; e; e = e->before)
        for (int which = 0; which < 2; which++) {
            char **path = which ? &e->to : &e->path;
            if (e->lasts || !*path || strncmp(*path, from, n) || (*path)[n] != '/') continue;
            char *moved;
            if (asprintf(&moved, "%s%s", to, *path + n) < 0) die("no memory");
            free(*path);
            *path = moved;
        }
}

static void directory_lasts(const char *path) {
    if (lie) return;
    for (struct entry *e = entries; e; e = e->before)
        if (!e->lasts && in_dir(e->what == RENAMED ? e->to : e->path, path)) {
            e->lasts = 1;
            if (e->what == RENAMED) move_paths(e->before, e->path, e->to);
        }
    struct entry **at = &entries;
    while (*at) {
        struct entry *e = *at;
        if (!e->lasts) { at = &e->before; continue; }
        *at = e->before;
        if (e->saved) { sys_unlink(e->saved); free(e->saved); }
        free(e->path); free(e->to); free(e);
    }
}

static void note(enum change what, const char *path, const char *to, char *saved) {
    struct entry *e = calloc(1, sizeof *e);
    e->what = what;
    e->path = strdup(path);
    e->to = to ? strdup(to) : NULL;
    e->saved = saved;
    e->before = entries;
    entries = e;
}

/* Link a file aside, so that its name can come back. */
static char *save(const char *path) {
    char *saved;
    struct stat st;
    if (lstat(path, &st) || S_ISDIR(st.st_mode)) return NULL;
    if (asprintf(&saved, "%s/%d-%ld", side, (int)getpid(), ++saves) < 0) die("no memory");
    if (sys_link(path, saved)) die("cannot link aside");
    return saved;
}

/* Keep the bytes from `at` on that last and are about to be overwritten. */
static void keep_bytes(struct file *f, off_t at, off_t size) {
    off_t end = at + size < f->lasting ? at + size : f->lasting;
    f->dirty = 1;
    if (at >= end) return;
    struct undo *u = malloc(sizeof *u + (size_t)(end - at));
    if (!u) die("no memory");
    u->at = at;
    ssize_t got = pread(f->fd, u->data, (size_t)(end - at), at);
    u->size = got > 0 ? (size_t)got : 0;
    u->before = f->undo;
    f->undo = u;
}

/* -- files ------------------------------------------------------------------------------------------------- */

static struct open_file *known(int fd) {
    return root_size && fd >= 0 && fd < MAX_FDS && fds[fd].file ? &fds[fd] : NULL;
}

static off_t place_of_write(int fd, struct open_file *o) {
    struct stat st;
    if (!o->append) return lseek(fd, 0, SEEK_CUR);
    return fstat(fd, &st) ? 0 : st.st_size;
}

#define WRITES(fd, AT, SIZE, CALL)                                                                                     \
    struct open_file *o = known(fd);                                                                                   \
    if (!o) return CALL;                                                                                               \
    pthread_mutex_lock(&lock);                                                                                         \
    change();                                                                                                          \
    keep_bytes(o->file, AT, (off_t)(SIZE));                                                                            \
    ssize_t done = CALL;                                                                                               \
    int error = errno;                                                                                                 \
    if (o->synced) file_lasts(o->file);                                                                                \
    pthread_mutex_unlock(&lock);                                                                                       \
    errno = error;                                                                                                     \
    return done;

ssize_t write(int fd, const void *data, size_t size) { WRITES(fd, place_of_write(fd, o), size, sys_write(fd, data, size)) }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { WRITES(fd, at, size, sys_pwrite(fd, data, size, at)) }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { WRITES(fd, at, size, sys_pwrite(fd, data, size, at)) }

static size_t total(const struct iovec *parts, int count) {
    size_t sum = 0;
    for (int i = 0; i < count; i++) sum += parts[i].iov_len;
    return sum;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    WRITES(fd, place_of_write(fd, o), total(parts, count), syscall(SYS_writev, fd, parts, count))
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    WRITES(fd, at, total(parts, count), syscall(SYS_pwritev, fd, parts, count, (long)at, 0L))
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) {
    WRITES(fd, at, total(parts, count), syscall(SYS_pwritev, fd, parts, count, (long)at, 0L))
}

static ssize_t truncate_open(int fd, off_t size) { WRITES(fd, size, (off_t)1 << 40, sys_truncate(fd, size)) }
int ftruncate(int fd, off_t size) { return (int)truncate_open(fd, size); }
int ftruncate64(int fd, off_t size) { return (int)truncate_open(fd, size); }
static ssize_t allocate(int fd, int mode, off_t at, off_t size) {
    /* Only what changes bytes below the end that lasts is of interest: holes and zeros. */
    WRITES(fd, at, mode & ~FALLOC_FL_KEEP_SIZE ? size : 0, syscall(SYS_fallocate, fd, mode, at, size))
}
int fallocate(int fd, int mode, off_t at, off_t size) { return (int)allocate(fd, mode, at, size); }
int fallocate64(int fd, int mode, off_t at, off_t size) { return (int)allocate(fd, mode, at, size); }

static int sync_fd(int fd, int number) {
    struct open_file *o = known(fd);
    char self[64], path[PATH_MAX];
    struct stat st;
    if (!o && (!root_size || fstat(fd, &st) || !S_ISDIR(st.st_mode))) return (int)syscall(number, fd);
    pthread_mutex_lock(&lock);
    change();
    int done = 0; /* the real disk need not be waited for */
    if (o) file_lasts(o->file);
    else {
        snprintf(self, sizeof self, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(self, path, sizeof path - 1);
        if (n > 0) { path[n] = 0; directory_lasts(path); }
    }
    pthread_mutex_unlock(&lock);
    return done;
}
int fsync(int fd) { return sync_fd(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_fd(fd, SYS_fdatasync); }

static int open_at(int dirfd, const char *name, int flags, int mode) {
    char path[PATH_MAX];
    if (!(flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) || !watched(dirfd, name, path)) {
        int fd = (int)syscall(SYS_openat, dirfd, name, flags, mode);
        if (root_size && fd >= 0 && fd < MAX_FDS) fds[fd].file = NULL;
        return fd;
    }
    pthread_mutex_lock(&lock);
    struct stat st;
    int is_new = lstat(path, &st) != 0;
    if (is_new || flags & O_TRUNC) change();
    if (!is_new && flags & O_TRUNC) {
        int now = sys_open(path, O_RDWR | O_CLOEXEC, 0);
        if (now >= 0) {
            struct file *f = find_file(now, 0);
            if (f) keep_bytes(f, 0, (off_t)1 << 40);
            sys_close(now);
        }
    }
    int fd = (int)syscall(SYS_openat, dirfd, name, flags, mode);
    int error = errno;
    if (fd >= 0 && fd < MAX_FDS) {
        if (is_new) note(MADE, path, NULL, NULL);
        /* RocksDB's lock would go with any other descriptor of its file, and nothing is written there. */
        const char *last = strrchr(path, '/');
        fds[fd].file = last && !strcmp(last, "/LOCK") ? NULL : find_file(fd, is_new);
        fds[fd].append = (flags & O_APPEND) != 0;
        fds[fd].synced = (flags & O_DSYNC) != 0;
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

#define MODE(last)                                                                                                     \
    int mode = 0;                                                                                                      \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, last); mode = va_arg(rest, int); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, path, flags, mode); }
int openat(int dirfd, const char *path, int flags, ...) { MODE(flags) return open_at(dirfd, path, flags, mode); }
int openat64(int dirfd, const char *path, int flags, ...) { MODE(flags) return open_at(dirfd, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, (int)mode); }
int creat64(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, (int)mode); }

int close(int fd) {
    if (root_size && fd >= 0 && fd < MAX_FDS) fds[fd].file = NULL;
    return sys_close(fd);
}

/* It closes by itself, and the number goes to another. */
int fclose(FILE *stream) {
    static int (*real)(FILE *);
    int fd = fileno(stream);
    if (root_size && fd >= 0 && fd < MAX_FDS) fds[fd].file = NULL;
    if (!real) real = (int (*)(FILE *))dlsym(RTLD_NEXT, "fclose");
    return real(stream);
}

static void *map(void *at, size_t size, int access, int flags, int fd, off_t from) {
    if (known(fd) && access & PROT_WRITE && flags & MAP_SHARED) die("a file is mapped for writing");
    return (void *)syscall(SYS_mmap, at, size, access, flags, fd, from);
}
void *mmap(void *at, size_t size, int access, int flags, int fd, off_t from) { return map(at, size, access, flags, fd, from); }
void *mmap64(void *at, size_t size, int access, int flags, int fd, off_t from) { return map(at, size, access, flags, fd, from); }

/* -- names ------------------------------------------------------------------------------------------------- */

#define CHANGES(CALL, NOTE, BEFORE)                                                                                    \
    pthread_mutex_lock(&lock);                                                                                         \
    change();                                                                                                          \
    BEFORE;                                                                                                            \
    int done = (int)CALL;                                                                                              \
    int error = errno;                                                                                                 \
    if (!done) NOTE;                                                                                                   \
    pthread_mutex_unlock(&lock);                                                                                       \
    errno = error;                                                                                                     \
    return done;

static int unlink_at(int dirfd, const char *name, int flags) {
    char path[PATH_MAX];
    if (!watched(dirfd, name, path)) return (int)syscall(SYS_unlinkat, dirfd, name, flags);
    char *saved = NULL;
    if (flags & AT_REMOVEDIR) { CHANGES(syscall(SYS_unlinkat, dirfd, name, flags), note(REMOVED_DIR, path, NULL, NULL), (void)0) }
    CHANGES(syscall(SYS_unlinkat, dirfd, name, flags), note(REMOVED, path, NULL, saved), saved = save(path))
}
int unlink(const char *path) { return unlink_at(AT_FDCWD, path, 0); }
int unlinkat(int dirfd, const char *path, int flags) { return unlink_at(dirfd, path, flags); }
int rmdir(const char *path) { return unlink_at(AT_FDCWD, path, AT_REMOVEDIR); }

static int rename_at(int from_fd, const char *from, int to_fd, const char *to) {
    char path[PATH_MAX], target[PATH_MAX];
    if (!watched(from_fd, from, path) || !watched(to_fd, to, target))
        return (int)syscall(SYS_renameat, from_fd, from, to_fd, to);
    char *saved = NULL;
    CHANGES(syscall(SYS_renameat, from_fd, from, to_fd, to), note(RENAMED, path, target, saved), saved = save(target))
}
int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to); }
int renameat(int from_fd, const char *from, int to_fd, const char *to) { return rename_at(from_fd, from, to_fd, to); }

static int mkdir_at(int dirfd, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!watched(dirfd, name, path)) return (int)syscall(SYS_mkdirat, dirfd, name, mode);
    CHANGES(syscall(SYS_mkdirat, dirfd, name, mode), note(MADE_DIR, path, NULL, NULL), (void)0)
}
int mkdir(const char *path, mode_t mode) { return mkdir_at(AT_FDCWD, path, mode); }
int mkdirat(int dirfd, const char *path, mode_t mode) { return mkdir_at(dirfd, path, mode); }

int link(const char *from, const char *to) {
    char path[PATH_MAX];
    if (!watched(AT_FDCWD, to, path)) return sys_link(from, to);
    CHANGES(sys_link(from, to), note(MADE, path, NULL, NULL), (void)0)
}
