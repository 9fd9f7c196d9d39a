"""UL2 20B, and Flan-UL2: `--config=configs/ul2.py` and `--config=configs/ul2.py:flan`.

The models of Tay et al. 2022 (google-research/ul2), to fine-tune or to infer with. The mixture of denoisers
that they were trained on and Flan's data are not among the tasks here: name your own with
--config.data.task. Batch and lengths are the model card's.
T5X: the model's gin, gs://scenic-bucket/ul2/ul220b/config.gin, is not in the repository; the sizes are those
of the model cards, T5 1.1's shape with silu for gelu.
Checkpoints: gs://scenic-bucket/ul2/ul220b/checkpoint_{1870000,2050000,2650000}, and
gs://scenic-bucket/ul2/flan-ul220b-v3 at step 2283000.
Vocabulary: gs://t5-data/vocabs/cc_all.32000/sentencepiece.model.
Checked here: names, shapes and number of parameters.
"""

from configs import base

STEPS = {'20b': 2_650_000, 'flan': 2_283_000}


def get_config(version: str = '20b'):
    if version not in STEPS:
        raise ValueError(f'configs/ul2.py:{version}: use one of {", ".join(STEPS)}')
    config = base.get_config()
    config.model.update(emb_dim=4096, num_heads=16, head_dim=256, mlp_dim=16384, dtype='bfloat16')
    config.model.update(num_encoder_layers=32, num_decoder_layers=32)
    config.model.mlp_activations = ('silu', 'linear')
    config.data.task = ''
    config.data.lengths.update(inputs=512, targets=512)
    config.train.update(steps=STEPS[version], batch_size=1024)
    return config
