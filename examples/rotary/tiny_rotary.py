"""configs/tiny.py with the rotary positions of rotary.py, which lies beside this file.

    python main.py --config=examples/rotary/tiny_rotary.py

Reproduces: no published run. It shows how one class changes attention for training and decoding.
Hardware and time: as configs/tiny.py.
Number to expect: not measured.
"""

import pathlib

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.module = str(pathlib.Path(__file__).with_name('rotary.py'))
    return config
