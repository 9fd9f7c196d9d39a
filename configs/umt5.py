"""umT5 as released: `--config=configs/umt5.py:SIZE` with small, base, large, xl or xxl.

    python main.py --config=configs/umt5.py:base --config.data.vocabulary=FILE --config.data.files=GLOB

Reproduces: the pretraining of Chung et al. 2023, span corruption on mC4 with UniMax shares, which the files
must have. Each layer has a table of relative positions. Fine-tune with dropout 0.1, 512 and 512 tokens, batch
64 and a constant rate of 5e-4 (t5x/examples/scalable_t5/umt5/runs/finetuning_common.gin).
T5X: t5x/examples/scalable_t5/umt5/pretrain_SIZE.gin and runs/pretraining_common.gin.
Checkpoints: gs://t5-data/pretrained_models/t5x/umt5/SIZE/checkpoint_1000000 for small, base, xl and xxl,
their layers stacked in each array.
Vocabulary: gs://t5-data/vocabs/umt5.256000/sentencepiece.model, to which 300 sentinels are added.
Checked here: names, shapes and number of parameters.
"""

from configs import t5_1_1


def get_config(size: str = 'base'):
    config = t5_1_1.get_config(size)
    config.model.update(vocab_size=256384, relpos_bias_per_layer=True)
    config.data.task = 'span_corruption'
    config.data.update(num_pieces=256_000, extra_ids=300)
    config.data.lengths.update(inputs=1024, targets=229)
    config.train.batch_size = 1024
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.eval.every_steps = config.save.every_steps = 2000
    if size == 'xxl':
        config.optimizer.update(beta1=0.9, factored=False, global_norm_clip_threshold=1.0)
    return config
