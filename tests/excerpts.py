"""Excerpts of source in the pages, and the signatures of docs/api.md, which this file writes.

    python tests/excerpts.py

A signature is a function up to the end of its docstring, or a class up to its first method.
"""

import ast
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[1]
SIGNATURE = re.compile(r'(<!-- signature: (\S+) (\S+) -->\n```python\n)(.*?)(```\n)', re.DOTALL)


def lines_of(file: str, name: str = '') -> list[str]:
    """Return the source lines of a class, a function, or a method as Class.method; '' is the file."""
    source = (ROOT / file).read_text()
    if not name:
        return source.splitlines()
    node = node_of(source, name)
    first = min(x.lineno for x in [node, *node.decorator_list])
    return source.splitlines()[first - 1 : node.end_lineno]


def node_of(source: str, name: str):
    node = ast.parse(source)
    for part in name.split('.'):
        [node] = [x for x in node.body if getattr(x, 'name', '') == part]
    return node


def signature_of(file: str, name: str) -> str:
    """Return the source of a function without what it does, of a class without its methods."""
    source = (ROOT / file).read_text()
    node = node_of(source, name)
    end = node.body[0].end_lineno  # of the docstring
    if isinstance(node, ast.ClassDef):
        fields = [x for x in node.body if not isinstance(x, ast.FunctionDef)]
        end = max(x.end_lineno for x in fields)
    lines = source.splitlines()[node.lineno - 1 : end]
    return textwrap.dedent('\n'.join(lines)) + '\n'


def with_signatures(text: str) -> str:
    """Return the text of a page with the signatures that the source has."""
    return SIGNATURE.sub(lambda x: x[1] + signature_of(x[2], x[3]) + x[5], text)


def is_excerpt(text: str, lines: list[str]) -> bool:
    """Return whether the parts of a text between lines of ... follow each other in source lines."""
    first = 0
    for part in re.split(r'^ *\.\.\.\n', text, flags=re.MULTILINE):
        size = len(part.splitlines())
        wanted = textwrap.dedent(part).rstrip()
        while textwrap.dedent('\n'.join(lines[first : first + size])).rstrip() != wanted:
            first += 1
            if first + size > len(lines):
                return False
        first += size
    return True


if __name__ == '__main__':
    page = ROOT / 'docs/api.md'
    page.write_text(with_signatures(page.read_text()))
