"""Summaries of CNN/DailyMail: `--config=configs/cnn_dailymail.py:MODEL:SIZE`, by default t5:base.

    python main.py --config=configs/cnn_dailymail.py --config.data.tfds_dir=FOLDER \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE
    python main.py --mode=evaluate --checkpoint=runs/cnn_dailymail --split=test

Reproduces: the fine-tuning of Raffel et al. 2020 (§2.4) on CNN/DailyMail: 262,144 steps, and decoding with
four beams and a brevity penalty of 0.6. ROUGE is computed on the full validation split, 13,368 articles.
Data: TFDS's cnn_dailymail:3.4.0 in data.tfds_dir.
T5X: t5x/configs/runs/finetune.gin with cnn_dailymail_v002, lengths 512 and 512.
Hardware and time: 2.6e19 FLOPs, 36 hours on a GPU that sustains 200 TFLOP/s, and the decoding.
Number to expect: the released T5 base has ROUGE-1, -2 and -L of 42.05, 20.34 and 39.40 on the test set
(Table 14); a T5 base pretrained without this task has ROUGE-2 of 19.24 on the validation set (Table 1).
"""

from configs import finetune


def get_config(model: str = 't5:base'):
    config = finetune.get_config(model)
    config.data.task = 'cnn_dailymail_v002'
    config.data.lengths.inputs = 512
    config.data.lengths.targets = 512
    config.train.relative_steps = 262_144
    config.decode.beam_size = 4
    config.infer_eval.every_steps = 20_000
    return config
