"""configs/tiny.py with the prompt of prompt_tuning.py, which lies beside this file, on the model of its run.

    python main.py --config=configs/tiny.py
    python main.py --config=examples/prompt_tuning/tiny_prompt_tuning.py

Reproduces: no published run. It shows how a run trains parameters of its own beside a base, and the
setting of its file: --config.model.options.length=50.
Hardware and time: as configs/tiny.py.
Number to expect: not measured.
"""

import pathlib

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.module = str(pathlib.Path(__file__).with_name('prompt_tuning.py'))
    config.restore.path = 'runs/tiny'
    config.data.pack = 'no'  # the prompt is that of a row
    # Lester et al. 2021 §3.
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 0.3
    return config
