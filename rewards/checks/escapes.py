"""Programs that try to leave the sandbox, by the protection that each tries.

They are what `flowrl doctor --sandbox` runs on a user's own machine, where they may succeed. So
each has a ceiling, below which it harms no host: it lives for ESCAPE_SECONDS at most, starts at
most 40 processes, fills at most 256 MB of memory and 16 MB of files, and signals nobody unless it
finds itself in a space of its own. A program that gets out says so with `out(what)`; whether
something of it is alive, connected or written is for its caller to see.
"""

from dataclasses import dataclass
from string import Template

ESCAPE_SECONDS = 20  # that a program or a process of it lives if nobody ends it
PROTECTION_MEANINGS = {
    "end": "nothing of a program is alive once its verdict is there",
    "processes": "a bounded number of processes and threads",
    "memory": "bounded memory, of one process and of all together",
    "disk": "files and output of bounded size",
    "time": "a program that does not end is ended",
    "network": "no connection to anybody, on this machine or beyond",
    "files": "none of your files are read, nothing outside its own folder is written",
    "names": "no names and sizes of your files are seen",
    "variables": "no environment variable of the run is seen",
    "others": "processes outside are neither seen nor signalled",
    "privileges": "no capability, mount, namespace or further right",
    "calls": "system calls outside a list fail",
    "kernel": "few timers, and no objects of the kernel that outlive it",
    "verdict": "only the tests decide: a verdict is neither printed nor guessed",
}


@dataclass(frozen=True)
class Escape:
    """A program and what it tries.

    protection  a key of PROTECTION_MEANINGS
    code        a template: $mark, $word, $port, $socket, $secret, $target, $canary and $outer are
                filled in by `program_of`
    waits       whether it lasts until its time is over
    alone       whether it does nothing unless its space of processes is its own
    inside      whether it is about flowrl's own sandbox: another may permit it and still hold
    tests       Python tests of its function `f`, all of which must fail; none: it is a script
    seconds     its time: what it needs where nothing holds it, on a busy machine too
    """

    protection: str
    code: str
    waits: bool = False
    alone: bool = False
    inside: bool = False
    tests: tuple[str, ...] = ()
    seconds: float = 1.0


SETUP = """
import ctypes, os, resource, signal, socket, subprocess, sys, threading, time
END = time.time() + $seconds
def quietly(function, *given):
    try: return function(*given)
    except (OSError, ValueError, OverflowError, MemoryError) as error: return error
libc = quietly(ctypes.CDLL, None)
def linger():
    while time.time() < END: time.sleep(0.1)
    os._exit(0)
def leave(last=None):
    'A grandchild of its own session, without files, which ignores what it can.'
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if last: last()
            linger()
        os._exit(0)
def out(what): print('$word', what, flush=True)
def alone():
    try: os.kill($outer, 0)
    except ProcessLookupError: return True
    except OSError: pass
    return False
def call(number, *given): return libc.syscall(number, *given)
X86 = os.uname().machine == 'x86_64'
"""
ENDING_ESCAPES = {
    "a session of its own": Escape("end", """
if os.fork() == 0:
    os.setsid()
    linger()
"""),
    "a session of the program's own": Escape("end", """
quietly(os.setsid)
os.fork() or linger()
"""),
    "two forks": Escape("end", "leave()"),
    "no death signal": Escape("end", """
libc.prctl(1, 0, 0, 0, 0)
leave(lambda: libc.prctl(1, 0, 0, 0, 0))
"""),
    "another user": Escape("end", """
uid = os.getuid()
quietly(os.setresuid, uid, uid, uid)
leave(lambda: quietly(os.setresuid, uid, uid, uid))
"""),
    "signals ignored": Escape("end", """
def deaf():
    for s in range(1, 65): quietly(signal.signal, s, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
deaf()
leave(deaf)
"""),
    "files closed": Escape("end", """
leave(lambda: os.closerange(0, 4096))
os.closerange(0, 4096)
"""),
    "many forks": Escape("end", """
for i in range(40):
    if quietly(os.fork) == 0: linger()
"""),
    "forks of forks": Escape("end", """
for i in range(5): quietly(os.fork)
linger()
""", waits=True),
    "another program": Escape("end", """
leave(lambda: os.execv('/bin/sleep', ['$mark', '$seconds']))
"""),
    "a spawned program": Escape(
        "end", "os.posix_spawn('/bin/sleep', ['$mark', '$seconds'], {}, setsid=True)"
    ),
    "a shell in the background": Escape("end", """
line = 'sleep $seconds & sleep $seconds # $mark'
subprocess.Popen(['/bin/sh', '-c', line], start_new_session=True)
"""),
    "a reaper of its own": Escape("end", """
libc.prctl(36, 1, 0, 0, 0)
leave(lambda: libc.prctl(36, 1, 0, 0, 0))
"""),
    "new namespaces": Escape("end", """
for flag in (0x10000000, 0x20000000, 0x20000, 0x30000000):
    libc.unshare(flag)
    call(56 if X86 else 220, flag | 17, 0, 0, 0, 0) or linger()
leave()
""", alone=True),
    "a child of its parent": Escape("end", """
call(56 if X86 else 220, 0x8000 | 17, 0, 0, 0, 0) or linger()
"""),
    "a traced process 1": Escape("end", """
for pid in (1, os.getppid()):
    for what in (16, 0x4206, 8):
        libc.ptrace(what, pid, 0, 0)
leave()
""", alone=True),
    "process 1 signalled": Escape("end", """
for s in range(1, 65):
    quietly(os.kill, 1, s)
leave()
time.sleep(0.2)
""", alone=True),
    "process 1 killed": Escape("end", """
leave()
quietly(os.kill, 1, signal.SIGKILL)
quietly(os.kill, 1, signal.SIGSTOP)
""", alone=True),
    "everybody stopped": Escape("end", """
leave()
quietly(os.kill, -1, signal.SIGSTOP)
quietly(os.kill, 0, signal.SIGSTOP)
""", alone=True, waits=True),
    "its group killed": Escape("end", """
leave()
quietly(os.killpg, 0, signal.SIGKILL)
""", alone=True),
    "its keeper's group": Escape("end", """
leave()
for g in range(2, 99): quietly(os.killpg, g, signal.SIGSTOP)
quietly(os.setpgid, 0, 0)
""", alone=True, waits=True),
    "limits of process 1": Escape("end", """
for kind in range(16):
    quietly(resource.prlimit, 1, kind, (0, 0))
quietly(os.sched_setaffinity, 1, [0])
quietly(os.setpriority, 0, 1, 19)
leave()
""", alone=True),
    "memory of process 1": Escape("end", """
for name in ('mem', 'oom_score_adj', 'fd', 'cwd', 'environ'):
    quietly(open, '/proc/1/' + name, 'r+b')
leave()
""", alone=True),
    "a storm of signals": Escape("end", """
end = time.time() + 0.5
while time.time() < end: quietly(os.kill, 1, signal.SIGCHLD)
leave(lambda: [quietly(os.kill, 1, signal.SIGCHLD) for _ in iter(lambda: time.time() < END, False)])
""", alone=True),
    "signals sent by files": Escape("end", """
import fcntl
leave()
ready, done = os.pipe()
for owner in (1, -1, -2):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        quietly(fcntl.fcntl, ready, fcntl.F_SETOWN, owner)
        quietly(fcntl.fcntl, ready, 10, int(number))
        quietly(fcntl.fcntl, ready, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(done, b'x')
""", alone=True, waits=True),
    "a stopped child": Escape("end", "leave(lambda: os.kill(os.getpid(), signal.SIGSTOP))"),
    "orphans": Escape("end", """
for i in range(20):
    child = os.fork()
    if child == 0:
        quietly(os.fork)
        os._exit(0)
    os.waitpid(child, 0)
leave()
"""),
    "threads": Escape("end", """
for i in range(8): threading.Thread(target=linger).start()
leave()
""", waits=True),
    "a traced child": Escape("end", """
pid = os.fork()
if pid == 0: linger()
libc.ptrace(16, pid, 0, 0)
leave()
"""),
    "a session of its own until its time is over": Escape("end", """
quietly(os.setsid)
libc.prctl(1, 0, 0, 0, 0)
leave()
linger()
""", waits=True),
    "kept until its time is over": Escape("end", """
leave()
linger()
""", waits=True),
    "a large memory": Escape("end", """
leave(lambda: (bytearray(2**27), linger()))
linger()
""", waits=True),
}  # fmt: skip
BOUNDED = {
    "more processes than allowed": Escape("processes", """
began = 0
for i in range(40):
    child = quietly(os.fork)
    if child == 0: linger()
    began += type(child) is int
if began >= 32: out(f'{began} processes at the same time')
"""),
    "more threads than allowed": Escape("processes", """
began = 0
try:
    for i in range(40):
        threading.Thread(target=linger, daemon=True).start()
        began += 1
except RuntimeError:
    pass
if began >= 32: out(f'{began} threads at the same time')
os._exit(0)
"""),
    "memory of one process": Escape("memory", """
kept = quietly(bytearray, 2**28)
if type(kept) is bytearray: out('256 MB in one process')
"""),
    "memory of several processes": Escape("memory", """
ready, done = os.pipe()
for i in range(6):
    if quietly(os.fork) == 0:
        kept = bytearray(40 * 2**20)
        os.write(done, b'x')
        linger()
os.close(done)
seen = 0
while seen < 6 and (part := os.read(ready, 6)): seen += len(part)
time.sleep(0.2)
if seen == 6: out('240 MB in six processes')
""", waits=True, seconds=5.0),
    "memory of processes without a first thread": Escape("memory", """
ready, done = os.pipe()
def fill():
    kept = bytearray(40 * 2**20)
    os.write(done, b'x')
    linger()
for i in range(6):
    if quietly(os.fork) == 0:
        threading.Thread(target=fill).start()
        call(60 if X86 else 93, 0)
os.close(done)
seen = 0
while seen < 6 and (part := os.read(ready, 6)): seen += len(part)
time.sleep(0.2)
if seen == 6: out('240 MB in six processes whose first thread has ended')
""", waits=True, seconds=5.0),
    "memory of no process": Escape("memory", """
import mmap, stat
libc.mmap.restype = ctypes.c_ssize_t  # mmap.mmap(-1, 4096) takes a file without a name here
if libc.mmap(None, 4096, 3, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0) != -1:
    out('shared memory without a file')
file = quietly(os.open, '/dev/zero', os.O_RDWR)
if type(file) is int and stat.S_ISCHR(os.fstat(file).st_mode):
    if isinstance(quietly(mmap.mmap, file, 4096), mmap.mmap): out('shared memory of /dev/zero')
made = libc.shmget(0, 2**20, 0o1600)
if made >= 0:
    libc.shmctl(made, 0, None)
    out('shared memory of System V')
if call(319 if X86 else 279, b'x', 0) >= 0: out('a file in memory')
""", inside=True),
    "a large file": Escape("disk", """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with open('large', 'wb') as file:
        for i in range(16): file.write(bytes(2**20))
    out('a file of 16 MB')
except OSError:
    pass
"""),
    "an output with a hole": Escape("disk", """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = quietly(os.open, '/dev/stdout', os.O_RDWR)
if type(file) is int and os.path.isfile('/proc/self/fd/1'):
    size = quietly(os.ftruncate, file, 2**24)
    if size is None: out('an output of 16 MB')
"""),
    "many files": Escape("disk", """
try:
    for i in range(16):
        with open(f'part{i}', 'wb') as file: file.write(bytes(2**20))
    out('16 files of 1 MB')
except OSError:
    pass
"""),
    "an endless loop": Escape("time", """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while time.time() < END: pass
out('its time did not end it')
""", waits=True),
    "an endless sleep": Escape("time", """
linger()
""", waits=True),
}  # fmt: skip
REACHING_OUT = {
    "a connection to this machine": Escape("network", """
sock = quietly(socket.create_connection, ('127.0.0.1', $port), 2)
if isinstance(sock, socket.socket): out('a connection')
"""),
    "a connection by a call": Escape("network", """
number, connect = (41, 42) if X86 else (198, 203)
file = call(number, 2, 1, 0)
address = (2).to_bytes(2, 'little') + ($port).to_bytes(2, 'big') + bytes([127, 0, 0, 1]) + bytes(8)
if file >= 0 and call(connect, file, address, 16) == 0: out('a connection')
"""),
    "a socket without a file": Escape("network", """
def reach():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(chr(0) + '$socket')
        out('a connection')
quietly(reach)
"""),
    "a network of its own made real": Escape("network", """
quietly(subprocess.run, ['ip', 'link', 'set', 'lo', 'up'])
sock = quietly(socket.create_connection, ('127.0.0.1', $port), 2)
if isinstance(sock, socket.socket): out('a connection')
"""),
    "other families of sockets": Escape("network", """
for family in (17, 21, 29, 31, 38, 40, 44):
    sock = quietly(socket.socket, family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM)
    if isinstance(sock, socket.socket): out(f'a socket of family {family}')
""", inside=True),
    "a file by its path": Escape("files", """
for path in ('$secret', '/proc/1/root$secret', '/proc/self/root$secret', '/outside$secret',
             '/tmp/../..$secret', '/proc/1/cwd/../../../../..$secret'):
    text = quietly(lambda: open(path).read())
    if '$canary' in str(text): out(f'the file through {path[:20]}')
"""),
    "a look at a file": Escape("names", """
size = quietly(lambda: os.stat('$secret').st_size)
if type(size) is int: out(f'the size of a file, {size} bytes')
listed = quietly(os.listdir, os.path.dirname('$secret'))
if isinstance(listed, list): out(f'names of files: {listed}')
"""),
    "a file by its number": Escape("files", """
for number in range(3, 2048):
    for back in ('', '..', '../..', '../../../..'):
        found = quietly(os.open, f'/proc/self/fd/{number}/{back}$secret', os.O_RDONLY)
        if type(found) is int and b'$canary' in os.read(found, 999): out(f'file {number}')
"""),
    "another root": Escape("files", """
quietly(os.chroot, '/')
for i in range(20): quietly(os.chdir, '..')
quietly(os.chroot, '.')
text = quietly(lambda: open('$secret').read())
if '$canary' in str(text): out('a file through another root')
"""),
    "a mount": Escape("files", """
quietly(os.mkdir, 'm')
for flags in (0x1000, 0x5000): libc.mount(b'/', b'm', None, flags, None)
text = quietly(lambda: open('m$secret').read())
if '$canary' in str(text): out('a file through a mount')
""", alone=True),
    "a file outside": Escape("files", """
for path in ('$target', '/proc/1/root$target', '/proc/self/cwd/../../../..$target'):
    if type(quietly(os.open, path, os.O_WRONLY | os.O_CREAT, 0o666)) is int: out('a file written')
"""),
    "the interpreter's libraries": Escape("files", """
file = quietly(os.open, os.__file__, os.O_WRONLY | os.O_APPEND)
if type(file) is int: out('a library that can be written')
""", inside=True),
    "a file beside a folder's number": Escape("files", """
place, name = os.path.split('$target')
beside = quietly(os.open, place, os.O_RDONLY)
if type(beside) is int:
    file = quietly(lambda: os.open(name, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=beside))
    if type(file) is int: out('a file written beside a folder')
"""),
    "a library's file": Escape("files", """
try:
    import sqlite3
    base = sqlite3.connect('$target')
    base.execute('create table a (b)')
    base.commit()
except Exception: pass
try:
    import _gdbm
    _gdbm.open('$target', 'c').close()
except Exception: pass
"""),
    "a pipe by name": Escape("files", """
quietly(os.mkfifo, '$target')
quietly(os.mknod, '$target')
"""),
    "its variables": Escape("variables", """
if '$canary' in str(dict(os.environ)): out('in its own')
for pid in quietly(os.listdir, '/proc') if os.path.isdir('/proc') else ():
    text = quietly(lambda: open(f'/proc/{pid}/environ').read()) if pid.isdigit() else ''
    if '$canary' in str(text): out(f'of process {pid}')
"""),
    "processes outside": Escape("others", """
for pid in quietly(os.listdir, '/proc') if os.path.isdir('/proc') else ():
    text = quietly(lambda: open(f'/proc/{pid}/cmdline').read()) if pid.isdigit() else ''
    if '$canary' in str(text): out(f'process {pid} is seen')
"""),
    "a signal outside": Escape("others", """
if quietly(os.kill, $outer, 0) is None: out('the process outside can be signalled')
quietly(os.kill, $outer, signal.SIGTERM)
file = call(434, $outer, 0)
if file >= 0: call(424, file, signal.SIGTERM, None, 0)
"""),
    "a process outside, scheduled": Escape("others", """
if sys.platform == 'linux':
    zero = os.sched_param(0)
    for name, given in (('sched_setaffinity', ({0},)), ('sched_setscheduler', (3, zero)),
                        ('sched_setparam', (zero,))):
        if quietly(getattr(os, name), $outer, *given) is None: out(f'{name} of a process outside')
    if type(quietly(resource.prlimit, $outer, resource.RLIMIT_CORE)) is tuple: out('its limits')
if quietly(os.setpriority, 0, $outer, 19) is None: out('its priority was changed')
"""),
    "more rights": Escape("privileges", """
status = open('/proc/self/status').read().split()
for kind in ('CapEff:', 'CapPrm:', 'CapAmb:'):
    if int(status[status.index(kind) + 1], 16): out(f'capabilities: {kind}')
if status[status.index('NoNewPrivs:') + 1] != '1': out('programs may bring new rights')
""", inside=True),
    "a user of its own": Escape("privileges", """
for flag in (0x10000000, 0x10020000, 0x30000000, 0x50000000, 0x02000000):
    if libc.unshare(flag) == 0: out(f'a new namespace: {flag:x}')
""", inside=True),
    "a mount of its own": Escape("privileges", """
quietly(os.mkdir, 'm')
if libc.mount(b'none', b'm', b'tmpfs', 0, None) == 0: out('a mount')
if libc.umount2(b'/usr', 2) == 0: out('a mount removed')
""", alone=True, inside=True),
    "root": Escape("privileges", """
if os.getuid() and quietly(os.setuid, 0) is None: out('it became root')
if quietly(os.setgroups, [0]) is None: out('a group')
own = os.uname().nodename.encode()
if libc.sethostname(own, len(own)) == 0: out('the name of the host')
""", alone=True, inside=True),
    "settings of the kernel": Escape("privileges", """
for folder, _, names in os.walk('/proc/sys'):
    for name in names:
        file = quietly(os.open, f'{folder}/{name}', os.O_WRONLY)  # nothing is written
        if type(file) is int:
            os.close(file)
            out(f'{folder}/{name} can be written')
            raise SystemExit
""", inside=True),
    "calls of newer kernels": Escape("calls", """
size = ctypes.create_string_buffer(256)
for name, number in (('io_uring_setup', 425), ('landlock_create_ruleset', 444), ('clone3', 435),
                     ('open_tree', 428), ('fsopen', 430), ('pidfd_getfd', 438), ('no call', 999)):
    if call(number, 0, size, 0, 0) >= 0: out(f'{name} is there')
""", inside=True),
    "calls that reach the kernel's inside": Escape("calls", """
rows = {'bpf': (321, 280), 'perf_event_open': (298, 241), 'userfaultfd': (323, 282),
        'keyctl': (250, 219), 'inotify_init1': (294, 26), 'fanotify_init': (300, 262),
        'memfd_secret': (447, 447), 'kcmp': (312, 272)}
zero = ctypes.create_string_buffer(256)
for name, numbers in rows.items():
    given = (0, -3, 1) if name == 'keyctl' else (0, zero, 0) if name != 'inotify_init1' else (0,)
    if call(numbers[0 if X86 else 1], *given) >= 0: out(f'{name} is there')
""", inside=True),
    "calls of another word size": Escape("calls", """
import mmap
if X86 and call(0x40000000 | 39) > 0: out('the numbers of x32')
if X86:  # mov eax, 20; int 0x80; ret: the process's number by a call of 32 bits
    code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    code.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))
    place = ctypes.addressof(ctypes.c_char.from_buffer(code))
    if ctypes.CFUNCTYPE(ctypes.c_int)(place)() > 0: out('the numbers of 32 bits')
""", inside=True),
    "timers": Escape("kernel", """
leave()
for i in range(1024):
    if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())): break
else: out('1,024 timers')
""", inside=True),
    "asynchronous input": Escape("kernel", """
leave()
number = 206 if X86 else 0
made = sum(call(number, 99, ctypes.byref(ctypes.c_ulong())) == 0 for _ in range(9))
if made: out(f'{made} contexts of asynchronous input')
""", inside=True),
    "queues and semaphores": Escape("kernel", """
if libc.msgget(0x7f1, 0o1600) >= 0: out('a queue')
if libc.semget(0x7f1, 1, 0o1600) >= 0: out('a semaphore')
libc.mq_open.restype = ctypes.c_int
if libc.mq_open(b'/flowrl-escape', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0: out('a POSIX queue')
""", alone=True, inside=True),
    "files in flight": Escape("kernel", """
import array
sent = 0
for i in range(300):
    pair = quietly(socket.socketpair)
    if isinstance(pair, Exception): break
    given = array.array('i', [each.fileno() for each in pair])
    part = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)]
    if isinstance(quietly(pair[0].sendmsg, [b'x'], part), Exception): break
    sent += 2
    for each in pair: each.close()
if sent >= 512: out(f'{sent} files that no process has open')
""", inside=True),
    "many open files": Escape("kernel", """
kept = []
for i in range(512):
    file = quietly(os.open, '/dev/null', os.O_RDONLY)
    if type(file) is not int: break
    kept.append(file)
else: out('512 open files')
""", inside=True),
}  # fmt: skip
TESTS = ("assert f(2) == 3", "assert f(-1) == 0")
FORGING = {
    "prints a verdict": "print('1\\n111')\nsys.stderr.write('passed')",
    "leaves in the middle": "def f(x): os._exit(0)",
    "equals everything": (
        "class A(int):\n    def __eq__(s, o): return True\n    __lt__ = __eq__\n"
        "    def __hash__(s): return 0\ndef f(x): return A(7)"
    ),
    "no assertions": (
        "import builtins\nbuiltins.AssertionError = ValueError\ndef f(x): raise AssertionError"
    ),
    "writes to all files": (
        "for i in range(3, 2048):\n    quietly(os.write, i, b'1\\n' * 9)\ndef f(x): return 99"
    ),
    "answers for the channel": (
        "import json\nb = json.dumps({'value': True}).encode()\nfor i in range(3, 2048):\n"
        "    quietly(os.write, i, len(b).to_bytes(4, 'little') + b)\ndef f(x): return 99"
    ),
    "errors that blame the tests": (
        "def f(x):\n    error = ModuleNotFoundError('no numpy')\n    error.name = 'numpy'\n"
        "    raise error"
    ),
    "code in its answer": (
        "import pickle\nclass A:\n    def __reduce__(s): return exec, ('import os; os._exit(0)',)\n"
        "def f(x): return pickle.dumps(A())"
    ),
}
ESCAPES: dict[str, Escape] = {
    **ENDING_ESCAPES,
    **BOUNDED,
    **REACHING_OUT,
    **{name: Escape("verdict", code, tests=TESTS) for name, code in FORGING.items()},
}


def program_of(escape: Escape, values: dict[str, str | int]) -> str:
    """The program of an escape for these values. KeyError if one is missing."""
    guard = "alone() or sys.exit(0)\n" if escape.alone else ""
    return Template(SETUP + guard + escape.code).substitute(values, seconds=ESCAPE_SECONDS)
