"""configs/tiny.py with the window of sliding_window.py, in this folder.

    python main.py --config=examples/sliding_window/tiny_sliding_window.py

Reproduces: no published run. It shows how one method changes what attention sees, and an option.
Hardware and time: as for configs/tiny.py.
Number to expect: not measured.
"""

import pathlib

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.module = str(pathlib.Path(__file__).with_name('sliding_window.py'))
    config.model.options.window = 16
    return config
