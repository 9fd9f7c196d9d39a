"""WMT14 English to German without pretraining: T5 1.1 base, or `--config=configs/wmt_from_scratch.py:SIZE`.

    python main.py --config=configs/wmt_from_scratch.py --config.data.tfds_dir=FOLDER \
      --config.data.vocabulary=FILE
    python main.py --mode=evaluate --checkpoint=runs/wmt_from_scratch --split=test

Reproduces: t5x/examples/t5/t5_1_1/examples/base_wmt_from_scratch.gin: 50,000 steps of 128 packed rows
with the pretraining schedule, a checkpoint every 5,000 steps, and decoding with four beams. T5X
decodes the validation split every 500 steps, this run every 5,000, and T5X splits the model over two
devices: --config.mesh.model=2.
Data: as in configs/wmt.py. Without data.vocabulary, a vocabulary is trained on these texts.
Hardware and time: 2.3e18 FLOPs, 3.2 hours on a GPU that sustains 200 TFLOP/s, and the decoding.
Number to expect: none is published for this run. T5 base without pretraining has BLEU 25.86 on
newstest2013 after 262,144 steps (Raffel et al. 2020, Table 1).
"""

from configs import base, t5_1_1


def get_config(size: str = 'base'):
    config = base.get_config()
    config.model = t5_1_1.get_config(size).model
    config.data.task = 'wmt_t2t_ende_v003'
    config.data.lengths.inputs = 256
    config.data.lengths.targets = 256
    config.train.steps = 50_000
    config.eval.every_steps = 500
    config.save.every_steps = 5000
    config.decode.beam_size = 4
    config.infer_eval.every_steps = 5000
    return config
