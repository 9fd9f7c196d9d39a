"""mT5 as released: `--config=configs/mt5.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/mt5.py:base --config.data.vocabulary=FILE

Reproduces: the pretraining of Xue et al. 2021, span corruption on mC4. Its languages are drawn by
their numbers of documents to the power of 0.3. To fine-tune, use dropout 0.1 and the same divisor of
the loss; tasks/mt5.py has the tasks and their lengths.
Data: TFDS's c4/multilingual:3.0.1 in data.tfds_dir, prepared with all 107 languages. For others, write
a mixture in data.module. For files, use --config.data.task=span_corruption --config.data.files=GLOB.
T5X: t5x/examples/t5/mt5/SIZE.gin with t5x/configs/runs/pretrain.gin.
Checkpoints: gs://t5-data/pretrained_models/t5x/mt5_SIZE/checkpoint_1000000 and, LM-adapted,
mt5_lm_adapted/SIZE/checkpoint_1100000.
Vocabulary: gs://t5-data/vocabs/mc4.250000.100extra/sentencepiece.model, which includes the
sentinels.
Hardware and time: a run takes a pod of TPUs; tests check names, shapes and number of parameters.
Number to expect: none is published for the loss.
"""

from configs import t5_1_1


def get_config(size: str = 'base'):
    config = t5_1_1.get_config(size)
    config.model.vocab_size = 250112
    config.data.task = 'mc4'
    config.data.num_pieces = 250_100
    config.data.extra_ids = 0
    config.data.lengths.inputs = 1024
    config.data.lengths.targets = 229
    config.train.batch_size = 1024
    # Batch size times target length: 1024 * 229.
    config.loss.loss_normalizing_factor = '234496'
    return config
