"""The program's one name in other folders: `from t5_in_haiku import infer, tasks, model`.

An editable install (`pip install -e .`) publishes it. In the checkout `t5_in_haiku.model` is an alias
of `model`. Elsewhere the file is loaded as `t5_in_haiku.model`, and `import model` in the program's
files is compiled as an import of that; in your files it imports your `model.py`. A process is in the
checkout if, when it first imports this package, all plain names mean the program's files.
"""

import ast
import importlib
import pathlib
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

ROOT = pathlib.Path(__file__).resolve().parents[1]
if not (ROOT / 'main.py').is_file():
    raise ImportError(f'{ROOT} is not the checkout: run pip install -e . in the checkout')
PREFIX = f'{__name__}.'
FILES = {file.stem: file for file in ROOT.glob('*.py')}
FILES |= {file.parent.name: file for file in ROOT.glob('*/__init__.py')}
del FILES['setup'], FILES[__name__]


def is_ours(name: str) -> bool:
    """Return whether a plain name such as `model` means the program's file."""
    spec = getattr(sys.modules.get(name), '__spec__', None) or PathFinder.find_spec(name)
    return spec is not None and pathlib.Path(spec.origin or '').resolve() == FILES[name]


class Importer(SourceFileLoader):
    """Load each file of the program once; its other name is an alias."""

    @staticmethod
    def find_spec(name: str, path: object, target: object = None) -> ModuleSpec | None:
        is_plain = not name.startswith(PREFIX)
        top, *below = name.removeprefix(PREFIX).split('.')
        if top not in FILES or is_plain and not IN_CHECKOUT and not is_ours(top):
            return None
        spec = PathFinder.find_spec(name, [str(ROOT.joinpath(top, *below).parent)])
        if spec and spec.origin and not (is_plain and IN_CHECKOUT):
            spec.loader = Importer(name, spec.origin)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        plain = self.name.removeprefix(PREFIX)
        real_name = plain if IN_CHECKOUT else PREFIX + plain
        if self.name == real_name:
            return super().exec_module(module)
        sys.modules[self.name] = importlib.import_module(real_name)

    def get_code(self, fullname: str) -> CodeType:
        """Compile `import tasks.open` as `import t5_in_haiku.tasks.open, t5_in_haiku.tasks as tasks`."""
        tree = ast.parse(self.get_data(self.path), self.path)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                if str(node.module).split('.')[0] in FILES:
                    node.module = f'{PREFIX}{node.module}'
            elif isinstance(node, ast.Import):
                for alias in list(node.names):
                    top = alias.name.split('.')[0]
                    if top in FILES:
                        alias.name = PREFIX + alias.name
                        if alias.asname is None:
                            node.names.append(ast.alias(PREFIX + top, top))
        return compile(ast.fix_missing_locations(tree), self.path, 'exec', dont_inherit=True)


IN_CHECKOUT = all(map(is_ours, FILES))
sys.meta_path.insert(0, Importer)
