"""configs/tiny.py with the activation of squared_relu.py, which lies beside this file.

    python main.py --config=examples/squared_relu/tiny_squared_relu.py

Reproduces: no published run. It shows how a run has its own model, and its own settings, outside of
the checkout's files. Evaluation, inference and the checkpoints are those of any run.
Hardware and time: as configs/tiny.py.
Number to expect: not measured.
"""

import pathlib

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.module = str(pathlib.Path(__file__).with_name('squared_relu.py'))
    config.model.mlp_activations = ('squared_relu',)
    # Two matrices of this width have the parameters of tiny's three.
    config.model.mlp_dim = 384
    return config
