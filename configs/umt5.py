"""umT5 as released: `--config=configs/umt5.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/umt5.py:base --config.data.vocabulary=FILE

Reproduces: the pretraining of Chung et al. 2023, span corruption on mC4. Each layer has its own
table of relative positions. To fine-tune, use dropout 0.1, 512 and 512 tokens, batch 64 and a
constant rate of 5e-4 (t5x/examples/scalable_t5/umt5/runs/finetuning_common.gin).
Data: as in mt5.py. The rates are mT5's; UniMax's rates depend on the characters of each language
and are not published as numbers: write a mixture with yours in data.module.
T5X: t5x/examples/scalable_t5/umt5/pretrain_SIZE.gin and runs/pretraining_common.gin.
Checkpoints: gs://t5-data/pretrained_models/t5x/umt5/SIZE/checkpoint_1000000 for small, base, xl and
xxl. Each array holds the stacked parameters of all layers.
Vocabulary: gs://t5-data/vocabs/umt5.256000/sentencepiece.model, to which 300 sentinels are added.
Hardware and time: a run takes a pod of TPUs; tests check names, shapes and number of parameters.
Number to expect: none is published for the loss.
"""

from configs import t5_1_1


def get_config(size: str = 'base'):
    config = t5_1_1.get_config(size)
    config.model.vocab_size = 256384
    config.model.relpos_bias_per_layer = True
    config.data.task = 'mc4'
    config.data.num_pieces = 256_000
    config.data.extra_ids = 300
    config.data.lengths.inputs = 1024
    config.data.lengths.targets = 229
    config.data.pack = 'no'
    config.train.batch_size = 1024
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.eval.every_steps = 2000
    config.log.every_steps = 500
    config.save.every_steps = 2000
    if size == 'xxl':
        config.optimizer.beta1 = 0.9
        config.optimizer.factored = False
        config.optimizer.global_norm_clip_threshold = 1.0
    return config
