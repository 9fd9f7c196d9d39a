"""configs/tiny.py with the activation of squared_relu.py, in this folder.

    python main.py --config=examples/squared_relu/tiny_squared_relu.py

Reproduces: no published run. It shows how a run gets a model and settings from outside of the checkout's
files. Evaluation, inference and checkpoints work as in any run.
Hardware and time: as for configs/tiny.py.
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
