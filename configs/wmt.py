"""WMT14 English to German from T5 1.1: `--config=configs/wmt.py:MODEL:SIZE`, by default t5_1_1:base.

    python main.py --config=configs/wmt.py --config.data.tfds_dir=FOLDER \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE
    python main.py --mode=evaluate --checkpoint=runs/wmt --split=test

Reproduces: t5x/examples/t5/t5_1_1/examples/base_wmt_finetune.gin: 20,000 steps, 1,020,000 with those
of pretraining; the validation split is decoded with four beams. T5X does that every 100 steps, this
run every 5,000. small_wmt_finetune.gin is wmt.py:t5_1_1:small --config.model.dropout_rate=0.0.
Data: TFDS's wmt_t2t_translate/de-en:1.0.0, 4.6 million pairs, in data.tfds_dir; newstest2013 is its
validation split, newstest2014 its test split.
Hardware and time: 9.3e17 FLOPs, 1.3 hours on a GPU that sustains 200 TFLOP/s, and the decoding.
Number to expect: none is published for T5 1.1. T5 base, pretrained without translation, has BLEU 26.98
on newstest2013 after 262,144 steps; the released T5 base, which saw WMT in pretraining, 30.9 on
newstest2014 (Raffel et al. 2020, Tables 1 and 14).
"""

from configs import finetune


def get_config(model: str = 't5_1_1:base'):
    config = finetune.get_config(model)
    config.data.task = 'wmt_t2t_ende_v003'
    config.data.lengths.inputs = 256
    config.data.lengths.targets = 256
    config.decode.beam_size = 4
    config.infer_eval.every_steps = 5000
    config.infer_eval.batch_size = 64
    return config
