"""Which operations of a compiled program run, and within how many loops."""

import re


def opcodes(hlo: str, size: int, depth: int) -> set[str]:
    """The operations over a dim of `size` of a program, those of loops included up to `depth` deep."""
    (entry,) = re.findall(r"^ENTRY %([\w.-]+) ", hlo, re.MULTILINE)
    return of_computation(hlo, entry, size, depth)


def of_computation(hlo: str, name: str, size: int, depth: int) -> set[str]:
    """Those of a computation and of what it calls."""
    (body,) = re.findall(rf"^(?:ENTRY )?%{re.escape(name)} \(.*?\{{\n(.*?)^\}}", hlo, re.DOTALL | re.MULTILINE)
    found = set(re.findall(rf"^ *(?:ROOT )?%\S+ = \S*\b{size}\b\S*[\]}})] ([a-z][a-z0-9-]*)\(", body, re.MULTILINE))
    called = [(other, depth) for other in re.findall(r"(?:calls|to_apply)=%([\w.-]+)", body)]
    called += [(other, depth - 1) for other in re.findall(r"body=%([\w.-]+)", body) if depth > 0]
    return found.union(*(of_computation(hlo, other, size, deep) for other, deep in called))
