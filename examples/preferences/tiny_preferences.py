"""Preferences for short answers, from the model of configs/qa_csv.py:tiny.

    python main.py --config=configs/tiny.py
    python examples/preferences/pairs.py
    python main.py --config=configs/qa_csv.py:tiny --config.data.files=answers.csv --config.train.epochs=20 --workdir=runs/qa
    python main.py --mode=infer --score --checkpoint=runs/qa --input=pairs.jsonl --output_dir=chosen --fields=all \
      --config.data.inputs='{prompt}' --config.data.targets='{chosen}'
    python main.py --mode=infer --score --checkpoint=runs/qa --input=pairs.jsonl --output_dir=rejected --fields=all \
      --config.data.inputs='{prompt}' --config.data.targets='{rejected}'
    python examples/preferences/pairs.py chosen/pairs-score.jsonl rejected/pairs-score.jsonl
    python main.py --config=examples/preferences/tiny_preferences.py

Reproduces: no published run. The reference is the initial model; scored.jsonl has its scores.
Hardware and time: two CPU cores, half a minute; the runs before take five.
Number to expect: of the held-out pairs, the share whose chosen answer is more likely rises from 0.29 to 1.00 (preferred).
"""

import pathlib

from configs import qa_csv


def get_config():
    config = qa_csv.get_config('tiny')
    module = str(pathlib.Path(__file__).with_name('preferences.py'))
    config.restore.path = 'runs/qa'
    config.model.dropout_rate = 0.0  # the reference has none
    config.data.update(module=module, task='preferences', inputs='', targets='', metrics='')
    # The loss is a mean over the answers.
    config.loss.update(module=module, z_loss=0.0, loss_normalizing_factor='AVERAGE_PER_SEQUENCE')
    config.learning_rate.base_learning_rate = 0.001
    config.train.epochs = 1
    config.infer_eval.every_steps = 0
    return config
