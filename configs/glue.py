"""GLUE, all tasks at once: `--config=configs/glue.py:MODEL:SIZE`, by default t5:small.

    python main.py --config=configs/glue.py --config.data.tfds_dir=FOLDER \
      --config.restore.path=CHECKPOINT --config.data.vocabulary=FILE
    python main.py --mode=evaluate --checkpoint=runs/glue --step=all \
      --config.infer_eval.task=glue_v002_proportional

Reproduces: the example of t5x/docs/usage/finetune.md: 500,000 steps on GLUE's mixture, with only STS-B
evaluated in training. The second command evaluates all tasks; results.csv then also has the average of
GLUE.
Data: TFDS's glue/*:1.0.0 in data.tfds_dir, or newer versions.
Hardware and time: T5 small 6.3e18 FLOPs, 18 hours on a GPU that sustains 100 TFLOP/s.
Number to expect: on average, the released T5 small has 77.4 and base 82.7 on the test sets, whose
labels are not public (Raffel et al. 2020, Table 14); a T5 base pretrained without GLUE has 83.28 on the
validation sets (Table 1).
"""

from configs import finetune


def get_config(model: str = 't5:small'):
    config = finetune.get_config(model)
    config.data.task = 'glue_v002_proportional'
    config.data.lengths.inputs = 512
    config.data.lengths.targets = 84
    config.train.relative_steps = 500_000
    config.infer_eval.task = 'glue_stsb_v002'
    config.infer_eval.every_steps = 1000
    return config
