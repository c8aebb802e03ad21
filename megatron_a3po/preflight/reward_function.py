"""What a `reward.scorer: package.module:function` names, found out without importing it: that may take long."""

import ast
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder


def problem_of_function(name: str) -> tuple[str, str] | None:
    """The problem and its remedy, or None also where only an import could tell."""
    module, _, attribute = name.partition(":")
    spec = None
    # The run's folder may be on the path of the run only, and not on that of the program that checks this.
    path = [*sys.path, os.getcwd()]
    parts = module.split(".")
    for number, part in enumerate(parts, 1):
        # By the last part alone: for a whole name, a namespace package is looked for among imported modules.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            remedy = "start the run in the folder that holds it, or set PYTHONPATH"
            return f"there is no module {'.'.join(parts[:number])!r}", remedy
        path = list(spec.submodule_search_locations or [])
    assert spec is not None
    return _problem_in(spec, attribute.split(".")[0])


def _problem_in(spec: ModuleSpec, function: str) -> tuple[str, str] | None:
    get_source: Callable[[str], str | None] = getattr(spec.loader, "get_source", lambda _: None)
    try:
        source = get_source(spec.name)
        if source is None:
            return None
        body = ast.parse(source).body
    except (ImportError, SyntaxError, ValueError) as error:
        return f"{spec.origin} cannot be read: {error}", "mend the module"
    names = set[str]().union(*map(_names, body))
    if function in names or names & {"*", "__getattr__"}:
        return None
    functions = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    remedy = f"name one of its functions: {', '.join(functions)}" if functions else "it has no functions"
    return f"{spec.origin} has no {function!r}", remedy


def _names(node: ast.AST) -> set[str]:
    """What a statement of a module may define, in its branches too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.alias):
        return {(node.asname or node.name).split(".")[0]}
    if isinstance(node, ast.ImportFrom) and node.level > 0 and node.module is not None:
        return {node.module.split(".")[0]}.union(*map(_names, node.names))
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Store) else set()
    return set[str]().union(*map(_names, ast.iter_child_nodes(node)))
