"""Ring in, ring out: whoever moves a place in a ring returns it. And no store through the context.

A place (kernels/common/ring.py) is a value. In DSL 4.8.1 a helper that moves one without handing it back compiles
with no warning and the kernel waits on stage 0 for ever, so the source is checked. Words used below:

mover       `step` of a module named ring, and every function that returns something made by a mover
moved name  a local or parameter that is assigned from an expression with a mover in it, or from a moved name
carried     a moved name that is a parameter, or that a loop makes from its own last value (through any number of names)

Reported:
1. a call of a mover as a statement: what it returns is lost;
2. a function in which a carried name comes from a parameter, unless each of its returns hands one of that cycle's
   names back, and it ends with a return. Exempt where each call in the tree passes a fresh value (`start(0)`) for the
   parameter: no one is left with an old place. A look-ahead (`ahead = step(at, n)`, not carried) is fine;
3. in a run-time loop, a mover called on names that the loop never assigns: the same place in each round;
4. a mover's result stored through an attribute or in an element of a parameter; `.index`, `.phase`, `.count` written;
5. `x.advance()` (the DSL's own mutable state) where x is an attribute, or a parameter that is not returned;
6. `nonlocal` and `global` in device code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from . import Finding, Source
from .size import Function

Assigned = tuple[set[str], ast.expr, ast.stmt]


def names(node: ast.AST) -> set[str]:
    """Every plain name that occurs in `node`."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def root(node: ast.expr) -> str | None:
    """`a` of `a.b[0].c`."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


@dataclass
class Routine:
    """One function with what the rules ask of it."""

    source: Source
    node: Function
    origin: dict[str, str]  # local name -> dotted name of what it was imported as

    @property
    def name(self) -> str:
        return f"{self.source.module}.{self.node.name}"

    @cached_property
    def parameters(self) -> list[str]:
        a = self.node.args
        return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]

    @cached_property
    def assigned(self) -> list[Assigned]:
        """(plain names written, value, statement) of every assignment."""
        found: list[Assigned] = []
        for n in ast.walk(self.node):
            if isinstance(n, ast.Assign):
                found.append(({x for t in n.targets for x in stored(t)}, n.value, n))
            elif isinstance(n, (ast.AnnAssign, ast.AugAssign)) and n.value is not None:
                extra = names(n.target) if isinstance(n, ast.AugAssign) else set()
                value = ast.Tuple([n.value, *(ast.Name(x) for x in extra)]) if extra else n.value
                found.append((set(stored(n.target)), value, n))
            elif isinstance(n, ast.NamedExpr):
                found.append(({n.target.id}, n.value, self.node))
        return found

    @cached_property
    def loops(self) -> list[ast.For | ast.While]:
        return [n for n in ast.walk(self.node) if isinstance(n, (ast.For, ast.While))]

    def target(self, call: ast.Call) -> str:
        """The dotted name that a call means, as far as imports tell."""
        head, _, rest = ast.unparse(call.func).partition(".")
        return ".".join(filter(None, [self.origin.get(head, f"{self.source.module}.{head}"), rest]))


def stored(target: ast.expr) -> Iterator[str]:
    """Plain names that an assignment to `target` binds; not `x` of `x[0]` or `x.a`."""
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, (ast.Tuple, ast.List)):
        for t in target.elts:
            yield from stored(t)
    elif isinstance(target, ast.Starred):
        yield from stored(target.value)


def routines(files: Iterable[Source]) -> list[Routine]:
    """The functions of all device files."""
    found = []
    for source in files:
        if not source.path.startswith("jax_fa4/kernels/"):
            continue
        origin: dict[str, str] = {}
        for n in ast.walk(source.tree):
            if isinstance(n, ast.ImportFrom):
                origin |= {a.asname or a.name: f"{n.module}.{a.name}" for a in n.names}
            elif isinstance(n, ast.Import):
                origin |= {a.asname: a.name for a in n.names if a.asname}
        found += [Routine(source, n, origin) for n in ast.walk(source.tree) if isinstance(n, Function)]
    return found


class Tree:
    """All routines, and which of them are movers."""

    def __init__(self, files: Iterable[Source]):
        self.routines = routines(files)
        self.movers: set[str] = set()
        while True:
            more = {r.name for r in self.routines if r.name not in self.movers and self.returns_moved(r)}
            if not more:
                break
            self.movers |= more

    def is_mover(self, routine: Routine, call: ast.AST) -> bool:
        if not isinstance(call, ast.Call):
            return False
        name = routine.target(call)
        return name.endswith("ring.step") or name in self.movers

    def moves(self, routine: Routine, node: ast.AST) -> bool:
        """Whether a mover is called anywhere in `node`."""
        return any(self.is_mover(routine, n) for n in ast.walk(node))

    def moved(self, routine: Routine) -> set[str]:
        """Names that ever hold something a mover made."""
        found: set[str] = set()
        while True:
            more = {
                x
                for targets, value, _ in routine.assigned
                if self.moves(routine, value) or (place_like(value) and names(value) & found)
                for x in targets
            }
            if more <= found:
                return found
            found |= more

    def returns_moved(self, routine: Routine) -> bool:
        moved = self.moved(routine)
        return any(
            self.moves(routine, n.value) or (place_like(n.value) and names(n.value) & moved)
            for n in ast.walk(routine.node)
            if isinstance(n, ast.Return) and n.value is not None
        )


def place_like(value: ast.expr) -> bool:
    """Hands a place on unchanged: a name, a choice of two, a tuple or record of several. No arithmetic on its index."""
    if isinstance(value, ast.Name):
        return True
    if isinstance(value, ast.IfExp):
        return place_like(value.body) or place_like(value.orelse)
    if isinstance(value, (ast.Tuple, ast.List)):
        return any(place_like(e) for e in value.elts)
    if isinstance(value, ast.Call):  # a record: Places(k=at, v=behind), state._replace(k=at)
        name = ast.unparse(value.func).split(".")[-1]
        return (name[:1].isupper() and name != "Int32") or name == "_replace"
    return False


def sources_of(tree: Tree, routine: Routine, start: set[str], only_loop: ast.AST | None = None) -> set[str]:
    """All names that the places in `start` are made from. `ring.start(...)` is made from none."""
    inside = None if only_loop is None else {id(n) for n in ast.walk(only_loop)}
    found, todo = set(), set(start)
    while todo:
        name = todo.pop()
        for targets, value, statement in routine.assigned:
            if name not in targets or (inside is not None and id(statement) not in inside):
                continue
            if not (tree.moves(routine, value) or place_like(value)):
                continue
            new = place_arguments(tree, routine, value) - found
            found |= new
            todo |= new
    return found


def place_arguments(tree: Tree, routine: Routine, value: ast.expr) -> set[str]:
    """Names in a value from which its place may come; a call of `start` and the ring's length contribute none."""
    if isinstance(value, ast.Call):
        name = routine.target(value)
        if name.endswith("ring.start"):
            return set()
        if name.endswith("ring.step"):
            return place_arguments(tree, routine, value.args[0]) if value.args else set()
    if isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
        base = root(value)
        return {base} - {"ctx", "plan"} if base else set()
    return {
        x
        for child in ast.iter_child_nodes(value)
        if isinstance(child, (ast.expr, ast.keyword))
        for x in place_arguments(tree, routine, child.value if isinstance(child, ast.keyword) else child)
    }


def check_ring(files: Iterable[Source], only: Source | None = None) -> list[Finding]:
    """The six kinds of breach that the module's docstring lists. only: of routines of this source."""
    tree = Tree(files)
    found = []
    for routine in tree.routines:
        if routine.source.module.endswith(".ring") and routine.node.name == "step":
            continue
        if only is not None and routine.source.path != only.path:
            continue
        found += [*dropped(tree, routine), *kept(tree, routine), *stuck(tree, routine), *written(tree, routine)]
    return sorted(set(found))


def dropped(tree: Tree, routine: Routine) -> Iterator[Finding]:
    for n in ast.walk(routine.node):
        if isinstance(n, ast.Expr) and tree.is_mover(routine, n.value):
            yield Finding(routine.source.path, n.lineno, f"the place that {ast.unparse(n.value)} returns is dropped")


def kept(tree: Tree, routine: Routine) -> Iterator[Finding]:
    moved = tree.moved(routine)
    parameters = set(routine.parameters)
    cycles: list[set[str]] = []
    for name in sorted(moved):
        cycle = {name} if name in parameters else set()
        for loop in routine.loops:
            back = sources_of(tree, routine, {name}, loop)
            if name in back:
                cycle |= {m for m in back & moved if name in sources_of(tree, routine, {m}, loop)} | {name}
        if cycle:
            cycles.append(cycle)
    for cycle in cycles:
        origins = (sources_of(tree, routine, cycle) | cycle) & parameters
        origins = {p for p in origins if not always_fresh(tree, routine, p)}
        if origins and not hands_back(tree, routine, cycle):
            text = (
                f"{routine.node.name} moves {', '.join(sorted(cycle))}, which comes from its parameter"
                f" {', '.join(sorted(origins))}, and does not return it on every path"
            )
            yield Finding(routine.source.path, routine.node.lineno, text)


def hands_back(tree: Tree, routine: Routine, cycle: set[str]) -> bool:
    """Each return gives one of the cycle's names back, and the last statement is a return."""
    returns = [n for n in ast.walk(routine.node) if isinstance(n, ast.Return)]
    if not returns or not isinstance(routine.node.body[-1], ast.Return):
        return False
    for n in returns:
        back = names(n.value) if n.value is not None else set()
        if not (back | sources_of(tree, routine, back)) & cycle:
            return False
    return True


def always_fresh(tree: Tree, routine: Routine, parameter: str) -> bool:
    """Whether each call in the tree passes a value made on the spot, and there is one."""
    at, calls = routine.parameters.index(parameter), 0
    for caller in tree.routines:
        for call in (n for n in ast.walk(caller.node) if isinstance(n, ast.Call)):
            if caller.target(call) != routine.name:
                continue
            calls += 1
            by_name = [k.value for k in call.keywords if k.arg == parameter]
            value = by_name[0] if by_name else call.args[at] if at < len(call.args) else None
            if not isinstance(value, ast.Call):
                return False
    return calls > 0


def stuck(tree: Tree, routine: Routine) -> Iterator[Finding]:
    for loop in routine.loops:
        if isinstance(loop, ast.For) and "range_constexpr" in ast.unparse(loop.iter):
            continue
        assigned = {x for targets, _, s in routine.assigned if s in set(ast.walk(loop)) for x in targets}
        assigned |= set(stored(loop.target)) if isinstance(loop, ast.For) else set()
        for n in ast.walk(loop):
            if not tree.is_mover(routine, n):
                continue
            given = {x for a in n.args for x in place_arguments(tree, routine, a)}  # type: ignore[attr-defined]
            given &= tree.moved(routine) | set(routine.parameters) | places(routine)
            if given and not given & assigned:
                text = f"{ast.unparse(n)} gives the same place in each round: the loop assigns none of {sorted(given)}"
                yield Finding(routine.source.path, n.lineno, text)  # type: ignore[attr-defined]


def places(routine: Routine) -> set[str]:
    """Names assigned from `start(...)`."""
    return {
        x
        for targets, value, _ in routine.assigned
        if any(isinstance(n, ast.Call) and routine.target(n).endswith("ring.start") for n in ast.walk(value))
        for x in targets
    }


def written(tree: Tree, routine: Routine) -> Iterator[Finding]:
    path, parameters = routine.source.path, set(routine.parameters)
    for n in ast.walk(routine.node):
        if isinstance(n, (ast.Nonlocal, ast.Global)):
            yield Finding(path, n.lineno, f"{ast.unparse(n)}: state that moves is returned and rebound")
        targets = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AugAssign) else []
        for t in (x for target in targets for x in (target.elts if isinstance(target, ast.Tuple) else [target])):
            if isinstance(t, ast.Attribute) and t.attr in ("index", "phase", "count"):
                yield Finding(path, n.lineno, f"{ast.unparse(t)} is written: a place is a value, rebind it")
            elif isinstance(t, (ast.Attribute, ast.Subscript)) and tree.moves(routine, n.value):  # type: ignore[attr-defined]
                if isinstance(t, ast.Attribute) or root(t) in parameters:
                    yield Finding(path, n.lineno, f"a moved place is stored in {ast.unparse(t)} instead of returned")
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr == "advance":
            state = n.func.value
            if not isinstance(state, ast.Name) or (
                state.id in parameters and not hands_back(tree, routine, {state.id})
            ):
                yield Finding(path, n.lineno, f"{ast.unparse(n)}: state that moves is returned and rebound")


def check_context_stores(files: Iterable[Source]) -> list[Finding]:
    """`ctx.x[i] = v` or `ctx.x = v` in kernel code.

    In a traced branch or loop the DSL takes ctx for a carried value and rebuilds it, every int of its plan now a
    run-time Int32. The cure: `to = ctx.x` first, `to[i] = v` then.
    """
    found = []
    for routine in routines(files):
        a = routine.node.args
        contexts = {
            p.arg
            for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)
            if p.arg in ("ctx", "context") or (p.annotation and "Context" in names(p.annotation))
        }
        contexts |= {"ctx"}
        for targets, value, _ in routine.assigned:
            if isinstance(value, ast.Name) and value.id in contexts:
                contexts |= targets
        for n in ast.walk(routine.node):
            written = n.targets if isinstance(n, ast.Assign) else [n.target] if isinstance(n, ast.AugAssign) else []
            for t in (x for target in written for x in (target.elts if isinstance(target, ast.Tuple) else [target])):
                if isinstance(t, (ast.Attribute, ast.Subscript)) and root(t) in contexts:
                    found.append(
                        Finding(routine.source.path, n.lineno, f"store through the context: {ast.unparse(t)} = ...")
                    )
    return sorted(set(found))
