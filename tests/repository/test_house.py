# SPDX-License-Identifier: Apache-2.0
"""The rooms of core/: who may import whom, and how much one reader has to hold."""

import ast
from pathlib import Path

import pytest

from tests.python import run_python

ROOT = Path(__file__).parents[2]
FOUNDATION = {path.stem for path in (ROOT / "core").glob("*.py")} - {"__init__"}
# Each room, and the rooms that its modules may import besides the foundation.
ROOMS = {
    "algorithm": set(),
    "environments": set(),
    "running": {"algorithm", "environments"},
    "actors": {"algorithm", "environments", "running"},
    "remote": {"algorithm", "environments", "running"},
}
TRAINERS = ("monobeast.py", "polybeast.py")
PROGRAMS = (*TRAINERS, "polybeast_env.py", "atari_wrappers.py")
SOURCES = [*(ROOT / name for name in PROGRAMS), *(ROOT / "core").rglob("*.py")]

MAX_TRAINER_LINES = 700
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
# These keep the parameters of TorchBeast's functions, and of its users' calls.
EXEMPT = {"from_logits", "from_importance_weights", "make_atari"}


def ours(path: Path) -> set[str]:
    """Return the modules of this project that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}, line {node.lineno}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    tops = {Path(name).stem for name in PROGRAMS} | {"core"}
    return {name for name in found if name.split(".")[0] in tops}


def place(module: str) -> str:
    """Return the room of core/ that a module is in, or its name at the top of core/."""
    return module.split(".")[1]


def test_the_rooms_are_those_that_are_described():
    found = {path.parent.name for path in (ROOT / "core").glob("*/__init__.py")}
    assert found == set(ROOMS)
    for room in ROOMS:
        docstring = ast.get_docstring(
            ast.parse((ROOT / "core" / room / "__init__.py").read_text())
        )
        assert docstring and "belong" in docstring, room
        assert "Start with" in docstring, room


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_between_rooms_point_one_way(room):
    for path in (ROOT / "core" / room).glob("*.py"):
        for module in ours(path):
            assert module.startswith("core."), f"{path.name} imports {module}"
            allowed = {room} | ROOMS[room] | FOUNDATION
            assert place(module) in allowed, f"{path.name} imports {module}"


def test_the_foundation_imports_no_room():
    for name in FOUNDATION:
        for module in ours(ROOT / "core" / f"{name}.py"):
            assert module.startswith("core."), f"core/{name}.py imports {module}"
            assert place(module) in FOUNDATION, f"core/{name}.py imports {module}"


def test_no_modules_import_each_other():
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES
    }
    imports = {
        module: {
            name if name in modules else name.rpartition(".")[0] for name in ours(path)
        }
        for module, path in modules.items()
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for other in imports.get(module, ()):
                visit(other, (*path, module))
            done.add(module)

    for module in modules:
        visit(module, ())


def test_what_must_start_fast_needs_neither_torch_nor_the_extension():
    """Servers of environments, and children of tests.

    Of a server also what it imports late: all of core.remote but the learner's modules.
    """
    names = {path.stem for path in (ROOT / "core" / "remote").glob("*.py")}
    names -= {"__init__", "greet", "pool"}
    modules = ["polybeast_env", *(f"core.remote.{name}" for name in sorted(names))]
    modules += ["core.environments.check", "tools.runs", "tests.conftest"]
    command = (
        f"import sys, {', '.join(modules)}; "
        "print({'torch', 'libtorchbeast', 'gym'} & {*sys.modules} or 'none')"
    )
    done = run_python(command)
    assert done.stdout == "none\n", done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_is_longer_than_a_sitting(path):
    limit = MAX_TRAINER_LINES if path.name in TRAINERS else MAX_MODULE_LINES
    lines = len(path.read_text().splitlines())
    assert lines <= limit, f"{path} has {lines} lines, more than {limit}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_functions_fit_a_screen_and_a_half(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef):
            continue
        where = f"{path.name}: {node.name}"
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{where} has {lines} lines"
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names = [a.arg for a in names if a.arg not in ("self", "cls")]
        if node.name in EXEMPT:
            continue
        assert len(names) <= MAX_PARAMETERS, f"{where} has {len(names)} parameters"
