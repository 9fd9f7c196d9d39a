"""Flan-T5: `--config=configs/flan_t5.py:SIZE` with small, base, large, xl or xxl.

The models of Chung et al. 2022, LM-adapted T5 1.1 after instruction tuning, to fine-tune further or to infer
with. Batch, rate and dropout are the paper's; its data are not among the tasks here, so name your own with
--config.data.task.
T5X: the model is t5x/examples/t5/t5_1_1/SIZE.gin; no gin of the run is published.
Checkpoints: gs://t5-data/pretrained_models/t5x/flan_t5_{small/checkpoint_1198000, base/checkpoint_1184000,
large/checkpoint_1164000, xl/checkpoint_1138000, xxl/checkpoint_1114000}.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Checked here: names, shapes and number of parameters.
"""

from configs import t5_1_1_lm

STEPS = {'small': 1_198_000, 'base': 1_184_000, 'large': 1_164_000, 'xl': 1_138_000}
STEPS |= {'xxl': 1_114_000}  # those before them are T5 1.1's and the adaptation's


def get_config(size: str = 'base'):
    config = t5_1_1_lm.get_config(size)
    config.model.dropout_rate = 0.05
    config.data.task = ''
    config.train.update(steps=STEPS[size], batch_size=64)
    config.learning_rate.update(factors='constant', base_learning_rate=5e-4)
    return config
