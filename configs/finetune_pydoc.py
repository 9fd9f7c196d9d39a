"""Fine-tunes the model of tiny.py: the body of a docstring is the input, its summary the target.

    python main.py --config=configs/tiny.py
    python main.py --config=configs/finetune_pydoc.py

Reproduces: no published run. It shows in a few minutes that pretraining helps, on data that every
machine with Python has. A docstring whose summary is in the validation split was in no batch of
pretraining either. From scratch: --config.restore.path='' --config.data.vocabulary=runs/tiny
--workdir=runs/from_scratch.
T5X: the settings of t5x/configs/runs/finetune.gin, with a larger learning rate for a small model.
Hardware and time: two CPU cores, two to four minutes.
Number to expect: a lower validation loss on text tokens than from scratch; docs/results.md has both.
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.model.dropout_rate = 0.1
    config.data.task = 'pydoc_summary'
    config.data.lengths.inputs = 128
    config.data.lengths.targets = 32
    config.restore.path = 'runs/tiny'
    config.restore.only = 'target/.*'
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 0.01
    config.train.steps = 400
    config.eval.every_steps = 100
    config.save.every_steps = 100
    return config
