"""T5 1.1 LM-adapted: `--config=configs/t5_1_1_lm.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/t5_1_1_lm.py:base --config.restore.path=CHECKPOINT \
      --config.data.vocabulary=FILE --config.data.files=GLOB

Reproduces: the 100,000 steps of prefix language modelling after T5 1.1's pretraining (Lester et al.
2021). T0, Flan-T5 and prompt tuning start from these models. The batch is from t5x issue 1198;
the divisor of the loss is Mesh-TF's, batch size times target length.
T5X: the model is t5x/examples/t5/t5_1_1/SIZE.gin. The gin of the run is not published.
Checkpoints: gs://t5-data/pretrained_models/t5x/t5_1_1_lm100k_SIZE/checkpoint_1100000.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: base takes 9.7e19 FLOPs, 135 hours of a GPU that sustains 200 TFLOP/s; xxl 4.5e21.
Number to expect: none is published for the loss.
"""

from configs import t5_1_1


def get_config(size: str = 'base'):
    config = t5_1_1.get_config(size)
    config.data.task = 'c4_v220_prefix_lm'
    config.data.lengths.inputs = 1024
    config.data.lengths.targets = 256
    config.restore.path = 'CHECKPOINT'  # the command line names it; '' is from scratch
    config.train.steps = 1_100_000
    config.train.batch_size = 1024
    # Batch size times target length: 1024 * 256.
    config.loss.loss_normalizing_factor = '262144'
    return config
