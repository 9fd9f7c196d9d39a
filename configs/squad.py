"""SQuAD 1.1: `--config=configs/squad.py:MODEL:SIZE`, by default t5:base. (SQuAD 2.0: qa_csv.py.)

    python main.py --config=configs/squad.py --config.data.tfds_dir=FOLDER \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE

Reproduces: the fine-tuning of Raffel et al. 2020 (§2.4) on SQuAD: 262,144 steps; exact match and F1 are
computed at each checkpoint, every 5,000. 20,000 steps come near: --config.train.relative_steps=20000.
Data: TFDS's squad/v1.1:3.0.0 in data.tfds_dir.
T5X: t5x/configs/runs/finetune.gin with squad_v010_allanswers, lengths 512 and 97.
Hardware and time: 1.4e19 FLOPs, 19 hours on a GPU that sustains 200 TFLOP/s; 20,000 steps 1.4 hours.
Number to expect: on the validation set, the released T5 base has exact match 85.44 and F1 92.08 (Table
14), and one pretrained without SQuAD has exact match 80.88 (Table 1).
"""

from configs import finetune


def get_config(model: str = 't5:base'):
    config = finetune.get_config(model)
    config.data.task = 'squad_v010_allanswers'
    config.data.lengths.inputs = 512
    config.data.lengths.targets = 97
    config.train.relative_steps = 262_144
    config.infer_eval.every_steps = 5000
    return config
