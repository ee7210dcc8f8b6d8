"""What no answer may earn points with: (name, the student's code, a part of what the table says).

Each goes into the cell of task 2 of exercise 01, `choose_pair`, or where a second element says so
into another exercise. `STUB` runs, and is wrong. Where the last element is empty, it is enough that
nothing is earned.
"""

STUB = """
def choose_pair(words, lengths, *, min_frequency=2, max_bytes=None):
    return None
"""
WRONG = "there are pairs that occur often enough"

# In exercise 01, which needs no PyTorch.
PLAIN = [
    ("blank", "raise NotImplementedError()", "choose_pair"),
    ("nothing", "", "choose_pair"),
    (
        "case that swallows",
        "from contextlib import contextmanager\n@contextmanager\ndef case(name):\n"
        "    try:\n        yield\n    except BaseException:\n        pass\n" + STUB,
        WRONG,
    ),
    (
        "case from a library",
        "from contextlib import suppress\n"
        "def case(name):\n    return suppress(BaseException)\n" + STUB,
        WRONG,
    ),
    ("checker rebound", STUB + "\ndef chosen(*a, **k):\n    return (3, 4)\n", WRONG),
    ("AssertionError rebound", "class AssertionError(Exception):\n    pass\n" + STUB, WRONG),
    ("isinstance rebound", "isinstance = lambda *a: True\n" + STUB, WRONG),
    (
        "input transformer",
        "ip = get_ipython()\nip.input_transformers_cleanup.append(lambda lines: ['pass'])",
        "get_ipython",
    ),
    ("cell hook", "get_ipython().events.register('pre_run_cell', print)", "get_ipython"),
    ("line magic", "%load_ext autoreload\n!touch here\n%%time\n" + STUB, WRONG),
    ("only magics", "%matplotlib inline\n!ls\n" + STUB, WRONG),
    ("cell of another language", "%%bash\nrm -rf ~", "choose_pair"),
    ("builtins by import", "import builtins\nbuiltins.isinstance = 0", "builtins"),
    ("builtins by name", "__builtins__['isinstance'] = 0", "__builtins__"),
    ("sys from the exercise", "sys.exit(0)", "`sys` is closed"),
    ("exit", "raise SystemExit(0)", "choose_pair"),
    ("exec", "exec('1')", "`exec` is closed"),
    ("eval by another name", "e = eval\ne('1')", "`eval` is closed"),
    ("compile", "compile('1', '', 'eval')", "`compile` is closed"),
    ("globals", "globals()['case'] = None", "`globals` is closed"),
    ("the globals of a checker", "case.__globals__['chosen'] = None", "__globals__"),
    ("the code of a checker", "case.__code__ = STUB.__code__", "__code__"),
    ("getattr with a built name", "getattr(case, '__glo' + 'bals__')", "__globals__"),
    (
        "a frame by an exception",
        "try:\n    1 / 0\nexcept Exception as e:\n    f = e.__traceback__.tb_frame",
        "closed to answers",
    ),
    ("a frame by a generator", "g = (x for x in ())\ng.gi_frame.f_back", "closed to answers"),
    ("gc", "import gc\ngc.get_objects()", "`gc` is closed"),
    ("inspect", "import inspect\ninspect.stack()", "`inspect` is closed"),
    ("ctypes", "import ctypes", "`ctypes` is closed"),
    ("subprocess", "import subprocess", "`subprocess` is closed"),
    ("socket", "import socket", "`socket` is closed"),
    ("urllib", "import urllib.request", "`urllib.request` is closed"),
    ("pickle", "import pickle", "`pickle` is closed"),
    ("mock", "from unittest.mock import ANY\n", "`unittest.mock` is closed"),
    ("a module behind a module", "random._os.abort()", "random._os"),
    ("a module behind a module, 2", "m = json\nm.decoder.scanner.re.enum.sys", "closed to answers"),
    ("the package patched", "package.learn_merges = lambda *a, **k: []", "did not make"),
    ("the package patched by another name", "p = package\np.learn_merges = 0", "did not make"),
    ("the package patched by setattr", "setattr(package, 'learn_merges', 0)", "did not make"),
    (
        "the package's table emptied",
        "package.BYTE_CHARACTERS.clear()\n" + STUB,
        "your code changed",
    ),
    ("a class patched", "Counter.most_common = None", "did not make"),
    ("a function patched", "case.anything = 1", "did not make"),
    ("names of a module", "vars(package)['learn_merges'] = 0", "`vars`"),
    ("names of a module, 2", "package.__dict__['learn_merges'] = 0", "__dict__"),
    ("a profile", "from sys import setprofile", "`sys` is closed"),
    ("a thread", "import threading", "`threading` is closed"),
    (
        "an equal to all",
        STUB + "\nclass Yes:\n    def __eq__(self, other):\n        return True\n",
        "__eq__",
    ),
    ("an equal to all, late", "class Yes:\n    pass\nsetattr(Yes, '__e' + 'q__', print)", "__eq__"),
    (
        "a tuple of one's own",
        "class Pair(tuple):\n    def index(self, x):\n        return 0\n",
        "extends a type of values",
    ),
    ("a type by a call", "Pair = type('Pair', (tuple,), {})", "`type`"),
    ("a type by map", "list(map(type, ['A'], [(tuple,)], [{}]))", "`type`"),
    ("the type of a class", "T = type(int)\nT('Pair', (tuple,), {})", "the type of a class"),
    ("the class of a class", "T = int.__class__\nT('A', (), {})", "the type of a class"),
    ("a metaclass from a library", "from collections.abc import ABCMeta", "ABCMeta"),
    ("an enum", "import enum\nA = enum.Enum('A', {'__eq__': print})", "`enum` is closed"),
    ("another module's name", "__name__ = 'torch'", "`__name__`"),
    ("a format that looks", "raise ValueError('{0.__glo' 'bals__}'.format(case))", "a format"),
    ("a format that looks, 2", "str.format('{0.__globals__}', case)", "a format"),
    ("a checker", "from llm_course.pages.exercise_first_run import near", "llm_course.pages"),
    ("a checker, 2", "import llm_course.files\nllm_course.pages", "llm_course.pages"),
    ("a metaclass", "class A(metaclass=Counter):\n    pass", "metaclass"),
    ("our own guard", "_guard_write = lambda x: x", "_guard_write"),
    ("attrgetter", "from operator import attrgetter", "attrgetter"),
    ("a loop", "while True:\n    pass", "choose_pair"),
    ("no memory", "x = bytearray(2**45)", "choose_pair"),
    ("much output", "for i in range(10**5):\n    print('x' * 50)\n" + STUB, WRONG),
    (
        "an error that says nothing",
        "class E(Exception):\n    def __str__(self):\n        raise ValueError\nraise E",
        "choose_pair",
    ),
    (
        "an error that clears the screen",
        "raise ValueError('\\x1b[2J\\x1b]0;root\\x07all is well')",
        "choose_pair",
    ),
    (
        "an endless __str__",
        "class E(Exception):\n    def __str__(self):\n        while True:\n"
        "            pass\nraise E",
        "choose_pair",
    ),
    ("deep recursion", "def f():\n    return f()\nf()", "choose_pair"),
    ("a deep expression", "x = " + "(" * 500 + ")" * 500, "choose_pair"),
    ("a hidden test in a comment", "### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS\n" + STUB, WRONG),
]

# In exercise 05, with PyTorch: code for the cell of task 7, `alibi_attention`.
ALIBI = """
def alibi_attention(q, k, v, slopes):
    return torch.zeros(*q.shape[:3], v.shape[-1])
"""
TORCH = [
    ("allclose patched", "torch.allclose = lambda *a, **k: True\n" + ALIBI, "did not make"),
    (
        "allclose patched in a call",
        ALIBI.replace("return", "torch.allclose = len\n    return"),
        "did not make",
    ),
    ("a method patched", "torch.Tensor.isnan = None\n" + ALIBI, "did not make"),
    ("a tensor of one's own", "class Mine(torch.Tensor):\n    pass\n", "extends a type of values"),
    ("a mode left on", "from torch.overrides import TorchFunctionMode\n", "closed to answers"),
    ("another kernel", "torch.library.Library('aten', 'IMPL')", "closed to answers"),
    ("text that runs", "import torch.utils.benchmark", "closed to answers"),
    ("C that runs", "torch.utils.cpp_extension.load_inline", "closed to answers"),
    ("a private part", "torch._C._disabled_torch_function_impl", "closed to answers"),
    ("a private part by another name", "t = torch\nt._C", "torch._C"),
    ("compiled by torch", "t = torch\nt.jit.script(MultiHeadAttention)", "torch.jit"),
    ("the exercise's tools", "check.Watch.operations = 0", "did not make"),
]
# Code for the cell of task 2 of exercise 05, which refuses the ready-made mask.
READY = [
    (
        "the package's function, called",
        "from llm_course.model.masks import causal_mask\n"
        "def prefix_mask(T, S, P):\n    return causal_mask(T, S)",
        "ready-made",
    ),
    (
        "the package's function, by another name",
        "from llm_course.model import masks\nprefix_mask = lambda T, S, P: masks.causal_mask(T, S)",
        "ready-made",
    ),
    (
        "the package's function, by partial",
        "from functools import partial\nfrom llm_course.model.masks import causal_mask\n"
        "mask = partial(causal_mask)\ndef prefix_mask(T, S, P):\n    return mask(T, S)",
        "ready-made",
    ),
    ("the checker patched", "check.check_prefix_mask = len\n", "did not make"),
    (
        "the checker patched in a call",
        "def prefix_mask(T, S, P):\n    check.case = check.forbid\n",
        "did not make",
    ),
    (
        "the checker under its name",
        "class check:\n    check_prefix_mask = print\nprefix_mask = 1\n",
        "Task 2",
    ),
]

# What ends a notebook: code for task 2 of exercise 01, and a part of the reason.
ENDING = [
    (
        "a loop that ignores the interrupt",
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n"
        "        pass",
        "ignored the interrupt",
    ),
]
# In exercise 02, which gives `os`: code for its task 2.
WITH_OS = [
    ("a dead process", "os.abort()", "its process ended"),
    ("an early exit", "os._exit(0)", ""),
    (
        "a forged reply",
        "for f in range(3, 20):\n    try:\n"
        "        os.write(f, b'{\"error\": null}\\n')\n    except OSError:\n        pass",
        "wrote to the grader",
    ),
    (
        "a flooded channel",
        "for f in range(3, 20):\n    try:\n        while True:\n"
        "            os.write(f, b'x' * 10**6)\n    except OSError:\n        pass",
        "wrote to the grader",
    ),
]

# What needs the process in which the tests run: (name, exercise, cell, code, what the table says).
# Hooks and memory earned points or showed hidden tests where cells and tests met in one process.
READER = """
def choose_pair(words, lengths, *, min_frequency=2, max_bytes=None):
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if "rw-p" in line:
                memory.seek(start)
                text = memory.read(end - start)
                place = text.find(b"BEGIN HIDDEN " + b"TESTS")
                if place > 0:
                    raise ValueError(text[place : place + 500])
"""
BROKEN = "class MendedAttention(BrokenAttention):\n    pass\n"
HOOKS = "hooks = torch.nn.modules.module\n"
ZERO = "lambda module, given, made: made * 0"
THREAD = f"""
def later():
    hooks.register_module_forward_hook({ZERO})
thread = torch.storage.threading.Thread(target=later)
thread.start()
"""
SHARED = [
    (
        "a hook on every module",
        "05_attention",
        "task4-mend",
        HOOKS + f"hooks.register_module_forward_hook({ZERO})\n" + BROKEN,
        "",
    ),
    (
        "a hook on what every module is given",
        "05_attention",
        "task4-mend",
        HOOKS + "hooks.register_module_forward_pre_hook("
        "lambda module, given: tuple(x * 0 for x in given))\n" + BROKEN,
        "",
    ),
    (
        "a hook, kept by a definition",
        "05_attention",
        "task4-mend",
        HOOKS + f"kept = hooks.register_module_forward_hook({ZERO})\n" + BROKEN,
        "your code changed torch._global_forward_hooks",
    ),
    (
        "a hook that a call registers",
        "05_attention",
        "task4-mend",
        BROKEN + "    def forward(self, x):\n"
        f"        torch.nn.modules.module.register_module_forward_hook({ZERO})\n"
        "        return super().forward(x)\n",
        "your code changed torch._global_forward_hooks",
    ),
    ("a hook by a thread", "05_attention", "task4-mend", HOOKS + THREAD + BROKEN, ""),
    (
        "a thread, begun by a definition",
        "05_attention",
        "task4-mend",
        "def later():\n    while True:\n        pass\ndef begin():\n"
        "    torch.storage.threading.Thread(target=later, daemon=True).start()\n"
        "    return torch.nn.Identity()\nbegun = begin()\n" + BROKEN,
        "leaves a thread running",
    ),
    ("the tests, read in memory", "01_tokenization", "task2-choose", READER, "PermissionError"),
    (
        "a process that stays",
        "02_data",
        "task2-collate",
        "if os.fork() == 0:\n    while True:\n        torch.storage.threading.Event().wait(1)\n",
        "collate",
    ),
]
