"""Run a student's notebook, cell by cell, beside tests that the student's code cannot reach.

`grading.py` starts this program inside an `isolation` and sends it one order a line; each is
answered with one line. The program itself runs nothing of the student's. It imports what the
exercise imports, and forks: first a process in which the notebook runs as it was handed in, without
a test, and then a fresh one for the tests of each task. There the student's cells are not run
again. What they define (functions, classes, imports) is defined anew, what they computed comes as
plain data, and a hidden test is sent when all that is done. Nothing else that a cell did survives:
no hook, no thread, no patched object, no file.

In each process the teacher's cells (given, tests) share one namespace, and the student's another,
which reads what the teacher's gives but never writes there: of an answer only the names that the
task asks for are handed over. So an answer may call a function `case` without any test noticing.

The modules and classes that both sides import are shared, so answers are held to a part of Python:
no attributes that lead to frames, globals or builtins, no writing to what they did not make, no
class that claims to equal everything. What an honest answer needs is all there.
"""

import ast
import builtins
import contextlib
import copy
import ctypes
import functools
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
from types import FunctionType, ModuleType

MEMORY = 6 * 2**30  # bytes of a process's own memory
FILE = 64 * 2**20  # bytes of a file
PROCESSES = 256  # of the unprivileged user, threads included
OUTPUT = 20_000  # characters of a cell
MESSAGE = 600  # characters of an error
LINE = 1_000_000  # characters of a reply
PLAIN = 200_000  # characters of all the plain data that a notebook's cells have bound
GUARD = "_guard_"  # begins the names of our own functions in the student's code

MODULES = set(  # beside those that the exercise itself imports
    """array bisect collections collections.abc contextlib copy csv dataclasses datetime decimal
    fractions functools hashlib heapq io itertools json math numbers numpy operator pathlib
    random re statistics string struct tempfile textwrap time typing unicodedata torch
    torch.nn torch.nn.functional torch.nn.utils torch.optim torch.autograd torch.utils.data
    matplotlib matplotlib.pyplot""".split()
)
CLOSED_MODULES = set(  # not even if the exercise imports them for its tests
    """sys builtins gc inspect ctypes importlib imp types unittest mock subprocess multiprocessing
    signal socket _thread asyncio pickle marshal IPython ipykernel pdb
    traceback code codeop runpy site pty fcntl resource faulthandler weakref atexit""".split()
)
CLOSED_NAMES = set(
    """exec eval compile globals locals breakpoint input memoryview help exit quit
    get_ipython In Out forbid watch patch mock ready_made""".split()
)
CLOSED_ATTRIBUTES = set(
    """f_back f_globals f_locals f_builtins f_code tb_frame tb_next gi_frame gi_code cr_frame
    cr_code ag_frame ag_code co_consts co_code attrgetter methodcaller settrace setprofile
    get_type_hints make_dataclass new_class unsafe_load full_load TorchFunctionMode
    TorchDispatchMode getsource getsourcelines currentframe format_map Formatter Loader
    UnsafeLoader FullLoader""".split()
)
# Parts of torch that replace its functions, call them where no test can see it, or run text.
CLOSED_PARTS = set(
    """jit ops library fx compile export hub overrides load classes package benchmark cpp_extension
    distributed""".split()
)
CLOSED_ROOM = "llm_course.pages"  # holds the checkers of the exercises
OPEN_DUNDERS = set(
    """__init__ __post_init__ __call__ __len__ __getitem__ __getitems__ __setitem__ __delitem__
    __contains__ __iter__ __next__ __enter__ __exit__ __repr__ __str__ __name__ __class__ __doc__
    __dataclass_fields__ __qualname__""".split()
)
GUARDED = CLOSED_PARTS | CLOSED_MODULES | {"format", "pages"}  # looked at as the program runs
CREATED = {"__module__", "__qualname__", "__doc__", "__classcell__", "__annotations__"}


class Refused(Exception):
    """The answer does what no answer may."""


class OutOfTime(BaseException):
    """The cell took too long."""


# ---------------------------------------------------------------- what an answer may say


def check_name(name: str) -> None:
    if name.startswith(GUARD) or name in CLOSED_NAMES or name in CLOSED_MODULES:
        raise Refused(f"`{name}` is closed to answers")
    if name.startswith("__") and name not in {"__name__"}:
        raise Refused(f"`{name}` is closed to answers")


def check_attribute(name: str) -> None:
    closed = name in CLOSED_ATTRIBUTES or name.endswith("Meta")
    if closed or (name.startswith("__") and name not in OPEN_DUNDERS):
        raise Refused(f"the attribute `{name}` is closed to answers")


def check_module(name: str, opened: set[str]) -> None:
    parts = name.split(".")
    closed = CLOSED_MODULES & set(parts) or any(part.startswith("_") for part in parts)
    closed = closed or f"{name}.".startswith(f"{CLOSED_ROOM}.")
    known = name in MODULES | opened or name.startswith(("llm_course.", "torch.optim."))
    if closed or not known:
        raise Refused(f"the module `{name}` is closed to answers")


class Rules(ast.NodeTransformer):
    """Refuse what is closed by name, and put a guard where only the running program can tell."""

    def __init__(self, opened: set[str]):
        self.opened = opened  # modules that the exercise itself imports

    def call(self, name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(GUARD + name, ast.Load()), list(arguments), [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        check_name(node.id)
        if node.id == "__name__" and not isinstance(node.ctx, ast.Load):
            raise Refused("`__name__` is closed to answers")
        if is_type(node):
            raise Refused("`type` is open to answers as `type(x)` alone: it could make a class")
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        check_name(node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        check_attribute(node.attr)
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = self.call("write", node.value)
        elif node.attr.startswith("_") or node.attr in GUARDED:
            return self.call("read", node.value, ast.Constant(node.attr))
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            node.value = self.call("write", node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name):
            if node.func.id == "type" and (len(node.args) != 1 or node.keywords):
                raise Refused("`type` with more than one argument is closed to answers")
            if node.func.id in {"type", "isinstance", "issubclass"}:
                node.args = [a if is_type(a) else self.visit(a) for a in node.args]
                node.keywords = [self.visit(keyword) for keyword in node.keywords]
                if is_type(node.func):
                    node.func.id = GUARD + "type"
                return node
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if not node.name.startswith("__"):
            check_name(node.name)
        check_attribute(node.name)
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        check_name(node.name)
        if node.keywords:
            raise Refused(f"the class {node.name} takes keywords, such as a metaclass")
        return self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> ast.AST:
        for alias in node.names:
            check_module(alias.name, self.opened)
            check_name(alias.asname or alias.name.split(".")[0])
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        check_module(node.module or ".", self.opened)
        for alias in node.names:
            check_attribute(alias.name)
            check_name(alias.asname or alias.name)
            closed = CLOSED_PARTS | CLOSED_MODULES if node.module.startswith("torch") else set()
            if alias.name.startswith("_") or alias.name in closed or alias.name == "*":
                raise Refused(f"`{ast.unparse(node)}` is closed to answers")
        return node


def is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "type"


# ---------------------------------------------------------------- what an answer may do


def is_foreign(thing: object) -> bool:
    """Whether it belongs to Python, a library or the tests, and not to the answer."""
    if isinstance(thing, FunctionType):
        return not isinstance(thing.__globals__, Student)
    if isinstance(thing, dict) and type(thing) is dict:
        return "__builtins__" in thing or "__spec__" in thing
    is_class = isinstance(thing, type) and thing.__module__ != "__main__"
    return is_class or isinstance(thing, ModuleType | Student)


def guard_write(thing: object) -> object:
    if is_foreign(thing):
        name = getattr(thing, "__name__", type(thing).__name__)
        raise Refused(f"your code changes `{name}`, which it did not make")
    return thing


def guard_read(thing: object, name: str, *default: object) -> object:
    check_attribute(name)
    if name == "__class__":
        return guard_type(thing)
    if name == "format" and (thing is str or isinstance(thing, str) and "__" in thing):
        raise Refused("a format that reads attributes is closed to answers")
    root = getattr(thing, "__name__", "").split(".")[0]
    if isinstance(thing, ModuleType):
        part = root in {"torch", "numpy"} and name in CLOSED_PARTS
        part = part or f"{thing.__name__}.{name}" == CLOSED_ROOM
        if name.startswith("_") or name in CLOSED_MODULES or part:
            raise Refused(f"`{thing.__name__}.{name}` is closed to answers")
    return getattr(thing, name, *default)


def guard_type(thing: object) -> type:
    """The type of a value; that of a class could make further classes."""
    if isinstance(thing, type):
        raise Refused("the type of a class is closed to answers")
    return type(thing)


def guard_set(thing: object, name: str, value: object) -> None:
    check_attribute(name)
    setattr(guard_write(thing), name, value)


def guard_delete(thing: object, name: str) -> None:
    check_attribute(name)
    delattr(guard_write(thing), name)


def guard_vars(*thing: object) -> dict:
    if not thing or is_foreign(thing[0]):
        raise Refused("`vars` of what the answer did not make is closed to answers")
    return vars(*thing)


def guard_class(body: object, name: str, *bases: type, **options: object) -> type:
    """A class of the answer: no kind of value that tests compare, and without a say in `==`."""
    values = tuple(VALUES)
    if options or any(isinstance(base, type) and issubclass(base, values) for base in bases):
        raise Refused(f"the class {name} extends a type of values")
    made = builtins.__build_class__(body, name, *bases)
    for key in vars(made):
        if key.startswith("__") and key not in CREATED | OF_EVERY_CLASS:
            check_attribute(key)
    return made


OF_EVERY_CLASS = {"__dict__", "__weakref__", "__abstractmethods__"}  # Python puts them there
VALUES = {int, float, complex, str, bytes, list, tuple, dict, set, frozenset, type, ModuleType}


class Student(dict):
    """The student's names, in front of those that the exercise gives."""

    def __init__(self, given: dict):
        super().__init__(__name__="__main__", __builtins__=self.builtins())
        self.given = given
        self.lost: set[str] = set()  # names that a cell bound in a way that isn't repeated

    def __missing__(self, name: str) -> object:
        """A built-in function that a test replaces for a while is replaced for answers, too."""
        if name in self.given and hasattr(builtins, name) and name not in CLOSED_NAMES:
            return self.given[name]
        if name in self.lost:
            raise Refused(NOT_REPEATED.format(name))
        raise KeyError(name)

    @staticmethod
    def builtins() -> dict:
        kept = {name: value for name, value in vars(builtins).items() if name not in CLOSED_NAMES}
        return kept | {
            "__build_class__": guard_class,
            "getattr": guard_read,
            "setattr": guard_set,
            "delattr": guard_delete,
            "vars": guard_vars,
            GUARD + "type": guard_type,
            GUARD + "read": guard_read,
            GUARD + "write": guard_write,
        }


def check_value(value: object, name: str, depth: int = 0) -> None:
    """An answer that is a value holds ordinary values: nothing that only claims to be equal."""
    ordinary = type(value).__module__ != "__main__" or callable(value) or depth > 4
    if not ordinary and depth:
        raise Refused(f"`{name}` holds a {type(value).__name__}, which is no ordinary value")
    if isinstance(value, list | tuple | set) and len(value) < 10_000:
        for part in value:
            check_value(part, name, depth + 1)
    elif isinstance(value, dict) and len(value) < 10_000:
        for part in value.values():
            check_value(part, name, depth + 1)


# ---------------------------------------------------------------- the package's own code


def normal_form(function: ast.FunctionDef) -> str:
    """The body without what a copyist changes: names of variables, docstring, types."""
    body = [s for s in function.body if not (isinstance(s, ast.Expr) and is_text(s.value))]
    numbers: dict[str, int] = {}
    text = ast.dump(ast.Module(body, []))

    def number(found: re.Match) -> str:
        return f"{found[1]}='{numbers.setdefault(found[2], len(numbers))}'"

    return re.sub(r"\b(id|arg)='(\w+)'", number, text)


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def functions_in(tree: ast.AST) -> dict[str, str]:
    """The normal forms of all functions that are long enough to be somebody's own."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    forms = {normal_form(node): node.name for node in found if node.name != "__init__"}
    return {form: name for form, name in forms.items() if len(form) > 300}


@functools.cache
def functions_of(path: str) -> dict[str, str]:
    with open(path, encoding="utf-8") as file:
        return functions_in(ast.parse(file.read()))


def check_own(tree: ast.AST) -> None:
    """Refuse the package's code, copied."""
    written = functions_in(tree)
    for name, module in list(sys.modules.items()):
        if name.startswith("llm_course.") and getattr(module, "__file__", None):
            theirs = functions_of(module.__file__)
            for form in theirs.keys() & written.keys():
                raise Refused(
                    f"`{written[form]}` is the package's own `{theirs[form]}`, copied; in this task"
                    " you write it yourself"
                )


# ---------------------------------------------------------------- what another process takes over

NOT_REPEATED = (
    "`{}` is made by a statement that the grader does not repeat beside the tests: make it with"
    " `def`, `class`, `import`, or an assignment that stands in no other statement"
)
DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
IMPORT = ast.Import | ast.ImportFrom
KINDS = {kind.__name__: kind for kind in (list, tuple, set, frozenset, dict, bytes)}


def pack(value: object) -> object:
    """Plain data as what JSON can say; ValueError for anything else."""
    kind = type(value)
    if kind is int and value.bit_length() > 1000:
        raise ValueError
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind.__name__ not in KINDS or kind is not KINDS[kind.__name__]:
        raise ValueError
    return [kind.__name__, *map(pack, value.items() if kind is dict else value)]


def unpack(packed: object) -> object:
    if not isinstance(packed, list):
        return packed
    name, *parts = packed
    return complex(*parts) if name == "complex" else KINDS[name](map(unpack, parts))


def definitions(body: list[ast.stmt], known: set[str]) -> list[ast.stmt]:
    """The statements that make something to call or to import. An assignment is one of them, but
    for what is `known` as plain data; so is one to an attribute of the answer's own function or
    class.
    """
    made = {statement.name for statement in body if isinstance(statement, DEFINITION)}

    def is_new(target: ast.expr) -> bool:
        if isinstance(target, ast.Attribute):
            return isinstance(target.value, ast.Name) and target.value.id in made
        if isinstance(target, ast.Tuple | ast.List):
            return any(map(is_new, target.elts))
        return isinstance(target, ast.Name) and target.id not in known

    kept = []
    for statement in body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        if isinstance(statement, DEFINITION | IMPORT):
            kept.append(statement)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and all(map(is_new, targets)):
            kept.append(statement)
    return kept


# ---------------------------------------------------------------- cells


def without_magics(source: str) -> str:
    """The Python of a cell: IPython's commands neither run nor count."""
    if re.match(r"\s*%%(?!time|capture)", source):
        return ""
    return re.sub(r"^(\s*)(?:[%!].*|[\w.]+\?+ *)$", r"\1pass", source, flags=re.MULTILINE)


class Capped(io.StringIO):
    """Keeps the first characters that are written."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, OUTPUT - self.tell())])
        return len(text)


def first_line(error: BaseException) -> str:
    """What went wrong, in one line; our own messages say it without the error's type."""
    lines = str(error).strip().splitlines() or [""]
    prefix = "" if isinstance(error, AssertionError) and lines[0] else type(error).__name__
    return ": ".join(part for part in (prefix, lines[0]) if part)[:MESSAGE]


class Session:
    """Two namespaces and the cells that have run in them."""

    def __init__(self, asked: list[str], opened: list[str]):
        self.asked = set(asked)
        exercise = ModuleType("exercise")
        sys.modules["exercise"] = exercise  # where Python looks for the classes that it gives
        self.teacher = vars(exercise)
        self.opened = set(opened)
        if "threading" in self.opened:
            self.opened.add("concurrent.futures")
        self.student = Student(self.teacher)
        self.bound: set[str] = set()  # by the student
        self.untouched: dict = {}  # what both sides share, before an answer could change it
        self.is_checked = True
        self.leaves_thread = False

    def run(self, cell: dict) -> dict:
        """Run a cell; its error, whether it was refused, and what it printed."""
        output = Capped()
        error = None
        try:
            signal.setitimer(signal.ITIMER_REAL, cell["seconds"], 1)
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(Capped()):
                getattr(self, f"run_{cell['kind']}")(cell)
        except OutOfTime:
            error = f"OutOfTime: more than {cell['seconds']:g} seconds"
        except BaseException as caught:
            error = "an error that cannot say what it is"
            with contextlib.suppress(BaseException):
                error = first_line(caught)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if cell["kind"] == "test":
            return {"error": error}
        reply = {"error": error, "output": output.getvalue()}
        return reply | self.bindings() if cell["kind"] == "answer" else reply

    def run_given(self, cell: dict) -> None:
        tree = ast.parse(cell["source"])
        if cell.get("whole", True):
            self.check_shared()
            self.untouched = {}
        else:  # of another task: its tools alone
            tree.body = [s for s in tree.body if isinstance(s, DEFINITION | IMPORT)]
        before = dict(self.teacher)
        exec(compile(tree, f"<{cell['name']}>", "exec"), self.teacher)
        new = {n: v for n, v in self.teacher.items() if before.get(n) is not v}
        for name, value in new.items():
            if not name.startswith("__"):
                self.student[name] = own_copy(value)

    def run_test(self, cell: dict) -> None:
        self.check_shared()
        if self.leaves_thread:
            raise Refused("a definition of yours leaves a thread running")
        self.begin_answer()
        exec(compile(cell["source"], f"<{cell['name']}>", "exec"), self.teacher)
        self.check_shared()

    def parse(self, cell: dict) -> ast.Module:
        """The cell's statements, if it breaks no rule."""
        source = without_magics(cell["source"])
        if cell["write_it"]:
            check_own(ast.parse(source))
        Rules(self.opened).visit(ast.parse(source))
        return ast.parse(source)

    def run_answer(self, cell: dict) -> None:
        """Run what the student wrote."""
        self.execute(self.parse(cell), cell["name"])

    def run_definitions(self, cell: dict) -> None:
        """Define what the student's cell defined, and take over what it computed."""
        tree = self.parse(cell)
        for name, packed in cell["plain"].items():
            check_name(name)
            self.student[name] = unpack(packed)
        self.student.lost |= set(cell["bound"])
        tree.body = definitions(tree.body, set(cell["plain"]))
        threads = threading.active_count()
        try:
            self.execute(tree, cell["name"])
        finally:
            self.leaves_thread |= threading.active_count() > threads
        for name in self.asked & set(cell["bound"]) - self.student.keys():
            raise Refused(NOT_REPEATED.format(name))

    def execute(self, tree: ast.Module, name: str) -> None:
        tree = ast.fix_missing_locations(Rules(self.opened).visit(tree))
        self.begin_answer()
        before = dict(self.student)
        try:
            exec(compile(tree, f"<answer {name}>", "exec"), self.student)
        finally:
            now = dict(self.student)
            self.bound |= {n for n, v in now.items() if n not in before or before[n] is not v}
            for name in self.asked & now.keys():
                check_value(now[name], name)
                self.teacher[name] = now[name]

    def bindings(self) -> dict:
        """The names that the student's cells have bound, and the plain data among their values."""
        plain, size = {}, 0
        # Python itself binds names with two underscores: `__warningregistry__`, where a cell warns
        bound = {name for name in self.bound if not name.startswith("__")}
        for name in sorted(bound & self.student.keys()):
            with contextlib.suppress(ValueError, RecursionError):
                packed = pack(self.student[name])
                size += len(json.dumps(packed))
                if size > PLAIN:
                    break
                plain[name] = packed
        return {"plain": plain, "bound": sorted(bound)}

    def begin_answer(self) -> None:
        self.untouched = self.untouched or shared_parts()
        self.is_checked = False

    def check_shared(self) -> None:
        """Refuse what an answer did to what both sides import."""
        if self.is_checked:
            return
        now = shared_parts()
        changed = [key for key, old in self.untouched.items() if not is_same(old, now.get(key))]
        if changed:
            raise Refused(f"your code changed {', '.join(map('.'.join, changed[:3]))}")
        self.is_checked = True


def own_copy(value: object) -> object:
    """An answer that changes a table or a model that it is given changes a copy of its own."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(Exception):
        if type(value) in TABLES or torch and isinstance(value, torch.Tensor | torch.nn.Module):
            return copy.deepcopy(value)
    return value


def is_same(old: object, new: object) -> bool:
    """PyTorch wraps some of its functions when it first needs its compiler; that is no change."""
    if isinstance(old, str):
        return old == new
    theirs = str(getattr(new, "__module__", "")).split(".")[0] == "torch"
    return old is new or theirs and getattr(old, "__name__", 0) == getattr(new, "__name__", 1)


def shared_parts() -> dict:
    """What tests rely on, by where it lives: functions and classes, and tables of data as text."""
    torch = sys.modules.get("torch")
    owners = [builtins, *(m for n, m in list(sys.modules.items()) if n.startswith("llm_course."))]
    owners += [sys.modules[n] for n in ("math", "json", "re", "copy", "numpy") if n in sys.modules]
    if torch:
        owners += [torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module]
    parts = {}
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if not name.startswith("_") and callable(value):
                parts[owner.__name__, name] = value
            elif owner.__name__.startswith("llm_course.") and type(value) in TABLES:
                parts[owner.__name__, name] = repr(value)
    return parts | (switches(torch) if torch else {})


def switches(torch: ModuleType) -> dict:
    """What changes all of PyTorch's answers when it is left on."""
    on = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }
    for module in (torch.nn.modules.module, sys.modules.get("torch.optim.optimizer")):
        hooks = {name: vars(module)[name] for name in vars(module or torch.nn) if "_hooks" in name}
        on |= {name: len(hook) for name, hook in hooks.items() if isinstance(hook, dict)}
    return {("torch", name): repr(value) for name, value in on.items()}


TABLES = {list, dict, set, tuple}


# ---------------------------------------------------------------- the program


def limit(apart: bool) -> None:
    """No more memory, files and processes than an exercise needs. Processes are counted for a user,
    so that one with other work cannot be held to it.
    """
    bounds = [("DATA", MEMORY), ("FSIZE", FILE), ("CORE", 0), ("NOFILE", 256)]
    bounds += [("NPROC", PROCESSES)] * apart
    for name, most in bounds:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def ring(signum: int, frame: object) -> None:
    raise OutOfTime


def keep_apart() -> None:
    """No other program of this user may look into our memory, or into that of what we fork; and
    what a forked process leaves behind becomes our child, so that we can end it.
    """
    if sys.platform == "linux":
        system = ctypes.CDLL(None)
        system.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
        system.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def warm_up(modules: list[str], has_own: bool) -> None:
    """Import what the exercise imports, so that no forked process has to."""
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for name, kind in {"torch": "Tensor", "numpy": "ndarray"}.items():
        if name in sys.modules:
            VALUES.add(getattr(sys.modules[name], kind))
    if has_own:
        check_own(ast.Module([], []))


def children() -> list[int]:
    """The processes whose parent we are."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="latin-1") as file:
            if int(file.read().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(name))
    return found


def pipe() -> tuple[io.BufferedReader, io.BufferedWriter]:
    end, beginning = os.pipe()
    return os.fdopen(end, "rb"), os.fdopen(beginning, "wb")


class Worker:
    """A process forked from this one, with a home of its own; it hears and says a line a time."""

    def __init__(self, start: dict, order: dict, ours: list):
        home = tempfile.mkdtemp(dir=os.environ["HOME"])
        there, self.cells = pipe()
        self.replies, here = pipe()
        self.home = home
        self.pid = os.fork()
        if self.pid == 0:
            for file in (*ours, self.cells, self.replies):
                file.close()
            work(start, order, home, there, here)
        there.close()
        here.close()

    def tell(self, line: bytes) -> dict:
        """What it says to a line, which may be anything; or the status with which it ended."""
        try:
            self.cells.write(line)
            self.cells.flush()
        except OSError:
            pass  # reading says more
        said = self.replies.readline(LINE + 1)
        if said:
            return {"said": said.decode(errors="replace")}
        return {"status": os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])}

    def end(self) -> None:
        """End it, and everything that it has started and left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                for pid in children() if os.path.isdir("/proc") else [self.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        self.replies.close()
        with contextlib.suppress(OSError):
            self.cells.close()
        shutil.rmtree(self.home, ignore_errors=True)


def work(
    start: dict, order: dict, home: str, cells: io.BufferedReader, replies: io.BufferedWriter
) -> None:
    """Run cells, in a process of their own, until it is ended."""
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = home
    os.chdir(home)
    signal.signal(signal.SIGALRM, ring)
    session = Session(start["asked"], start["opened"])
    for line in cells:
        reply = session.run(json.loads(line))
        warm_up([], False)
        replies.write(json.dumps({"key": order["key"]} | reply).encode() + b"\n")
        replies.flush()
    os._exit(0)


def main() -> None:
    orders = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    start = json.loads(orders.readline())
    limit(start["apart"])
    keep_apart()
    warm_up(start["warm"], start["has_own"])
    worker = None
    for line in orders:
        order = json.loads(line)
        if "key" in order:  # for a fresh process
            if worker:
                worker.end()
            worker = Worker(start, order, [orders, replies])
            reply = {"status": None}
        else:
            reply = worker.tell(line)
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


if __name__ == "__main__":
    main()
