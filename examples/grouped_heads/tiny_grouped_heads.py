"""configs/tiny.py with the shared keys and values of grouped_heads.py, which lies beside this file.

    python main.py --config=examples/grouped_heads/tiny_grouped_heads.py

Reproduces: no published run. It shows how keys, values and the cache change.
Hardware and time: as configs/tiny.py.
Number to expect: not measured.
"""

import pathlib

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.module = str(pathlib.Path(__file__).with_name('grouped_heads.py'))
    config.model.options.num_kv_heads = 2  # for four query heads
    return config
