"""This Python without the names that Python on Windows lacks. Import this module before ckptconv.

The names are those that ``os`` and ``signal`` of CPython 3.11 contain on Linux but not on Windows. Some modules of the
standard library need them on Linux and are imported first. torch must also be imported first.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile

NEEDS_THEM = (multiprocessing.connection, subprocess, tempfile)
MODULES = "crypt fcntl grp nis posix pty pwd readline resource spwd syslog termios tty"
NAMES = {
    os: """
        CLD_CONTINUED CLD_DUMPED CLD_EXITED CLD_KILLED CLD_STOPPED CLD_TRAPPED EFD_CLOEXEC EFD_NONBLOCK EFD_SEMAPHORE
        EX_CANTCREAT EX_CONFIG EX_DATAERR EX_IOERR EX_NOHOST EX_NOINPUT EX_NOPERM EX_NOUSER EX_OSERR EX_OSFILE
        EX_PROTOCOL EX_SOFTWARE EX_TEMPFAIL EX_UNAVAILABLE EX_USAGE F_LOCK F_TEST F_TLOCK F_ULOCK GRND_NONBLOCK
        GRND_RANDOM MFD_ALLOW_SEALING MFD_CLOEXEC MFD_HUGETLB MFD_HUGE_16GB MFD_HUGE_16MB MFD_HUGE_1GB MFD_HUGE_1MB
        MFD_HUGE_256MB MFD_HUGE_2GB MFD_HUGE_2MB MFD_HUGE_32MB MFD_HUGE_512KB MFD_HUGE_512MB MFD_HUGE_64KB MFD_HUGE_8MB
        MFD_HUGE_MASK MFD_HUGE_SHIFT NGROUPS_MAX O_ACCMODE O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_FSYNC
        O_LARGEFILE O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_RSYNC O_SYNC O_TMPFILE
        POSIX_FADV_DONTNEED POSIX_FADV_NOREUSE POSIX_FADV_NORMAL POSIX_FADV_RANDOM POSIX_FADV_SEQUENTIAL
        POSIX_FADV_WILLNEED POSIX_SPAWN_CLOSE POSIX_SPAWN_DUP2 POSIX_SPAWN_OPEN PRIO_PGRP PRIO_PROCESS PRIO_USER P_ALL
        P_PGID P_PID P_PIDFD RTLD_DEEPBIND RTLD_GLOBAL RTLD_LAZY RTLD_LOCAL RTLD_NODELETE RTLD_NOLOAD RTLD_NOW
        RWF_APPEND RWF_DSYNC RWF_HIPRI RWF_NOWAIT RWF_SYNC SCHED_BATCH SCHED_FIFO SCHED_IDLE SCHED_OTHER
        SCHED_RESET_ON_FORK SCHED_RR SEEK_DATA SEEK_HOLE SPLICE_F_MORE SPLICE_F_MOVE SPLICE_F_NONBLOCK ST_APPEND
        ST_MANDLOCK ST_NOATIME ST_NODEV ST_NODIRATIME ST_NOEXEC ST_NOSUID ST_RDONLY ST_RELATIME ST_SYNCHRONOUS ST_WRITE
        WCONTINUED WCOREDUMP WEXITED WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WNOWAIT WSTOPPED
        WSTOPSIG WTERMSIG WUNTRACED XATTR_CREATE XATTR_REPLACE XATTR_SIZE_MAX chown chroot confstr confstr_names
        copy_file_range ctermid environb eventfd eventfd_read eventfd_write fchdir fchmod fchown fdatasync fork forkpty
        fpathconf fstatvfs fwalk get_blocking getegid getenvb geteuid getgid getgrouplist getgroups getloadavg getpgid
        getpgrp getpriority getrandom getresgid getresuid getsid getuid getxattr initgroups killpg lchown listxattr
        lockf login_tty major makedev memfd_create minor mkfifo mknod nice openpty pathconf pathconf_names pidfd_open
        pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread preadv pwrite pwritev readv register_at_fork
        removexattr sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler
        sched_param sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler sched_yield sendfile
        set_blocking setegid seteuid setgid setgroups setpgid setpgrp setpriority setregid setresgid setresuid setreuid
        setsid setuid setxattr spawnlp spawnlpe spawnvp spawnvpe splice statvfs sync sysconf sysconf_names tcgetpgrp
        tcsetpgrp ttyname uname wait wait3 wait4 waitid waitid_result writev""",
    signal: """
        ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL ItimerError SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGHUP SIGIO SIGIOT
        SIGKILL SIGPIPE SIGPOLL SIGPROF SIGPWR SIGQUIT SIGRTMAX SIGRTMIN SIGSTKFLT SIGSTOP SIGSYS SIGTRAP SIGTSTP
        SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK
        Sigmasks alarm getitimer pause pidfd_send_signal pthread_kill pthread_sigmask setitimer siginterrupt sigpending
        sigtimedwait sigwait sigwaitinfo struct_siginfo""",
}

sys.modules |= dict.fromkeys(MODULES.split())  # type: ignore[arg-type]  # their import raises ImportError
for _module, _names in NAMES.items():
    for _name in _names.split():
        if hasattr(_module, _name):  # some names exist only in newer versions
            delattr(_module, _name)
