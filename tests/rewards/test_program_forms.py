"""Programs that are right in plain Python, in the forms in which people write them: each reads one
line, `1`, or none, prints `1`, and must pass here too."""

import pytest

from rewards.sandbox import run
from tests.rewards.test_rewards_code import ISOLATED

LIMITS = run.SandboxLimits(seconds=30.0)
# of processes and files that only a space of its own permits
ALONE = {
    "/dev/fd",
    "shared",
    "a pool of futures",
    "subprocess",
    "/proc/self/fd",
    "asyncio starts a program",
    "shared memory",
    "shell",
    "forkserver",
    "/dev/stdin",
    "/dev/stdout",
    "manager",
    "fork",
    "process queue",
    "spawn",
    "a pool of processes",
    "lock",
}
BY_DEFAULT = (  # one of each kind; the others are slow
    "exit",
    "its own file",
    "pickle",
    "a pool of processes",
    "/dev/stdin",
    "subprocess",
    "deep recursion in a thread",
    "numpy",
)
FORMS = {
    'exit': """print(1)
exit()""",
    'quit': """print(1)
quit(0)""",
    'its own file': """import os
print(1 if os.path.basename(__file__).endswith('.py') and open(__file__).read() else 0)""",
    'pickle': """import pickle
class A:
    def __init__(s): s.v=1
print(pickle.loads(pickle.dumps(A())).v)""",
    'a pool of processes': """import multiprocessing as m
def f(x): return x
if __name__=='__main__':
    with m.Pool(2) as p: print(sum(p.map(f,[0,1])))""",
    'process queue': """import multiprocessing as m
def f(q): q.put(1)
if __name__=='__main__':
    q=m.Queue(); p=m.Process(target=f,args=(q,)); p.start(); print(q.get()); p.join()""",
    'spawn': """import multiprocessing as m
def f(q): q.put(1)
if __name__=='__main__':
    c=m.get_context('spawn'); q=c.Queue(); p=c.Process(target=f,args=(q,)); p.start()
    print(q.get()); p.join()""",
    'forkserver': """import multiprocessing as m
def f(q): q.put(1)
if __name__=='__main__':
    c=m.get_context('forkserver'); q=c.Queue(); p=c.Process(target=f,args=(q,)); p.start()
    print(q.get()); p.join()""",
    'manager': """import multiprocessing as m
if __name__=='__main__':
    with m.Manager() as g: l=g.list([1]); print(l[0])""",
    'shared': """import multiprocessing as m
v=m.Value('i',1); a=m.Array('i',3); print(v.value)""",
    'shared memory': """from multiprocessing import shared_memory as s
x=s.SharedMemory(create=True,size=10); x.buf[0]=1; print(x.buf[0]); x.close(); x.unlink()""",
    'a pool of futures': """from concurrent.futures import ProcessPoolExecutor as P
def f(x): return x
if __name__=='__main__':
    with P(2) as p: print(list(p.map(f,[1]))[0])""",
    'a pool of threads': """from concurrent.futures import ThreadPoolExecutor as P
with P(2) as p: print(list(p.map(int,[1]))[0])""",
    '/dev/stdin': "print(open('/dev/stdin').read().strip())",
    '/dev/fd': "print(open('/dev/fd/0').read().strip())",
    '/proc/self/fd': "print(open('/proc/self/fd/0').read().strip())",
    '/dev/stdout': "open('/dev/stdout','w').write('1')",
    'os.read': """import os
print(os.read(0,99).decode().strip())""",
    'dataclass': """from __future__ import annotations
from dataclasses import dataclass
@dataclass
class A:
    x: int = 1
print(A().x)""",
    'annotations': """import typing
class A:
    b: 'A'
print(int(typing.get_type_hints(A)['b'] is A))""",
    'its module imported': """import __main__
x=1
print(__main__.x)""",
    'its module found': """import sys
x=1
print(sys.modules['__main__'].x)""",
    'inspect': """import inspect
def f(): return 1
print(int('return' in inspect.getsource(f)))""",
    'subprocess': """import subprocess,sys
print(subprocess.run([sys.executable,'-c','print(1)'],capture_output=True,text=True).stdout.strip())""",
    'shell': """import os
os.system('echo 1')""",
    'asyncio': """import asyncio
async def f(): print(1)
asyncio.run(f())""",
    'asyncio starts a program': """import asyncio
async def f():
    p=await asyncio.create_subprocess_exec('/bin/echo','1',stdout=-1)
    print((await p.communicate())[0].decode().strip())
asyncio.run(f())""",
    'unittest': """import unittest
class T(unittest.TestCase):
    def test(s): s.assertEqual(1,1)
print(1)
unittest.main()""",
    'doctest': "'''\n>>> 1\n1\n'''\nimport doctest\nprint(1-doctest.testmod().failed)",
    'atexit': """import atexit
atexit.register(lambda: print(1))""",
    'tempfile': """import tempfile
with tempfile.NamedTemporaryFile('w+') as f: f.write('1'); f.flush(); f.seek(0); print(f.read())""",
    'deep recursion in a thread': """import sys,threading
sys.setrecursionlimit(10**6)
threading.stack_size(2**27)
def d(n): return 0 if n==0 else d(n-1)
def m(): print(1+d(20000))
t=threading.Thread(target=m); t.start(); t.join()""",
    'deep copies': """import copy
class A: pass
a=A(); a.x=1; print(copy.deepcopy(a).x)""",
    'enum': """import enum,pickle
class E(enum.Enum): A=1
print(pickle.loads(pickle.dumps(E.A)).value)""",
    'namedtuple': """from collections import namedtuple
import pickle
P=namedtuple('P','x')
print(pickle.loads(pickle.dumps(P(1))).x)""",
    'fileinput': """import fileinput
print(next(iter(fileinput.input())).strip())""",
    'input': 'print(input())',
    'lock': """import multiprocessing
l=multiprocessing.Lock()
with l: print(1)""",
    'input mapped': """import mmap,sys
m=mmap.mmap(0,0,access=mmap.ACCESS_READ); print(m.read().decode().strip())""",
    'its name': """import sys
print(1 if sys.argv[0].endswith('.py') else 0)""",
    'a module beside it': """open('mod1.py','w').write('x=1')
import mod1
print(mod1.x)""",
    'its module': """import sys
print(int('__main__'==__name__ and __spec__ is None))""",
    'builtins': "print(1 if type(__builtins__).__name__=='module' else 0)",
    'doc': """'''x'''
print(int(__doc__=='x'))""",
    'signal.alarm': """import signal
signal.alarm(30)
print(1)""",
    'resource': """import resource
resource.setrlimit(resource.RLIMIT_STACK,(2**26,2**26))
print(1)""",
    'help': """print(1)
help""",
    'sqlite': """import sqlite3
print(sqlite3.connect(':memory:').execute('select 1').fetchone()[0])""",
    'numpy': """import numpy as np
print(np.ones(2).dot([1,0]).astype(int) if hasattr(np.float64(1),'astype') else 1)""",
    'sympy': """import sympy
print(sympy.Integer(1))""",
    'scipy': """import scipy.optimize as o
print(1)""",
    'locale': """import locale
locale.setlocale(locale.LC_ALL,'')
print(1)""",
    'zoneinfo': """import zoneinfo
print(1 if zoneinfo.ZoneInfo('Europe/Berlin') else 0)""",
    'getuser': """import os
print(1 if os.getcwd() else 0)""",
    'socketpair': """import socket
a,b=socket.socketpair(); a.send(b'1'); print(b.recv(1).decode())""",
    'bom': '\ufeffprint(1)',
    'coding': """# -*- coding: latin-1 -*-
print(1)""",
    'crlf': 'print(\r\n1)\r\n',
    'linecache': """import traceback
try:
    1/0
except ZeroDivisionError: print(int('1/0' in traceback.format_exc()))""",
    'expanduser': """import os
print(1 if os.path.expanduser('~') else 0)""",
    'ctypes': """import ctypes
print(ctypes.c_int(1).value)""",
    'time zone': """import time
time.tzset()
print(1)""",
    'random': """import secrets
print(1 if secrets.token_hex(2) else 0)""",
    'fork': """import os
p=os.fork()
if p: os.waitpid(p,0)
else: print(1,flush=True); os._exit(0)""",
    'a named pipe': """import os
os.mkfifo('a')
print(1)""",
    'timer': """import threading
t=threading.Timer(0.01,lambda: print(1)); t.start()""",
    'bytes of the input': """import sys
print(int(sys.stdin.buffer.read().split()[0]))""",
    'the input by its number': """print(open(0).read().split()[0])""",
    "a reader in input's place": """import sys
input=sys.stdin.readline
print(int(input()))""",
    'stdin reopen': """import sys
sys.stdin=open(0)
print(sys.stdin.readline().strip())""",
    'heap': """from heapq import *
print(nsmallest(1,[1])[0])""",
    'exec': """exec('y=1',globals())
print(y)""",
    'collector': """import gc
gc.freeze()
print(1)""",
    'queue': """import queue
q=queue.Queue(); q.put(1); print(q.get(timeout=1))""",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [n if n in BY_DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in FORMS],
)
def test_a_right_program_passes_in_any_form(name):
    if name in ALONE and not ISOLATED:
        pytest.skip("no namespaces are permitted here")
    if name in ("numpy", "scipy", "sympy"):
        pytest.importorskip(name)
    result = run.run_program(FORMS[name], "1\n", LIMITS)
    assert (result.code, result.output.strip()) == (0, "1")


def test_a_function_finds_its_own_module_too():
    """A completion whose functions are called: pickles, data classes and annotations of its own."""
    code = (
        "from __future__ import annotations\nimport dataclasses, pickle, typing\n"
        "@dataclasses.dataclass\nclass A:\n    x: int = 1\n    a: A | None = None\n"
        "def f(): return pickle.loads(pickle.dumps(A())).x, typing.get_type_hints(A)['x'] is int\n"
        "def g(): exit(3)\n"
    )
    tests = ["assert f() == (1, True)", "g()"]
    assert run.run_tests(code, tests, LIMITS).passed == [True, False]
