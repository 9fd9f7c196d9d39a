"""T5 1.1 LM-adapted: `--config=configs/t5_1_1_lm.py:SIZE` with small, base, large, xl or xxl.

Reproduces: the 100,000 steps of prefix language modelling that follow T5 1.1's pretraining (Lester et al.
2021; T0, Flan-T5 and prompt tuning start from them). The batch is that of t5x issue 1198; the divisor of the
loss is Mesh-TF's, batch times target length.
T5X: the model is t5x/examples/t5/t5_1_1/SIZE.gin; no gin of the run is published.
Checkpoints: gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_SIZE/checkpoint_1100000.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Checked here: names, shapes and number of parameters.
"""

from configs import t5_1_1


def get_config(size: str = 'base'):
    config = t5_1_1.get_config(size)
    config.data.task = 'c4_v220_prefix_lm'
    config.data.lengths.update(inputs=1024, targets=256)
    config.train.update(steps=1_100_000, batch_size=1024)
    config.loss.loss_normalizing_factor = '262144'  # 1024 * 256
    return config
