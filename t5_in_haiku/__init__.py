"""The program's one name in other folders: `from t5_in_haiku import infer, tasks, model`.

An editable install (`pip install -e .`) publishes it. Each file of the program is loaded once in a
process:
- In the checkout it has its plain name, and `t5_in_haiku.model` is the module `model`.
- Elsewhere it is loaded as `t5_in_haiku.X`, and so is what its own imports name: `import model` in
  one of the program's files is `t5_in_haiku.model`, also inside functions and in spawned processes.
  A `model.py` of yours stays `model`.

A process is in the checkout if, when it first imports this package, all plain names mean the
program's files: each is loaded from its file, or `import` would find that file first. It stays there
when its folder or sys.path changes.
"""

import builtins
import importlib
import pathlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if not (ROOT / 'main.py').is_file():
    raise ImportError(
        f'{ROOT} is not the checkout, which t5_in_haiku needs: run pip install -e . in the checkout'
    )
PREFIX = f'{__name__}.'
NAMES = {file.stem for file in ROOT.glob('*.py')}
NAMES |= {file.parent.name for file in ROOT.glob('*/__init__.py')}
NAMES -= {'setup', __name__}


def is_ours(name: str, path: Sequence[str] | None = None) -> bool:
    """Return whether a plain name means the program's file: loaded from it, or found there."""
    if sys.modules.get(name):
        file = getattr(sys.modules[name], '__file__', None)
    else:
        spec = PathFinder.find_spec(name, path)
        file = spec.origin if spec else None
    stem = ROOT.joinpath(*name.split('.'))
    ours = (stem.with_suffix('.py'), stem / '__init__.py')
    return file is not None and pathlib.Path(file).resolve() in ours


IN_CHECKOUT = all(map(is_ours, NAMES))


class Finder(MetaPathFinder):
    """Find the program's files under both names: one loads the file, the other is an alias."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        plain = name.removeprefix(PREFIX)
        if plain.partition('.')[0] not in NAMES:
            return None
        if name == plain and not IN_CHECKOUT:  # ours if the checkout came into sys.path
            return ModuleSpec(name, Alias(PREFIX + name)) if is_ours(name, path) else None
        folder = ROOT.joinpath(*plain.split('.')[:-1])
        spec = PathFinder.find_spec(name, [str(folder)])
        if name != plain and spec is not None and spec.has_location:
            is_loaded = plain in sys.modules and is_ours(plain)
            spec.loader = OurLoader(name, str(spec.origin))
            if IN_CHECKOUT or is_loaded:
                spec.loader = Alias(plain)
        return spec


class Alias(Loader):
    """Give the module `name` a second name."""

    def __init__(self, name: str):
        self.name = name

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.name)


class OurLoader(SourceFileLoader):
    """Load a file whose `import` statements call `import_ours`."""

    def exec_module(self, module: ModuleType) -> None:
        vars(module)['__builtins__'] = vars(builtins) | {'__import__': import_ours}
        super().exec_module(module)


def import_ours(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import as `__import__` does, but take our plain names as those below `t5_in_haiku`.

    A user's file that one of ours executes inherits these builtins and keeps its own names.
    """
    top = name.partition('.')[0]
    importer = (globals or {}).get('__name__', '')
    if level or top not in NAMES or not importer.startswith(PREFIX):
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    module = builtins.__import__(PREFIX + name, globals, locals, fromlist or ())
    return module if fromlist else sys.modules[PREFIX + top]


sys.meta_path.insert(0, Finder())
