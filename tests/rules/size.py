"""How long a file or function may be, and how many parameters a function should take."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from . import Finding, Source

FILE_LINES = 800
HOST_LINES = 80
DEVICE_LINES = 120
PARAMETERS = 8  # by position; those after the star are named at the call

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> list[Function]:
    """Every def of the file, nested ones and methods included."""
    return [n for n in ast.walk(source.tree) if isinstance(n, Function)]


def decorators(function: Function) -> set[str]:
    """Dotted names of a function's decorators, without their arguments."""
    return {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}


def is_device(source: Source, function: Function) -> bool:
    """Traced by the DSL: marked so, or in a file of kernel code."""
    return source.is_device_file or bool(decorators(function) & {"cute.jit", "cute.kernel"})


def code_lines(function: Function) -> int:
    """Lines from `def` to the end, less the docstring: a long explanation is no long function."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        text = function.body[0]
        lines -= (text.end_lineno or text.lineno) - text.lineno + 1
    return lines


def check_size(files: Iterable[Source]) -> list[Finding]:
    """Files and functions over their limit."""
    found = []
    for source in files:
        lines = source.text.count("\n")
        if lines > FILE_LINES:
            found.append(Finding(source.path, 1, f"{lines} lines, at most {FILE_LINES} are allowed"))
        for function in functions(source):
            kind, limit = ("device", DEVICE_LINES) if is_device(source, function) else ("host", HOST_LINES)
            if (n := code_lines(function)) > limit:
                text = f"{kind} function {function.name} has {n} lines, at most {limit} are allowed"
                found.append(Finding(source.path, function.lineno, text))
    return found


def check_parameters(files: Iterable[Source]) -> list[Finding]:
    """Functions with many positional parameters. Kernels are left out: theirs are the operands in launch order."""
    found = []
    for source in files:
        for function in functions(source):
            n = len(function.args.posonlyargs) + len(function.args.args)
            if n > PARAMETERS and "cute.kernel" not in decorators(function):
                text = f"{function.name} takes {n} positional parameters; more than {PARAMETERS} are hard to read"
                found.append(Finding(source.path, function.lineno, text))
    return found


def check_headers(files: Iterable[Source]) -> list[Finding]:
    """The first line of a file that has any content says what the file is for."""
    found = []
    for source in files:
        if source.text.strip() and not (ast.get_docstring(source.tree) and source.text.lstrip("r").startswith('"""')):
            found.append(Finding(source.path, 1, "the first line must be the docstring that names its responsibility"))
    return found
