"""nanoT5's pretraining of T5 1.1 base, with its AdamW: `--config=configs/nano.py` or `nano.py:SIZE`.

    python main.py --config=configs/nano.py --config.data.vocabulary=FILE \
      --config.data.files='C4/en/c4-train.000[0-3]?-of-01024.json.gz' \
      --config.data.validation_files='C4/en/c4-validation.*.json.gz'

Reproduces: the best cell of nanoT5's README (Nawrot 2023), nanoT5/configs/default.yaml: 65,536 steps of
128 rows, updates in proportion to their parameters, a cosine from 0.02, no dropout, no z-loss. Its README
also has Adafactor with this cosine (1.993 nats) and without (1.995).
Differs from nanoT5: its rate ends at 1e-5, ours is cut off there; it adds epsilon before it corrects the
bias of the second moments, which has an effect in the first hundred steps.
Data: C4 as JSON Lines. The run reads 4.8e9 tokens, some 30 of the 1,024 files, 10 GB.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Hardware and time: a step takes 5.5e13 FLOPs, the run 3.6e18: five hours on a GPU that sustains 200 TFLOP/s
(nanoT5: 10.2 hours on an A100). One H100 has room for a step without microbatches: 50 of 53 GiB.
Number to expect: 1.953 nats per target token on C4's validation split (nanoT5); T5's authors have 1.942
after as many steps (Shazeer 2020, GEGLU).
"""

from configs import base, t5_1_1


def get_config(size: str = 'base'):
    config = base.get_config()
    config.model = t5_1_1.get_config(size).model
    config.data.task = 'c4_v220_span_corruption'
    config.loss.z_loss = 0.0
    config.loss.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    config.optimizer.name = 'adamw'
    config.optimizer.adamw.multiply_by_parameter_scale = True
    config.optimizer.adamw.weight_decay = 0.0
    config.optimizer.adamw.epsilon = 1e-6
    config.optimizer.global_norm_clip_threshold = 1.0
    config.learning_rate.factors = 'constant * linear_warmup_from_half * cosine_decay'
    config.learning_rate.base_learning_rate = 0.02
    config.learning_rate.warmup_steps = 10_000
    config.learning_rate.steps_per_cycle = 55_536
    config.learning_rate.min_learning_rate = 1e-5
    config.train.steps = 65_536
    config.eval.every_steps = 16_384
    config.eval.steps = 500
    config.save.every_steps = 8192
    return config
