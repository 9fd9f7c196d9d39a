"""Flan-T5: `--config=configs/flan_t5.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/flan_t5.py:base --config.restore.path=CHECKPOINT --config.data.task=NAME

Reproduces: the models of Chung et al. 2022, LM-adapted T5 1.1 after instruction tuning, to
fine-tune further or to infer with. Batch, learning rate and dropout are the paper's. The mixture of
the instruction tuning is not included: data.task names the task to fine-tune on, by default GLUE.
T5X: the model is t5x/examples/t5/t5_1_1/SIZE.gin. The gin of the run is not published.
Checkpoints: gs://t5-data/pretrained_models/t5x/flan_t5_{small/checkpoint_1198000,
base/checkpoint_1184000, large/checkpoint_1164000, xl/checkpoint_1138000, xxl/checkpoint_1114000}.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: a run takes a pod of TPUs; tests check names, shapes and number of parameters.
Number to expect: none is published for the loss.
"""

from configs import t5_1_1_lm

# The last step, counted from the first step of T5 1.1's pretraining.
STEPS = {
    'small': 1_198_000,
    'base': 1_184_000,
    'large': 1_164_000,
    'xl': 1_138_000,
    'xxl': 1_114_000,
}


def get_config(size: str = 'base'):
    config = t5_1_1_lm.get_config(size)
    config.model.dropout_rate = 0.05
    config.data.task = 'glue_v002_proportional'
    config.train.steps = STEPS[size]
    config.train.batch_size = 64
    config.learning_rate.factors = 'constant'
    config.learning_rate.base_learning_rate = 5e-4
    return config
